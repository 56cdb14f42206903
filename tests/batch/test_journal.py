"""A batch's output: whole after any interruption, and refused where it is another batch's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from starquill.batch.journal import open_journal
from starquill.batch.lines import Line, read_lines
from starquill.errors import BadRequestError

RUN = "run"
INPUT = b'{"prompt": "a"}\n\n  {"prompt": "b"}\r\n{"prompt": "\xc3\xa9"}'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_bytes(INPUT)
    return tmp_path / "in.jsonl"


def answer(source: Path, target: Path, *, most: int = 99, ordered: bool = False) -> list[int]:
    """Answer what is left, `most` lines of it; their indexes."""
    answered = []
    with open_journal(source, target, RUN, ordered=ordered) as journal:
        for line in read_lines(source):
            if line.index not in journal.done and len(answered) < most:
                journal.write(line, {"index": line.index, "text": f"é{line.index}"})
                answered.append(line.index)
    return answered


def indexes(target: Path) -> list[int]:
    return [json.loads(raw)["index"] for raw in target.read_bytes().splitlines()]


def refusal(source: Path, target: Path, *, run: str = RUN, ordered: bool = False) -> str:
    before = target.read_bytes()
    with (
        pytest.raises(BadRequestError) as caught,
        open_journal(source, target, run, ordered=ordered),
    ):
        pass
    assert target.read_bytes() == before
    return str(caught.value)


def test_lines_are_numbered_with_blank_ones_and_told_by_their_text(source: Path) -> None:
    lines = list(read_lines(source))
    assert [line.index for line in lines] == [0, 2, 3]
    assert lines[1] == Line(2, b'{"prompt": "b"}')
    source.write_bytes(b"\xef\xbb\xbf" + INPUT + b"\n")
    assert [line.hash for line in read_lines(source)] == [line.hash for line in lines]


def test_cut_anywhere_it_goes_on(source: Path, tmp_path: Path) -> None:
    """Every length that a kill could leave: no line is lost, doubled or half."""
    whole = tmp_path / "whole.jsonl"
    assert answer(source, whole) == [0, 2, 3]
    data = whole.read_bytes()
    for length in range(len(data) + 1):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(data[:length])
        left = answer(source, cut)
        assert len(left) == 3 - data[:length].count(b"\n")
        assert cut.read_bytes() == data
        assert answer(source, cut) == []


def test_lines_may_be_added_at_the_end(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    answer(source, target)
    source.write_bytes(INPUT + b'\n{"prompt": "c"}\n')
    assert answer(source, target) == [4]


def test_another_input_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    answer(source, target)
    source.write_bytes(INPUT.replace(b"b", b"c"))
    assert "line 3" in refusal(source, target)
    source.write_bytes(INPUT[:17])
    assert "2 lines" in refusal(source, target)


def test_another_run_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    answer(source, target)
    assert "another model" in refusal(source, target, run="other")


@pytest.mark.parametrize("text", [b"text\n", b"[]\n", b'{"index": true, "input": "", "run": ""}\n'])
def test_a_file_that_is_no_output_is_left_alone(source: Path, tmp_path: Path, text: bytes) -> None:
    target = tmp_path / "notes.txt"
    target.write_bytes(text)
    assert "line 1" in refusal(source, target)
    assert "input itself" in refusal(source, source)


def test_a_line_answered_twice_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    answer(source, target)
    data = target.read_bytes()
    target.write_bytes(data + data.splitlines(keepends=True)[1])
    assert "line 3 twice" in refusal(source, target)


def test_a_second_writer_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with open_journal(source, target, RUN, ordered=False):
        assert "another process" in refusal(source, target)
    assert answer(source, target) == [0, 2, 3]


def test_order_cannot_be_had_afterwards(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    answer(source, target)
    first, second, third = target.read_bytes().splitlines(keepends=True)
    for mixed in (second, third + first, second + first + third):
        target.write_bytes(mixed)
        assert "--ordered" in refusal(source, target, ordered=True)
    target.write_bytes(first + second)
    assert answer(source, target, ordered=True) == [3]
    assert indexes(target) == [0, 2, 3]


def test_text_that_is_no_utf_8_is_kept(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with open_journal(source, target, RUN, ordered=False) as journal:
        journal.write(next(read_lines(source)), {"id": "\ud800", "index": 0, "error": "x"})
        assert journal.failed == 1
    assert json.loads(target.read_bytes())["id"] == "\ud800"
