"""Normalisation, always computed in float32, with weights of each row's adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starquill.kernels import elementwise
from starquill.nn.lora import AdapterMix


@dataclass(frozen=True, eq=False)
class NormPart:
    """What one adapter adds to a norm's own weight and bias, each `[D]` float32 or None."""

    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(eq=False)
class NormBank:
    """The adapters that one norm carries, by slot. `parts` is only replaced, as a `LoraBank`'s."""

    parts: dict[int, NormPart] = field(default_factory=dict)

    def changed(
        self, mix: AdapterMix, weight: Tensor, bias: Tensor | None
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """The rows of a batch that have another weight or bias, with both of them."""
        if mix.scales.dim() != 2:
            return  # X-LoRA acts on products alone
        parts = self.parts
        for row, shares in enumerate(mix.rows):
            acting = [
                (share, parts[slot])
                for slot, share in zip(mix.slots, shares, strict=True)
                if share and slot in parts
            ]
            if acting:
                yield row, *_with(acting, weight, bias)


def _with(
    acting: list[tuple[float, NormPart]], weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    for share, part in acting:
        if part.weight is not None:
            weight = weight + share * part.weight
        if part.bias is not None and bias is not None:
            bias = bias + share * part.bias
    return weight, bias


class LayerNorm(nn.Module):
    """LayerNorm with weight and bias `[D]`, kept and computed in float32 whatever `x` is in."""

    bank: NormBank | None = None

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        empty = torch.empty(hidden_size, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.bias = nn.Parameter(empty.clone(), requires_grad=False)

    def __call__(self, x: Tensor, mix: AdapterMix | None = None) -> Tensor:
        # Past torch's hooks and its slow look-up of parameters, as `Linear` does.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        assert bias is not None
        y = self._normed(x, weight, bias)
        if mix is not None and self.bank is not None:
            for row, other, shift in self.bank.changed(mix, weight, bias):
                assert shift is not None
                y[row] = self._normed(x[row : row + 1], other, shift)[0]
        return y

    def _normed(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if elementwise.takes(x):
            return elementwise.layer_norm(x, weight, bias, self.eps)
        y = F.layer_norm(x.float(), (x.shape[-1],), weight, bias, self.eps)
        return y.to(x.dtype)


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv 1910.07467) with weight `[D]`, in float32 likewise.

    Over the last dimension, in runs of D: what is `[..., n·D]` wide is normalised as n heads.
    """

    bank: NormBank | None = None

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device="meta"), requires_grad=False)

    def __call__(self, x: Tensor, mix: AdapterMix | None = None) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        y = self._normed(x, weight)
        if mix is not None and self.bank is not None:
            for row, other, _ in self.bank.changed(mix, weight, None):
                y[row] = self._normed(x[row : row + 1], other)[0]
        return y

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        width = weight.shape[0]
        if elementwise.takes(x) and x.shape[-1] % width == 0:
            return elementwise.rms_norm(x, weight, self.eps)
        runs = x if x.shape[-1] == width else x.unflatten(-1, (-1, width))
        y = F.rms_norm(runs.float(), (width,), weight, self.eps)
        return y.view(x.shape).to(x.dtype)
