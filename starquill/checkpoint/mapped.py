"""Tensors as views of mapped files, for what stays on disk: nothing of them is in memory yet."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from starquill.checkpoint.source import SafetensorsSource, TensorInfo
from starquill.errors import CheckpointError
from starquill.nn.disk import PAGE, Extent

MAPPED_FROM = 1 << 20  # bytes; what is smaller is read and stays in memory
_ALIGNED = 4  # bytes: what kernels need of the types they read


@dataclass(frozen=True, eq=False)
class _MappedFile:
    path: Path
    descriptor: int
    data: np.ndarray

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


class MappedFiles:
    """A safetensors checkpoint whose large tensors are mapped, for reading alone.

    The files must stay as they are while the model runs.
    """

    def __init__(self, source: SafetensorsSource) -> None:
        self._source = source
        self._files: dict[Path, _MappedFile] = {}
        self.infos: dict[str, TensorInfo] = source.infos
        self.warnings: Sequence[str] = source.warnings

    def read(self, name: str) -> Tensor:
        path, start = self._source.where(name)
        if self.infos[name].nbytes < MAPPED_FROM or start % _ALIGNED:
            return self._source.read(name)
        file = self._files.get(path) or self._opened(path)
        view = file.data[start : start + self.infos[name].nbytes]
        with warnings.catch_warnings():
            # That it cannot be written to is meant.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            data = torch.from_numpy(view)
        return self._source.shaped(name, data)

    map = read

    def _opened(self, path: Path) -> _MappedFile:
        try:
            descriptor = os.open(path, os.O_RDONLY)
            mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be mapped: {error}") from None
        file = _MappedFile(path, descriptor, np.frombuffer(mapped, dtype=np.uint8))
        weakref.finalize(mapped, os.close, descriptor)
        self._files[path] = file
        return file

    def extents(self, tensors: Iterable[Tensor]) -> list[Extent]:
        """Where those of `tensors` that are mapped lie, neighbours joined, in the files' order."""
        found = sorted(
            (span for tensor in tensors if (span := self._span(tensor)) is not None),
            key=lambda span: (str(span[0].path), span[1]),
        )
        return [
            Extent(str(file.path), file.data[first:last], file.descriptor, first)
            for file, first, last in _joined(found)
        ]

    def has_copy(self, tensor: Tensor) -> bool:
        """Whether it takes memory of its own, and so much that it should not."""
        return tensor.nbytes >= MAPPED_FROM and self._span(tensor) is None

    def _span(self, tensor: Tensor) -> tuple[_MappedFile, int, int] | None:
        """The pages of a file that a contiguous tensor views; None for memory of its own."""
        files = sorted(self._files.values(), key=lambda file: file.address)
        at = tensor.data_ptr()
        index = bisect_right([file.address for file in files], at) - 1
        if index < 0 or not tensor.is_cpu or not tensor.is_contiguous():
            return None
        file = files[index]
        first, last = at - file.address, at - file.address + tensor.nbytes
        if last > len(file.data):
            return None
        return file, first // PAGE * PAGE, min(-(-last // PAGE) * PAGE, len(file.data))


def _joined(
    spans: Sequence[tuple[_MappedFile, int, int]],
) -> Iterator[tuple[_MappedFile, int, int]]:
    at = 0
    while at < len(spans):
        file, first, last = spans[at]
        at += 1
        while at < len(spans) and spans[at][0] is file and spans[at][1] <= last:
            last = max(last, spans[at][2])
            at += 1
        yield file, first, last
