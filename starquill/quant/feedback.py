"""Rounding that makes up for its own errors, given how a matrix's inputs go together.

What counts is the error of the product: `E H Eᵀ` for each row's rounding error E, with the second
moments H = mean of x xᵀ. One input's rounding error is made up for by others' that correlate with
it: first once through all inputs (GPTQ, arXiv 2210.17323), then by coordinate descent on integers,
scales and biases, which never raises the error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from starquill.quant.affine import GROUPS
from starquill.quant.groups import Fit

_SWEEPS = 4
# Added to each input's own second moment, as a share of it: text is never all there is to see.
_DAMPING, _LEAST_DAMPING = 0.1, 1e-3


@dataclass(frozen=True)
class Rounded:
    """Levels `[R, n]` as floats, and scale and bias `[R, n/g]` of each group."""

    q: Tensor
    scale: Tensor
    bias: Tensor

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.scale.shape[1]

    def values(self) -> Tensor:
        q = self.q.unflatten(1, (-1, self.group))
        return (q * self.scale[..., None] + self.bias[..., None]).flatten(1)


def block_width(width: int, most: int = 512) -> int:
    """The largest divisor of `width` up to `most` that whole groups fill, or 0 if there is none.

    Correlations within blocks of so many inputs are nearly as good as all, and bounded in memory.
    """
    step = math.gcd(width, max(GROUPS))  # every group that divides the width divides this
    if step < min(GROUPS):
        return 0
    return next(n for n in range(most // step * step, 0, -step) if width % n == 0)


def damped(products: Tensor) -> Tensor:
    """Second moments `[n, n]` of mean 1 on the diagonal, made positive definite."""
    mean = products.diagonal().mean()
    if not 0 < float(mean) < math.inf:  # none of these inputs ever occurs: all count alike
        return torch.eye(len(products))
    h = products / mean
    h.diagonal().mul_(1 + _DAMPING).add_(_LEAST_DAMPING)
    return h


def product_error(w: Tensor, made: Rounded, h: Tensor) -> Tensor:
    """`E H Eᵀ` of each row, `[R, 1]`."""
    off = w - made.values()
    return ((off @ h) * off).sum(1, keepdim=True)


def refine(w: Tensor, start: Fit, products: Tensor, top: int, dtype: torch.dtype) -> Rounded:
    """Rows `w` `[R, n]` with groups fitted by `start`, rounded for least error of the product.

    No row is worse by `product_error` than `start` rounded to nearest. Scales and biases are such
    as `dtype` holds.
    """
    h = damped(products)
    stored = start.stored(dtype)
    plain = _nearest(w, stored.scale[..., 0], stored.bias[..., 0], top)
    made = _feed_forward(w, start, h, top)
    for _ in range(_SWEEPS):
        made = _sweep(w, made, h, top, refit=True)
    fit = Fit(made.scale, made.bias).stored(dtype)
    made = _sweep(w, Rounded(made.q, fit.scale, fit.bias), h, top, refit=False)
    better = product_error(w, made, h) <= product_error(w, plain, h)  # False for NaN
    return Rounded(
        torch.where(better, made.q, plain.q),
        torch.where(better, made.scale, plain.scale),
        torch.where(better, made.bias, plain.bias),
    )


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _nearest(w: Tensor, scale: Tensor, bias: Tensor, top: int) -> Rounded:
    grouped = w.unflatten(1, (scale.shape[1], -1))
    q = ((grouped - bias[..., None]) * _inverse(scale)[..., None]).round_().clamp_(0, top)
    return Rounded(q.flatten(1), scale, bias)


def _feed_forward(w: Tensor, start: Fit, h: Tensor, top: int) -> Rounded:
    """GPTQ: round one input after the other, spreading each error over the inputs to come."""
    scale, bias = start.scale[..., 0], start.bias[..., 0]
    group = w.shape[1] // scale.shape[1]
    inverse = torch.linalg.inv(h.double())
    upper = torch.linalg.cholesky((inverse + inverse.T) / 2, upper=True).float()
    left, q = w.clone(), torch.empty_like(w)
    for index in range(scale.shape[1]):
        s, b, divisor = scale[:, index], bias[:, index], _inverse(scale[:, index])
        first, end = index * group, (index + 1) * group
        errors = torch.empty(len(w), group)
        for j in range(first, end):
            q[:, j] = ((left[:, j] - b) * divisor).round_().clamp_(0, top)
            error = (left[:, j] - q[:, j] * s - b) / upper[j, j]
            left[:, j:end] -= error[:, None] * upper[j, j:end]
            errors[:, j - first] = error
        left[:, end:] -= errors @ upper[first:end, end:]
    return Rounded(q, scale, bias)


def _sweep(w: Tensor, made: Rounded, h: Tensor, top: int, refit: bool) -> Rounded:
    """Coordinate descent, once over all groups: each integer, then scale and bias, at its best."""
    group = made.group
    q, scale, bias = made.q.clone(), made.scale.clone(), made.bias.clone()
    off = w - made.values()
    for index in range(scale.shape[1]):
        part = slice(index * group, (index + 1) * group)
        own, levels = h[part, part], q[:, part].t().contiguous()
        s, b = scale[:, index], bias[:, index]
        slope = (off @ h[:, part]).t().contiguous()  # of the error by each value, halved; [g, R]
        divisor = _inverse(s)
        for j in range(group):
            wanted = levels[j] * s + slope[j] / own[j, j]
            level = (wanted * divisor).round_().clamp_(0, top)
            slope -= own[j][:, None] * ((level - levels[j]) * s)
            levels[j] = level
        levels = levels.t()
        if refit:
            _refit(levels, slope.t(), own, s, b)
        q[:, part] = levels
        off[:, part] = w[:, part] - (levels * s[:, None] + b[:, None])
    return Rounded(q, scale, bias)


def _refit(q: Tensor, slope: Tensor, h: Tensor, scale: Tensor, bias: Tensor) -> None:
    """Move `scale` and `bias` `[R]` of one group, in place, to the least error for levels `q`."""
    s_qq, s_q = ((q @ h) * q).sum(1), q @ h.sum(1)
    total = h.sum()
    by_scale, by_bias = (q * slope).sum(1), slope.sum(1)
    spread = s_qq * total - s_q * s_q
    flat = spread <= 1e-6 * total * s_qq
    divisor = torch.where(flat, 1.0, spread)
    scale += torch.where(flat, 0.0, (total * by_scale - s_q * by_bias) / divisor)
    bias += torch.where(flat, 0.0, (s_qq * by_bias - s_q * by_scale) / divisor)
