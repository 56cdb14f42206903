"""Tensors mapped from their files."""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from starquill.checkpoint.aligned import save_aligned
from starquill.checkpoint.hub import ModelFiles
from starquill.checkpoint.source import SafetensorsSource, open_source
from starquill.errors import CheckpointError
from starquill.kernels.memory import LARGE_PAGE, for_weights

TENSORS = {
    "a": torch.randint(0, 256, (3, 1 << 20), dtype=torch.uint8),
    "b": torch.randint(-9, 9, (1 << 19,), dtype=torch.int32),
    "small": torch.arange(5, dtype=torch.int32),
}


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsSource:
    save_aligned(TENSORS, tmp_path / "model.safetensors", {})
    found = open_source(ModelFiles(tmp_path))
    assert isinstance(found, SafetensorsSource)
    return found


def test_tensors_are_those_written_and_share_a_mapping(source: SafetensorsSource) -> None:
    mapped = {name: source.map(name) for name in TENSORS}
    for name, tensor in TENSORS.items():
        assert torch.equal(mapped[name], tensor)
        assert torch.equal(source.read(name), tensor)
    assert len(source._mapped) == 1
    del mapped
    gc.collect()
    assert len(source._mapped) == 0


def test_writing_to_one_leaves_the_file(source: SafetensorsSource) -> None:
    source.map("b").zero_()
    assert torch.equal(source.read("b"), TENSORS["b"])


def test_a_file_that_became_shorter_is_told(source: SafetensorsSource, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: 1 << 20])
    for name in ("a", "b"):
        with pytest.raises(CheckpointError, match="became shorter while it was read"):
            source.map(name)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="a cannot be mapped"):
        source.map("a")


def test_a_file_that_changed_while_it_was_mapped(source: SafetensorsSource, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    kept = source.map("a")
    save_aligned({n: torch.zeros_like(t) for n, t in TENSORS.items()}, tmp_path / "other", {})
    (tmp_path / "other").replace(path)
    assert not source.map("b").any()
    assert torch.equal(kept, TENSORS["a"])
    second = source.map("b")
    os.truncate(path, 4096)
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        source.map("a")
    assert second.shape == TENSORS["b"].shape


def test_too_little_memory_is_told_as_such() -> None:
    with pytest.raises(MemoryError, match="no memory for"):
        for_weights([1 << 60], torch.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's large pages")
def test_weights_have_memory_in_large_pages(source: SafetensorsSource) -> None:
    """Where the system has them: it is asked for them for mapped files and for what is read."""
    made = for_weights((3, LARGE_PAGE), torch.uint8)
    for tensor in (made, source.map("a"), source.read("a")):
        assert "hg" in _flags(tensor.data_ptr())
    assert for_weights((3, 5), torch.float16).shape == (3, 5)


def _flags(address: int) -> list[str]:
    """What the system knows of the mapping that an address is in."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(found[1], 16) <= address < int(found[2], 16)
        elif here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("not in any mapping")
