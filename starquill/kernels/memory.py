"""Memory that begins where vectors are read best, and large pieces of it in large pages."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LINE = 64  # bytes of a line of cache, and of the widest vector
LARGE_PAGE = 2 << 20
HUGEPAGE = 14  # Linux's MADV_HUGEPAGE, which not every Python has


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Zeros that begin at a line of cache; taken from the system when they are written to."""
    data = np.zeros(nbytes + LINE, dtype=np.uint8)
    start = -data.ctypes.data % LINE
    return data[start : start + nbytes]


def for_weights(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A tensor whose values are anything yet, for what will be read again and again.

    A step goes over all weights, and looking up pages of 4 KiB takes some of its time. Raises
    MemoryError.
    """
    shape = tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or nbytes < LARGE_PAGE:
        return torch.empty(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes:,} bytes: {error.strerror}") from None
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
