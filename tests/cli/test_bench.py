"""`starquill bench`: what is printed where, and errors before anything is measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from starquill.cli.app import main
from starquill.engine import bench
from tests import tiny

Capture = pytest.CaptureFixture[str]
SHORT = ("--prompt", "4,20", "--depth", "0,12", "--batch", "1,3", "--tokens", "5")
COLUMNS = ["tokens", "depth", "batch", "tokens/s", "±", "ms/token", "weights", "GB/s"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _refused(capsys: Capture, *arguments: str) -> str:
    """Exit code 2, nothing on standard output, and one line on standard error."""
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err


def test_json_has_every_measurement_and_its_subject(folder: Path, capsys: Capture) -> None:
    arguments = (*SHORT, "--rounds", "2", "--threads", "2", "--quant", "8", "--json")
    assert main(["bench", str(folder), *arguments]) == 0
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    found = json.loads(out)
    assert found["model"] == str(folder)
    assert found["threads"] == 2
    assert found["rounds"] == 2
    assert found["schemes"]["q_proj"] == {"q8-g64": 2}
    assert {"starquill", "torch", "python"} <= set(found["versions"])
    assert "instruction_set" in found
    cases = [(m["kind"], m["tokens"], m["depth"], m["batch"]) for m in found["measurements"]]
    assert cases == [
        ("prefill", 4, 0, 1),
        ("prefill", 20, 0, 1),
        ("decode", 5, 0, 1),
        ("decode", 5, 0, 3),
        ("decode", 5, 12, 1),
        ("decode", 5, 12, 3),
    ]
    for one in found["measurements"]:
        assert len(one["seconds"]) == 2
        assert one["tokens_per_second"] > 0
        assert one["milliseconds_per_token"] > 0
        assert one["deviation"] >= 0
        read = one["weight_bytes_per_second"]
        assert read is None if one["kind"] == "prefill" else read > 0


def _one_second_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.measure

    def measured(*arguments: Any, lease: Any) -> Any:
        ticks = iter(range(1000))
        return real(*arguments, lease=lease, clock=lambda: float(next(ticks)))

    monkeypatch.setattr(bench, "measure", measured)


def test_the_table_in_a_pipe_is_plain(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _one_second_a_round(monkeypatch)
    assert main(["bench", str(folder), *SHORT]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert "│" not in out
    assert "float32: embed_tokens, q_proj" in out
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if "tokens/s" in line)
    assert lines[head].split() == COLUMNS
    rows = [line.split() for line in lines[head + 1 :]]
    size = bench.weight_bytes(bench_model(folder))
    assert rows == [
        ["prefill", "4", "0", "1", "4.00", "0.00", "250.000"],
        ["prefill", "20", "0", "1", "20.00", "0.00", "50.000"],
        ["decode", "5", "0", "1", "5.00", "0.00", "200.000", f"{5 * size / 1e9:.2f}"],
        ["decode", "5", "0", "3", "15.00", "0.00", "200.000", f"{5 * size / 1e9:.2f}"],
        ["decode", "5", "12", "1", "5.00", "0.00", "200.000", f"{5 * size / 1e9:.2f}"],
        ["decode", "5", "12", "3", "15.00", "0.00", "200.000", f"{5 * size / 1e9:.2f}"],
    ]


def bench_model(folder: Path) -> Any:
    from starquill.loading import load

    return load(folder)


def test_the_table_on_a_terminal_has_lines(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["bench", str(folder), "--prompt", "4", "--tokens", "0"]) == 0
    out = capsys.readouterr().out
    assert "│ prefill │" in out
    assert "decode" not in out


def test_the_model_is_named_either_way(folder: Path, capsys: Capture) -> None:
    short = ("--prompt", "2", "--tokens", "0", "--rounds", "1", "--json")
    for named in ([str(folder)], ["--model", str(folder)], [str(folder), "-m", str(folder)]):
        assert main(["bench", *named, *short]) == 0
        assert json.loads(capsys.readouterr().out)["model"] == str(folder)
    assert "name one" in _refused(capsys, str(folder), "--model", "elsewhere")


def test_a_plot_is_drawn(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    for name, begin in (("rates.png", b"\x89PNG"), ("rates.svg", b"<?xml")):
        path = tmp_path / name
        assert main(["bench", str(folder), *SHORT, "--rounds", "1", "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(begin)
    assert "prefill" in capsys.readouterr().out


def test_a_plot_of_one_kind_only(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "rates.png"
    for none in (("--prompt", "0"), ("--tokens", "0")):
        arguments = (*SHORT, *none, "--rounds", "1", "--plot", str(path))
        assert main(["bench", str(folder), *arguments]) == 0
        assert path.stat().st_size > 0
        path.unlink()
    assert capsys.readouterr().err == ""


def test_plots_that_cannot_be_written_are_refused_first(tmp_path: Path, capsys: Capture) -> None:
    for name, said in (
        ("rates", "ends in one of"),
        ("rates.txt", "png"),
        ("missing/rates.png", "a folder that exists"),
    ):
        line = _refused(capsys, "no-such-model", "--plot", str(tmp_path / name))
        assert said in line


def test_without_matplotlib(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = _refused(capsys, "no-such-model", "--plot", str(tmp_path / "rates.png"))
    assert "pip install 'starquill[bench]'" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt", "16,x"), "--prompt is '16,x'"),
        (("--prompt", ""), "--prompt is ''"),
        (("--depth", "0;1"), "--depth is '0;1'"),
        (("--batch", "1.5"), "--batch is '1.5'"),
        (("--batch", "0"), "batch is 0"),
        (("--depth", "-1"), "-1"),
        (("--rounds", "0"), "rounds is 0"),
        (("--threads", "0"), "--threads is 0 (expected 1 to"),
        (("--threads", "100000"), "--threads is 100000"),
        (("--prompt", "0", "--tokens", "0"), "nothing to measure"),
    ],
)
def test_mistakes_are_told_before_the_model_is_read(
    capsys: Capture, arguments: tuple[str, ...], said: str
) -> None:
    assert said in _refused(capsys, "no-such-model", *arguments)


def test_lengths_over_the_context_are_told_together(folder: Path, capsys: Capture) -> None:
    line = _refused(capsys, str(folder), "--prompt", "16,65,1024", "--depth", "0,40")
    for part in ("64 tokens", "a prompt of 65", "a prompt of 1024", "32 more at depth 40"):
        assert part in line


def test_the_same_length_is_measured_once(folder: Path, capsys: Capture) -> None:
    arguments = ("--prompt", "4, 4,8", "--tokens", "0", "--rounds", "1", "--json")
    assert main(["bench", str(folder), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["measurements"]
    assert [one["tokens"] for one in found] == [4, 8]
