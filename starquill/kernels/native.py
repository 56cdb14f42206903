"""The native module where it was built; where it was not, plain torch and one warning."""

from __future__ import annotations

import logging
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


def serves(*tensors: Tensor) -> bool:
    """Whether the native kernels can take `tensors`: they are on the CPU and need no gradient."""
    if native is None:
        return False
    grad = torch.is_grad_enabled()
    return all(t.device.type == "cpu" and not (grad and t.requires_grad) for t in tensors)
