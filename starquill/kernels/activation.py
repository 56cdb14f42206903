"""Activation functions in native code."""

from __future__ import annotations

import torch
from torch import Tensor

from starquill.kernels.native import native, serves


def takes_gelu(x: Tensor) -> bool:
    return serves(x) and x.dtype is torch.float32 and x.is_contiguous()


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, of contiguous float32."""
    assert native is not None
    y = torch.empty_like(x)
    native.gelu_at(x.data_ptr(), y.data_ptr(), x.numel(), torch.get_num_threads())
    return y
