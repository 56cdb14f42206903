"""What is done to every value between products, in native code: activation, norm, rotation.

torch would do as well, but on threads of its own, which get in the way of the kernels'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from starquill.kernels.native import native, serves
from starquill.kernels.program import empty, keep

# As in csrc/kernels.h, by the names that `hidden_act` uses.
ACTS = {"silu": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "gelu_fast": 1, "relu": 2}


def takes(x: Tensor) -> bool:
    """Whether these functions can take `x`: float32 on the CPU without a gradient."""
    return x.dtype is torch.float32 and serves(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU."""
    assert native is not None
    x = x.contiguous()
    y = empty(x.shape)
    native.gelu_at(x.data_ptr(), y.data_ptr(), x.numel(), torch.get_num_threads())
    return y


def gated(gate: Tensor, up: Tensor | None, act: str) -> Tensor:
    """`act(gate)·up` of two tensors of one shape, or `act(gate)`; `act` is one of `ACTS`."""
    assert native is not None
    gate, up = gate.contiguous(), None if up is None else up.contiguous()
    y = empty(gate.shape)
    native.gated_at(
        [gate.data_ptr(), 0 if up is None else up.data_ptr(), y.data_ptr()],
        gate.numel(),
        ACTS[act],
        torch.get_num_threads(),
    )
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension; `weight` and `bias` `[D]` contiguous float32."""
    assert native is not None
    x = x.contiguous()
    y = empty(x.shape)
    width = x.shape[-1]
    keep(weight, bias)
    native.layer_norm_at(
        [part.data_ptr() for part in (x, weight, bias, y)],
        [x.numel() // width, width],
        eps,
        torch.get_num_threads(),
    )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / √(mean of x² + eps)·weight` over the last dimension; `weight` `[D]` contiguous float32.

    In runs of D: what is `[..., n·D]` wide is normalised as n heads.
    """
    assert native is not None
    x = x.contiguous()
    y = empty(x.shape)
    width = weight.shape[0]
    keep(weight)
    native.rms_norm_at(
        [x.data_ptr(), weight.data_ptr(), y.data_ptr()],
        [x.numel() // width, width],
        eps,
        torch.get_num_threads(),
    )
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[B, H, T, Dh]` by `cos` and `sin` `[B, 1, T, Dh]`: i pairs with i + Dh/2.

    Contiguous, whatever `x` was.
    """
    assert native is not None
    if x.stride(3) != 1:
        x = x.contiguous()
    y = empty(x.shape)
    cos, sin = cos.contiguous(), sin.contiguous()
    native.rotation_at(
        [part.data_ptr() for part in (x, cos, sin, y)],
        [*x.shape, *x.stride()[:3]],
        torch.get_num_threads(),
    )
    return y


def add(x: Tensor, y: Tensor) -> Tensor:
    """The sum of two tensors of one shape."""
    assert native is not None
    x, y = x.contiguous(), y.contiguous()
    total = empty(x.shape)
    threads = torch.get_num_threads()
    native.add_at(x.data_ptr(), y.data_ptr(), total.data_ptr(), x.numel(), threads)
    return total
