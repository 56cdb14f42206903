"""From a dense matrix to an `AffineWeight`: range search with least squares, and HQQ.

Both work on groups, a band of rows at a time so that intermediate values stay in cache, and
both weight the error of each input by its importance where that is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from starquill.errors import NumericsError
from starquill.kernels import quantize as kernel
from starquill.kernels.native import serves
from starquill.quant.affine import AffineWeight, pack
from starquill.quant.schemes import Scheme

_BAND_ELEMENTS = 1 << 18
# Shares of a group's range that are tried: clipping its ends buys precision for the rest. Few
# bits gain from many tries; many bits gain next to nothing.
_SHARES = {8: (1.0,), 6: (1.0,), 5: (1.0,), 4: (1.0, 0.9)}
_MANY_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68, 0.62)
_HQQ_ROUNDS, _HQQ_NORM, _HQQ_BETA, _HQQ_KAPPA = 20, 0.7, 10.0, 1.01
# Below this a tensor's scales would be among float16's denormals.
_FLOAT16_LEAST, _FLOAT16_MOST = 2.0**-6, 60000.0


@dataclass(frozen=True)
class _Fit:
    """Scale and bias `[R, G, 1]` of each group."""

    scale: Tensor
    bias: Tensor


@dataclass(frozen=True)
class _Groups:
    """A band of weights `[R, G, g]`, with the importance `[G, g]` of each input, and levels."""

    w: Tensor
    importance: Tensor
    top: int

    def integers(self, fit: _Fit) -> Tensor:
        """The nearest levels, as floats; a group of scale 0 is all bias."""
        inverse = torch.where(fit.scale == 0, 0.0, 1.0 / fit.scale)
        return ((self.w - fit.bias) * inverse).round_().clamp_(0, self.top)

    def error(self, fit: _Fit, q: Tensor) -> Tensor:
        """Weighted squared error of each group, `[R, G, 1]`."""
        off = torch.addcmul(fit.bias, q, fit.scale).sub_(self.w)
        return off.square_().mul_(self.importance).sum(-1, keepdim=True)

    def least_squares(self, q: Tensor, target: Tensor) -> _Fit:
        """The scale and bias that bring levels `q` nearest to `target`; bias alone if all equal."""
        m = self.importance
        mq = q * m
        total, s_q = m.sum(-1, keepdim=True), mq.sum(-1, keepdim=True)
        s_qq, s_w = (mq * q).sum(-1, keepdim=True), (target * m).sum(-1, keepdim=True)
        s_qw = (mq * target).sum(-1, keepdim=True)
        spread = total * s_qq - s_q * s_q
        flat = spread <= 1e-9 * total * s_qq
        divisor = torch.where(flat, 1.0, spread)
        scale = torch.where(flat, 0.0, (total * s_qw - s_q * s_w) / divisor)
        bias = torch.where(flat, s_w / total, (s_qq * s_w - s_q * s_qw) / divisor)
        return _Fit(scale, bias)


def quantize(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> AffineWeight:
    """Quantize `[..., out, in]`; `importance` `[in]` weights the error of each input.

    Scales and biases are float16, or float32 for a tensor that float16's range does not suit;
    the integers are chosen for the rounded ones. `in` must be a multiple of the scheme's group.
    Raises NumericsError for values that are not finite.
    """
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        weight = weight.float()
    largest = kernel.largest(weight) if serves(weight) else float(weight.abs().max())
    if not largest < float("inf"):  # NaN compares false too
        raise NumericsError("the tensor has values that are not finite")
    halves = _FLOAT16_LEAST <= largest <= _FLOAT16_MOST or largest == 0
    # Squares and inverses stay in float32's range, whatever the size of the weights.
    unit = None if halves else 2.0 ** (math.frexp(largest)[1] - 1)
    if importance is not None:
        importance = importance.float().clamp_min(1e-12)
    if scheme.resolved_method == "rtn" and serves(weight):
        shares = _SHARES.get(scheme.bits, _MANY_SHARES)
        settings = (scheme.bits, scheme.group)
        parts = kernel.range_search(weight.flatten(0, -2), settings, shares, importance, unit)
    else:
        parts = _in_bands(weight.flatten(0, -2), scheme, importance, unit)
    q, s, b = (part.reshape(*weight.shape[:-1], -1) for part in parts)
    return AffineWeight(q, s, b, scheme.bits, scheme.group)


def _in_bands(
    rows: Tensor, scheme: Scheme, importance: Tensor | None, unit: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Packed integers, scales and biases of `rows` `[R, in]`, written for torch."""
    if importance is None:
        importance = torch.ones(rows.shape[1])
    grouped = importance.unflatten(0, (-1, scheme.group))
    dtype = torch.float16 if unit is None else torch.float32
    packed, scales, biases = [], [], []
    height = max(1, _BAND_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), height):
        band = (rows[start : start + height].float() / (unit or 1.0)).unflatten(
            1, (-1, scheme.group)
        )
        groups = _Groups(band, grouped, 2**scheme.bits - 1)
        hqq = scheme.resolved_method == "hqq"
        fit = _half_quadratic(groups) if hqq else _search(groups, scheme)
        fit = _Fit(fit.scale.to(dtype), fit.bias.to(dtype))
        q = groups.integers(_Fit(fit.scale.float(), fit.bias.float()))
        packed.append(pack(q.flatten(1).to(torch.uint8), scheme.bits))
        scales.append(fit.scale[..., 0] * (unit or 1.0))
        biases.append(fit.bias[..., 0] * (unit or 1.0))
    return torch.cat(packed), torch.cat(scales), torch.cat(biases)


