"""Activation functions by the names that `hidden_act` uses."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from starquill.kernels import elementwise


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, which StarCoder2 was trained with."""
    if elementwise.takes(x):
        return elementwise.gelu_tanh(x)
    return F.gelu(x, approximate="tanh")


def silu(x: Tensor) -> Tensor:
    """x·σ(x)."""
    # torch computes the last few values of all rows by another exponential than the others.
    return elementwise.gated(x, None, "silu") if elementwise.takes(x) else F.silu(x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": silu,
}


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """`act(gate)·up`, `act` by its name."""
    if act in elementwise.ACTS and elementwise.takes(gate) and elementwise.takes(up):
        return elementwise.gated(gate, up, act)
    return ACTIVATIONS[act](gate) * up
