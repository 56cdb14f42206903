"""The native module where it was built; where it was not, plain torch and one warning."""

from __future__ import annotations

import logging
import math
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
    return module


native = _import()


def serves(tensor: Tensor) -> bool:
    """Whether the native kernels can take `tensor`: it is on the CPU and needs no gradient."""
    if native is None or not tensor.is_cpu:
        return False
    return not (tensor.requires_grad and torch.is_grad_enabled())


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are; for one row of logits without waking torch's threads."""
    if tensor.dtype is torch.float32 and serves(tensor) and tensor.is_contiguous():
        assert native is not None
        return math.isfinite(native.largest(tensor, 1))
    return bool(torch.isfinite(tensor).all())


def as_rows(tensor: Tensor) -> Tensor:
    """As contiguous float32: what native code takes by its address."""
    if tensor.dtype is not torch.float32:
        tensor = tensor.float()
    return tensor if tensor.is_contiguous() else tensor.contiguous()
