"""A step's native operations, written down as they run, to run again without Python.

Every native call of a recorded step adds itself to a `Program`, with the addresses that it was
given. Three things make it safe to run them again:

- What operations hand to each other lies in memory of the program's own (`empty`). Native code
  knows that memory, and refuses a step in which an operation reads or writes any other: a tensor
  that torch or numpy made in between, a copy included, is noticed where it is used.
- What else they point to, weights and biases and caches, is kept by the program (`keep`).
- What torch does without making a tensor that is read, such as writing into one, or taking a number
  out of one, is seen by a function mode, and refused too.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from starquill.kernels.memory import LINE, aligned
from starquill.kernels.native import native


class Arena:
    """Blocks of memory that programs share: only one of them runs at a time.

    In powers of two, so that steps of other numbers of rows find use for them too.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def lend(self, nbytes: int) -> NDArray[np.uint8]:
        """A block, which is free again when what is returned is gone."""
        size = 1 << max(nbytes - 1, LINE - 1).bit_length()
        free = self._free[size]
        block = free.pop() if free else aligned(size)
        lent = block[:nbytes]
        weakref.finalize(lent, free.append, block).atexit = False
        return lent


class Program:
    """What `recording` has written down.

    `run` copies new values into `inputs` and repeats the operations. What they made then holds the
    result until another program of the same arena runs, whose scratch it may be.
    """

    def __init__(self, inputs: Iterable[Tensor], arena: Arena) -> None:
        assert native is not None
        self.native = native.Program()
        self.inputs = tuple(inputs)
        self.kept: list[object] = []
        self._arena = arena
        for tensor in self.inputs:
            self.native.own(tensor.data_ptr(), tensor.nbytes)

    @property
    def refusal(self) -> str | None:
        """Why the step can't be run again; None where it can."""
        return self.native.refusal or None

    def run(self, values: Iterable[Tensor]) -> None:
        """With `values` in place of `inputs`, of the same shapes, on the CPU."""
        for place, value in zip(self.inputs, values, strict=True):
            # numpy: torch would copy larger ones on threads of its own.
            np.copyto(place.numpy(), value.numpy(force=True))
        self.native.run(torch.get_num_threads())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for an operation, for another one when the tensor is gone."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._arena.lend(nbytes)
        self.native.own(block.ctypes.data, nbytes)
        return torch.from_numpy(block).view(dtype).view(shape)


class _Recorder(threading.local):
    program: Program | None = None


_recorder = _Recorder()


def empty(shape: Iterable[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Where a native operation puts what it makes: the program's memory while one is recorded."""
    if _recorder.program is None:
        return torch.empty(tuple(shape), dtype=dtype)
    return _recorder.program.empty(tuple(shape), dtype)


def keep(*objects: object) -> None:
    """What the next native call points to must live as long as a program that it is in."""
    if _recorder.program is not None:
        _recorder.program.kept.extend(objects)


# What may be asked of a tensor in a recorded step. Some of these copy where they can't make a view:
# a copy is not in the program's memory, and who reads it is refused.
_LOOKING = {"__get__", "__len__", "data_ptr", "dim", "is_contiguous", "numel", "size", "stride"}
_VIEWING = {"__getitem__", "expand", "squeeze", "transpose", "unflatten", "unsqueeze", "view"}
_HARMLESS = _LOOKING | _VIEWING | {"contiguous", "flatten", "float", "reshape", "to"}


class _Watch(TorchFunctionMode):
    """Refuses a program whose step has torch compute something."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ not in _HARMLESS:
            self._program.native.refuse(f"torch's {func.__name__} has a part in it")
        return func(*args, **(kwargs or {}))


@contextmanager
def recording(program: Program) -> Iterator[None]:
    """Write down all native operations of this thread, which take place as well."""
    assert _recorder.program is None, "one program at a time"
    try:
        _recorder.program = program
        program.native.begin()
        with _Watch(program):
            yield
    finally:
        program.native.end()
        _recorder.program = None
