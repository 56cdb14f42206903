"""The options for devices, which all verbs that load a model share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from starquill.checkpoint import mapped
from starquill.cli.app import main
from tests import tiny

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mapped, "MAPPED_FROM", 2048)
    raw = tiny.config(num_hidden_layers=4, max_position_embeddings=200)
    return tiny.write_checkpoint(tmp_path / "m", raw)


def text(capsys: Capture, folder: Path, *more: str) -> str:
    assert main(["generate", "-m", str(folder), "-p", "def f", "-n", "6", "--json", *more]) == 0
    out, _ = capsys.readouterr()
    written: str = json.loads(out)["text"]
    return written


@pytest.mark.parametrize("where", [["--device-map", "cpu=0-1,disk=2-3"], ["--device-map", "disk"],
                                   ["--max-memory", "cpu=2GiB,disk=inf"]])  # fmt: skip
def test_where_it_is_does_not_change_what_it_writes(
    folder: Path, capsys: Capture, where: list[str]
) -> None:
    assert text(capsys, folder, *where, "--max-seq-len", "64") == text(capsys, folder)


def test_a_topology_of_devices_needs_no_quant(folder: Path, capsys: Capture) -> None:
    file = folder.parent / "t.yaml"
    file.write_text('"0-1": {device: disk}\ndefault: {device: cpu}\n')
    assert text(capsys, folder, "--topology", str(file)) == text(capsys, folder)


@pytest.mark.parametrize("verb", ["generate", "fill", "bench", "serve", "eval"])
def test_every_verb_takes_them_and_refuses_in_a_line(
    folder: Path, capsys: Capture, verb: str
) -> None:
    words = {
        "generate": ["generate", "--prompt", "x"],
        "fill": ["fill", "--prompt", "x<fill>y"],
        "bench": ["bench"],
        "serve": ["serve", "--port", "0"],
        "eval": ["eval", "perplexity", "--data", str(folder / "config.json")],
    }[verb]
    assert main([*words, "-m", str(folder), "--device-map", "cpu=0-1"]) == 2
    _, err = capsys.readouterr()
    assert "layers 2 to 3 have no device" in err
    assert err.splitlines()[-1].startswith("error: ")
    assert main([*words, "-m", str(folder), "--max-memory", "cpu=1MB"]) == 2
    assert "the embedding does not fit on cpu: it asks for" in capsys.readouterr().err
