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


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}
