"""From a dense matrix to an `AffineWeight`: range search with least squares, or HQQ.

Both work on groups, a band of rows at a time so that intermediate values stay in cache, and
both weight the error of each input by its importance where that is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from starquill.errors import NumericsError
from starquill.kernels import quantize as kernel
from starquill.kernels.native import is_float, serves
from starquill.kernels.native import largest as native_largest
from starquill.quant.affine import AffineWeight, pack
from starquill.quant.feedback import refine
from starquill.quant.groups import Fit, Groups
from starquill.quant.hqq import refined
from starquill.quant.schemes import Scheme

_BAND_ELEMENTS = 1 << 18
# Rows that `refine` works on at once: it goes input by input, so it needs many rows.
_TALL_BAND = 4096
# Shares of a group's range that are tried: clipping its ends buys precision for the rest. Few
# bits gain from many tries; many bits gain next to nothing.
_SHARES = {8: (1.0,), 6: (1.0,), 5: (1.0,), 4: (1.0, 0.9)}
_MANY_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.74, 0.68, 0.62)
# Below this a tensor's scales would be among float16's denormals.
_FLOAT16_LEAST, _FLOAT16_MOST = 2.0**-6, 60000.0


# Packed integers, scales and biases `[R, G]` of some rows.
_Part = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Job:
    """What all bands of a matrix share; `importance` is `[G, g]`, weights are taken in `unit`."""

    scheme: Scheme
    importance: Tensor
    unit: float
    dtype: torch.dtype

    @property
    def top(self) -> int:
        return 2**self.scheme.bits - 1

    def groups(self, rows: Tensor) -> Groups:
        w = (rows.float() / self.unit).unflatten(1, (-1, self.scheme.group))
        return Groups(w, self.importance, self.top)

    def fit(self, groups: Groups) -> Fit:
        found = _search(groups, self.scheme)
        return refined(groups, found) if self.scheme.resolved_method == "hqq" else found

    def run(self, index: int, width: int) -> _Job:
        """The same for one run of `width` inputs."""
        count = width // self.scheme.group
        own = self.importance[index * count : (index + 1) * count]
        return replace(self, importance=own)


def quantize(
    weight: Tensor,
    scheme: Scheme,
    importance: Tensor | None = None,
    products: Tensor | None = None,
) -> AffineWeight:
    """Quantize `[..., out, in]`; `importance` `[in]` weights the error of each input.

    `products` `[in/n, n, n]` are second moments within runs of n inputs (whole groups), which hqq
    goes on to lower the error of the product with; the range search does without them. Scales and
    biases are float16, or float32 for a tensor that float16's range does not suit; the integers
    are chosen for the rounded ones. `in` must be a multiple of the scheme's group. Raises
    NumericsError for values that are not finite.
    """
    if not is_float(weight):
        weight = weight.float()
    largest = native_largest(weight) if serves(weight) else float(weight.abs().max())
    if not largest < float("inf"):  # NaN compares false too
        raise NumericsError("the tensor has values that are not finite")
    halves = _FLOAT16_LEAST <= largest <= _FLOAT16_MOST or largest == 0
    # Squares and inverses stay in float32's range, whatever the size of the weights.
    unit = None if halves else 2.0 ** (math.frexp(largest)[1] - 1)
    if importance is not None:
        importance = importance.float().clamp_min(1e-12)
    rows = weight.flatten(0, -2)
    hqq = scheme.resolved_method == "hqq"
    if serves(weight) and not (hqq and products is not None):
        settings = (scheme.bits, scheme.group, hqq)
        parts = kernel.fit_groups(rows, settings, _shares(scheme), importance, unit)
    else:
        parts = _in_torch(rows, _job(rows, scheme, importance, unit), products if hqq else None)
    q, scales, biases = (part.reshape(*weight.shape[:-1], -1) for part in parts)
    return AffineWeight(q, scales, biases, scheme.bits, scheme.group)


def _job(rows: Tensor, scheme: Scheme, importance: Tensor | None, unit: float | None) -> _Job:
    if importance is None:
        importance = torch.ones(rows.shape[1])
    grouped = importance.unflatten(0, (-1, scheme.group))
    return _Job(scheme, grouped, unit or 1.0, torch.float32 if unit else torch.float16)


def _in_torch(rows: Tensor, job: _Job, products: Tensor | None) -> _Part:
    if products is not None:
        parts = [_fed_back(band, job, products) for band in rows.split(_TALL_BAND)]
    else:
        height = max(1, _BAND_ELEMENTS // rows.shape[1])
        parts = [_by_group(band, job) for band in rows.split(height)]
    q, scales, biases = (torch.cat(each) for each in zip(*parts, strict=True))
    return q, scales * job.unit, biases * job.unit


def _by_group(rows: Tensor, job: _Job) -> _Part:
    """Packed integers, scales and biases of a band, whose groups know nothing of each other."""
    groups = job.groups(rows)
    fit = job.fit(groups).stored(job.dtype)
    q = groups.integers(fit).flatten(1).to(torch.uint8)
    scale, bias = fit.scale[..., 0].to(job.dtype), fit.bias[..., 0].to(job.dtype)
    return pack(q, job.scheme.bits), scale, bias


def _fed_back(rows: Tensor, job: _Job, products: Tensor) -> _Part:
    """The same of a tall band, one run of inputs that know of each other after the other."""
    width = products.shape[-1]
    runs = []
    for index, run in enumerate(products):
        w = rows[:, index * width : (index + 1) * width]
        start = _start(w, job.run(index, width))
        runs.append(refine(w.float() / job.unit, start, run, job.top, job.dtype))
    q = torch.cat([run.q.to(torch.uint8) for run in runs], 1)
    scale = torch.cat([run.scale for run in runs], 1).to(job.dtype)
    return pack(q, job.scheme.bits), scale, torch.cat([r.bias for r in runs], 1).to(job.dtype)


def _start(rows: Tensor, job: _Job) -> Fit:
    """What hqq finds without knowing how inputs go together, in `job.unit`."""
    if serves(rows):
        scheme = job.scheme
        settings = (scheme.bits, scheme.group, True)
        unit = None if job.dtype == torch.float16 else job.unit
        parts = kernel.fit_groups(rows, settings, _shares(scheme), job.importance.flatten(), unit)
        scale, bias = (part.float()[..., None] / job.unit for part in parts[1:])
        return Fit(scale, bias)
    height = max(1, _BAND_ELEMENTS // rows.shape[1])
    fits = [job.fit(job.groups(band)) for band in rows.split(height)]
    return Fit(torch.cat([f.scale for f in fits]), torch.cat([f.bias for f in fits]))


def _shares(scheme: Scheme) -> tuple[float, ...]:
    return _SHARES.get(scheme.bits, _MANY_SHARES)


def _search(groups: Groups, scheme: Scheme) -> Fit:
    """The best over shares of the range, each refitted by least squares."""
    best, least = groups.spread(1.0), None
    for share in _shares(scheme):
        q = groups.integers(groups.spread(share))
        fit = groups.least_squares(q, groups.w)
        error = groups.error(fit, q)
        if least is None:
            best, least = fit, error
            continue
        better = error < least
        best = fit.where(better, best)
        least = torch.minimum(error, least)
    return best
