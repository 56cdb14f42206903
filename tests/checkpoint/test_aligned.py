"""Weight files whose tensors lie on lines of cache, read back by safetensors itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from starquill.checkpoint.aligned import NAMES, _write, save_aligned
from starquill.checkpoint.source import read_header
from starquill.kernels.memory import LARGE_PAGE, LINE


@pytest.mark.parametrize("length", range(9))
def test_what_is_written_is_read_and_lies_on_lines(tmp_path: Path, length: int) -> None:
    """Names of any length move the header's end; small tensors must not move the large ones."""
    tensors = {
        f"{'n' * length}.{number}": torch.arange(count).reshape(-1, 1).to(dtype)
        for number, (dtype, count) in enumerate((d, c) for d in NAMES for c in (0, 3, 64, 128))
    }
    tensors["é"] = torch.randn(2, 16, 4)
    path = tmp_path / "model.safetensors"
    save_aligned(tensors, path, {"format": "mlx"})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "mlx"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
            assert file.get_tensor(name).dtype == tensor.dtype
    starts = {name: location.start for name, location in read_header(path).items()}
    whole = [name for name in tensors if tensors[name].nbytes % LINE == 0]
    assert len(whole) > len(tensors) / 2
    assert all(starts[name] % LINE == 0 for name in whole)


class _Raw(io.RawIOBase):
    """Keeps where each write began, and how much it was."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, int]] = []
        self.end = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        assert (offset, whence) == (0, 1)
        return self.end

    def write(self, data: Any) -> int:
        self.writes.append((self.end, len(data)))
        self.end += len(data)
        return len(data)


def test_files_go_out_in_large_pages() -> None:
    raw = _Raw()
    sizes = [64, 3 * LARGE_PAGE + 5, 7, LARGE_PAGE, 2 * LARGE_PAGE - 71, 100]
    with io.BufferedWriter(raw, LARGE_PAGE) as file:
        for size in sizes:
            _write(file, memoryview(bytes(size)))
    assert raw.end == sum(sizes)
    assert all(start % LARGE_PAGE == 0 for start, _ in raw.writes)
    assert all(count == LARGE_PAGE for _, count in raw.writes[:-1])