def _range(groups: _Groups, share: float) -> _Fit:
    """Levels spread evenly over `share` of each group's range."""
    low, high = groups.w.aminmax(dim=-1, keepdim=True)
    low, high = low * share, high * share
    return _Fit((high - low) / groups.top, low)


def _search(groups: _Groups, scheme: Scheme) -> _Fit:
    """The best over shares of the range, each refitted by least squares."""
    best, least = _range(groups, 1.0), None
    for share in _SHARES.get(scheme.bits, _MANY_SHARES):
        q = groups.integers(_range(groups, share))
        fit = groups.least_squares(q, groups.w)
        error = groups.error(fit, q)
        if least is None:
            best, least = fit, error
            continue
        better = error < least
        best = _Fit(
            torch.where(better, fit.scale, best.scale), torch.where(better, fit.bias, best.bias)
        )
        least = torch.minimum(error, least)
    return best


def _half_quadratic(groups: _Groups) -> _Fit:
    """HQQ (Badri & Shaji 2023): an l_0.7 error, split into shrinkage and least squares.

    Outliers are taken out of the target by soft shrinkage, then scale and bias are refitted to
    what is left. (The published form refits the zero point alone.)
    """
    fit, beta = _range(groups, 1.0), _HQQ_BETA
    # The published constants are for weights of about this size.
    unit = groups.w.abs().mean(-1, keepdim=True).clamp_min(1e-30)
    best, least = fit, None
    for _ in range(_HQQ_ROUNDS):
        q = groups.integers(fit)
        off = (groups.w - torch.addcmul(fit.bias, q, fit.scale)) / unit
        size = off.abs()
        error = (size.pow(_HQQ_NORM) * groups.importance).sum(-1, keepdim=True)
        if least is None:
            best, least = fit, error
        else:
            better = error < least
            if not bool(better.any()):
                break
            best = _Fit(
                torch.where(better, fit.scale, best.scale), torch.where(better, fit.bias, best.bias)
            )
            least = torch.minimum(error, least)
        outlier = off.sign() * (size - size.clamp_min(1e-8).pow(_HQQ_NORM - 1) / beta).clamp_min(0)
        fit = groups.least_squares(q, groups.w - outlier * unit)
        beta *= _HQQ_KAPPA
    return best
