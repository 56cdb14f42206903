"""HQQ (Badri & Shaji 2023), and what it finds refined by reweighted least squares."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from starquill.quant.groups import Fit, Groups

_ROUNDS, _NORM, _BETA, _KAPPA = 20, 0.7, 10.0, 1.01
_REFITS = 6


def refined(groups: Groups, searched: Fit) -> Fit:
    """The least l_2.5 error among `searched`, the half-quadratic fit, and refits of both.

    l_0.7 lets go of large weights, which models do not forgive at 2 and 3 bits: of the norms 0.7,
    1, 1.5, 2, 2.5 and 3, this was best. It is never more than that of levels spread evenly over
    each group's range.
    """
    # Near the least, errors are so alike that rounding decides: it must not depend on the unit.
    largest = groups.importance.amax(-1, keepdim=True)
    groups = replace(groups, importance=groups.importance / largest)
    best = groups.spread(1.0)
    _, _, least = _rounded(groups, best)
    for fit in (searched, half_quadratic(groups)):
        for _ in range(_REFITS + 1):
            q, root, error = _rounded(groups, fit)
            best, least = fit.where(error < least, best), torch.minimum(error, least)
            # Reweighted least squares; a value that a level meets exactly still counts a little.
            weights = (root + root.mean(-1, keepdim=True) * 0.1 + 1e-30) * groups.importance
            fit = replace(groups, importance=weights).least_squares(q, groups.w)
    return best


def _rounded(groups: Groups, fit: Fit) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, the root of each one's distance to its weight, and the l_2.5 error `[R, G, 1]`."""
    q = groups.integers(fit)
    off = torch.addcmul(fit.bias, q, fit.scale).sub_(groups.w).abs_()
    root = off.sqrt()
    return q, root, off.square_().mul_(root).mul_(groups.importance).sum(-1, keepdim=True)


def half_quadratic(groups: Groups) -> Fit:
    """An l_0.7 error, split into shrinkage and least squares.

    Outliers are taken out of the target by soft shrinkage, then scale and bias are refitted to
    what is left. (The published form refits the zero point alone.)
    """
    fit, beta = groups.spread(1.0), _BETA
    # The published constants are for weights of about this size.
    unit = groups.w.abs().mean(-1, keepdim=True).clamp_min(1e-30)
    best, least = fit, None
    for _ in range(_ROUNDS):
        q = groups.integers(fit)
        off = (groups.w - torch.addcmul(fit.bias, q, fit.scale)) / unit
        size = off.abs()
        error = (size.pow(_NORM) * groups.importance).sum(-1, keepdim=True)
        if least is None:
            best, least = fit, error
        else:
            better = error < least
            if not bool(better.any()):
                break
            best = fit.where(better, best)
            least = torch.minimum(error, least)
        outlier = off.sign() * (size - size.clamp_min(1e-8).pow(_NORM - 1) / beta).clamp_min(0)
        fit = groups.least_squares(q, groups.w - outlier * unit)
        beta *= _KAPPA
    return best
