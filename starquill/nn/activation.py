"""Activation functions by the names that `hidden_act` uses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from starquill.kernels import elementwise


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, which StarCoder2 was trained with."""
    if elementwise.takes(x):
        return elementwise.gelu_tanh(x)
    return F.gelu(x, approximate="tanh")


def silu(x: Tensor) -> Tensor:
    """x·σ(x). A step of single tokens, `[B, 1, D]`, gives each row the same in any company."""
    if x.dim() < 3 or x.shape[-2] != 1 or not elementwise.takes(x):
        return F.silu(x)
    # torch computes the last few values of all rows by another exponential than the others.
    values = x.numpy()
    with np.errstate(over="ignore"):  # exp(-x) = inf where the result is 0
        return torch.from_numpy(values / (1 + np.exp(-values)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": silu,
}
