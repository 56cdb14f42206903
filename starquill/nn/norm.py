"""Normalisation, always computed in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starquill.kernels import elementwise


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias `[D]`, kept and computed in float32 whatever `x` is in."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        empty = torch.empty(hidden_size, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.bias = nn.Parameter(empty.clone(), requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        # Past torch's hooks and its slow look-up of parameters, as `Linear` does.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        assert bias is not None
        if elementwise.takes(x):
            return elementwise.layer_norm(x, weight, bias, self.eps)
        y = F.layer_norm(x.float(), (x.shape[-1],), weight, bias, self.eps)
        return y.to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv 1910.07467) with weight `[D]`, in float32 likewise.

    Over the last dimension, in runs of D: what is `[..., n·D]` wide is normalised as n heads.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device="meta"), requires_grad=False)

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        width = weight.shape[0]
        if elementwise.takes(x) and x.shape[-1] % width == 0:
            return elementwise.rms_norm(x, weight, self.eps)
        runs = x if x.shape[-1] == width else x.unflatten(-1, (-1, width))
        y = F.rms_norm(runs.float(), (width,), weight, self.eps)
        return y.view(x.shape).to(x.dtype)
