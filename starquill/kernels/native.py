"""The native module where it was built; where it was not, plain torch and one warning."""

from __future__ import annotations

import ctypes
import logging
import math
import os
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

log = logging.getLogger("starquill")


def _import() -> ModuleType | None:
    try:
        from starquill.kernels import _native
    except ImportError as error:
        log.warning(
            "the native kernels are missing (%s): computing with torch alone, which is slower; "
            "reinstall starquill where a C++ compiler is",
            error,
        )
        return None
    module: ModuleType = _native
    module.set_openmp_pause(_openmp_pause())
    return module


def _openmp_pause() -> int:
    """The address of `omp_pause_resource_all` in the OpenMP library that torch runs on, or 0."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return 0
    for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*"):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return ctypes.cast(library.omp_pause_resource_all, ctypes.c_void_p).value or 0
        except (OSError, AttributeError):
            continue
    return 0


native = _import()


def serves(tensor: Tensor) -> bool:
    """Whether the native kernels can take `tensor`: it is on the CPU and needs no gradient."""
    if native is None or not tensor.is_cpu:
        return False
    return not (tensor.requires_grad and torch.is_grad_enabled())


FLOAT_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as in csrc/kernels.h


def largest(tensor: Tensor, threads: int | None = None) -> float:
    """The largest magnitude; NaN or infinity if there is one. For what `serves` and `is_float`."""
    assert native is not None
    data = tensor.contiguous()
    count = threads or torch.get_num_threads()
    return float(native.largest_at(data.data_ptr(), FLOAT_TYPES[data.dtype], data.numel(), count))


def is_float(tensor: Tensor) -> bool:
    """Whether native code knows its type: float32, float16 or bfloat16."""
    return tensor.dtype in FLOAT_TYPES


def is_finite(tensor: Tensor, threads: int | None = None) -> bool:
    """Whether all values are, on as many `threads` as torch has or fewer, but none of torch's."""
    if is_float(tensor) and serves(tensor):
        return math.isfinite(largest(tensor, threads))
    low, high = tensor.aminmax()  # both are NaN if any value is
    return bool(low.isfinite() and high.isfinite())


def as_rows(tensor: Tensor) -> Tensor:
    """As contiguous float32: what native code takes by its address."""
    if tensor.dtype is not torch.float32:
        tensor = tensor.float()
    return tensor if tensor.is_contiguous() else tensor.contiguous()
