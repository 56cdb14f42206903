"""`starquill batch` from a file to a file, also when it is killed on the way."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from starquill.cli.app import main
from starquill.engine.engine import Engine
from starquill.loading import load
from starquill.types import Hole, SamplingParams
from tests import tiny
from tests.cli.test_errors import error_line

Capture = pytest.CaptureFixture[str]
Json = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny.config(max_position_embeddings=512)
    return tiny.write_checkpoint(tmp_path_factory.mktemp("batch") / "model", raw)


def write(path: Path, lines: Sequence[object]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def read(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run(source: Path, target: Path, folder: Path, *more: str) -> int:
    return main(["batch", str(source), str(target), "--model", str(folder), *more])


def test_answers_are_those_of_single_runs(folder: Path, tmp_path: Path) -> None:
    """However many run at once; a line's fields go before those of --set."""
    lines: list[Json] = [{"id": f"n{n}", "prompt": f"def f{n}(", "seed": n} for n in range(20)]
    lines += [{"prefix": "a = ", "suffix": "\nb"}, {"prompt": "ab", "max_tokens": 3, "id": 7}]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    settings = ("--set", "max_tokens=9", "--set", "temperature=0.8", "--set", "seed=5")
    assert run(source, target, folder, *settings, "--slots", "3") == 0
    engine = Engine(load(folder))
    answers = sorted(read(target), key=lambda answer: answer["index"])
    assert [answer["index"] for answer in answers] == list(range(22))
    for number, answer in enumerate(answers[:20]):
        params = SamplingParams(max_tokens=9, temperature=0.8, seed=number)
        assert answer["text"] == engine.complete(f"def f{number}(", params)
        assert answer["id"] == f"n{number}"
        assert answer["usage"]["completion_tokens"] <= 9
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5)
    assert answers[20]["text"] == engine.fill(Hole("a = ", "\nb"), params)
    assert (answers[21]["id"], answers[21]["usage"]["completion_tokens"]) == (7, 3)
    assert all(answer["finish_reason"] in ("stop", "length") for answer in answers)


def test_ordered_answers_come_in_order(folder: Path, tmp_path: Path) -> None:
    """Also where the first lines take the longest, and by far."""
    lines = [
        {"prompt": "a", "max_tokens": 300 if n == 0 else 1, "temperature": 0} for n in range(99)
    ]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    assert run(source, target, folder, "--ordered", "--slots", "2") == 0
    assert [answer["index"] for answer in read(target)] == list(range(99))


BAD = {
    "nonsense": "not JSON",
    '{"prompt": "a", "temperature": NaN}': "NaN",
    "[1]": "expected a JSON object",
    "{}": "expected one of prompt, prefix, messages",
    '{"prompt": "a", "prefix": "b"}': "prompt and prefix",
    '{"prompt": "a", "top_p": 2}': "top_p",
    '{"prompt": ["a", "b"]}': "one text",
    '{"prompt": 1}': "one text",
    '{"prompt": "a", "n": 2}': "n and best_of",
    json.dumps({"prompt": "ab" * 400}): "context",
    '{"prompt": "a", "model": "other"}': "other",
    '{"messages": [{"role": "user", "content": "a"}]}': "chat template",
}


def test_bad_lines_are_told_and_counted(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    good = '{"id": "good", "prompt": "a", "temperature": 0}'
    source, target = write(tmp_path / "in", [*BAD, good]), tmp_path / "out"
    assert run(source, target, folder) == 1
    assert f"13 lines are answered, {len(BAD)} of them with an error" in capsys.readouterr().err
    answers = {answer["index"]: answer for answer in read(target)}
    for index, told in enumerate(BAD.values()):
        assert told in answers[index]["error"]
        assert "text" not in answers[index]
    assert answers[len(BAD)]["id"] == "good"
    assert run(source, target, folder) == 1
    assert len(read(target)) == 13


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere", "out"), "nowhere"),
        (("in", "in"), "input itself"),
        (("in", "no/such/folder"), "no/such/folder"),
        (("in", "out", "--set", "temperature"), "FIELD=VALUE"),
        (("in", "out", "--slots", "0"), "--slots"),
        (("in", "out", "--replicas", "2"), "--ray"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...],
    told: str,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", [{"prompt": "a"}])
    assert told in error_line(capsys, "batch", *arguments)


def test_other_settings_are_refused(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    source, target = write(tmp_path / "in", [{"prompt": "a"}]), tmp_path / "out"
    assert run(source, target, folder, "--set", "seed=1") == 0
    assert run(source, target, folder, "--set", "seed=1", "--slots", "1") == 0
    capsys.readouterr()
    assert run(source, target, folder, "--set", "seed=2") == 2
    assert "another model or other options" in capsys.readouterr().err


def test_killed_at_any_moment_it_goes_on(folder: Path, tmp_path: Path) -> None:
    """kill −9 when the output has reached some random size: all lines once, and right."""
    chance = random.Random(os.environ.get("PYTEST_SEED", "starquill"))
    count, length = 300, 20
    lines = [
        {"id": n, "prompt": f"def f{n}(", "max_tokens": length, "temperature": 0}
        for n in range(count)
    ]
    source, whole = write(tmp_path / "in", lines), tmp_path / "whole"
    assert run(source, whole, folder) == 0
    expected = {answer["index"]: answer["text"] for answer in read(whole)}
    target, kills = tmp_path / "out", 0
    command = [sys.executable, "-m", "starquill", "batch", str(source), str(target)]
    command += ["--model", str(folder)]
    size = whole.stat().st_size
    for share in sorted(chance.uniform(0, 0.9) for _ in range(3)):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while process.poll() is None and _size(target) < share * size:
            time.sleep(0.002)
        process.kill()
        kills += process.wait() != 0
        data = target.read_bytes() if target.exists() else b""
        for answer in map(json.loads, data[: data.rfind(b"\n") + 1].splitlines()):
            assert answer["text"] == expected[answer["index"]]
    assert kills, "nothing was interrupted"
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    answers = read(target)
    assert Counter(answer["index"] for answer in answers) == Counter(range(count))
    assert {answer["index"]: answer["text"] for answer in answers} == expected
    assert all(answer["id"] == answer["index"] for answer in answers)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
