"""kill −9 while a model is written: what is left loads and is right, or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from starquill.checkpoint.save import new_folder
from starquill.cli.app import main
from starquill.errors import BadRequestError, StarquillError
from starquill.loading import load
from tests import tiny
from tests.adapters import making

IDS = tiny.random_ids(20)
NEEDS_FORK = pytest.mark.skipif(sys.platform == "win32", reason="processes cannot fork here")


def quantize(top: Path) -> list[str]:
    base = tiny.write_checkpoint(top / "base")
    return ["quantize", str(base), "--quant=4", "--out={out}"]


def merge(top: Path) -> list[str]:
    base = tiny.write_checkpoint(top / "base")
    adapter = making.peft_folder(top / "adapter")[0]
    return ["merge", str(base), f"--adapter={adapter}", "--out={out}"]


def logits_or_refusal(folder: Path) -> torch.Tensor | str:
    try:
        return tiny.our_logits(load(folder), IDS)
    except StarquillError as error:
        return str(error)


@NEEDS_FORK
@pytest.mark.parametrize("command", [quantize, merge])
def test_killed_at_any_moment_of_writing(tmp_path: Path, command: Any) -> None:
    """Moments over the whole run: takes over 10 s, of 12 processes."""
    arguments = command(tmp_path / "in")
    out = tmp_path / "out" / "model"
    out.parent.mkdir()
    run = subprocess.run(
        [sys.executable, "-m", "tests.killed", str(out), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(told[0]["left"]) == 1  # one run's: each clears away what the one before left
    killed = [one for one in told[1:-1] if one["status"] == -9]
    assert len(killed) >= 5
    assert told[-1] == {"status": 0}
    expected = tiny.our_logits(load(out), IDS)
    for left in out.parent.glob("kept-*"):
        found = logits_or_refusal(left)
        assert found.isprintable() if isinstance(found, str) else torch.equal(found, expected)
    assert torch.equal(tiny.our_logits(load(out.parent / "whole"), IDS), expected)
    assert not list(out.parent.glob(".*"))


def write_beside(first: Path) -> None:
    """Another that writes the same, and finds that it was second."""
    out = first.parent / "out"
    with new_folder(out) as second:
        assert first.exists()
        assert second != first
        raise BadRequestError(f"{out} exists already")


@NEEDS_FORK
def test_what_another_process_is_writing_stays(tmp_path: Path) -> None:
    """Two writers of one name: neither takes the other's unfinished folder away."""
    with new_folder(tmp_path / "out") as first:
        (first / "it").write_text("first")
        with pytest.raises(BadRequestError, match="exists already"):
            write_beside(first)
    assert (tmp_path / "out" / "it").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_users_own_hidden_folder_stays(tmp_path: Path) -> None:
    (tmp_path / ".out.12345678").mkdir()
    base = tiny.write_checkpoint(tmp_path / "base")
    assert main(["quantize", str(base), "--quant", "4", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / ".out.12345678").is_dir()
