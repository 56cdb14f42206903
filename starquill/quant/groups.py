"""Groups of weights that share a scale and a bias: rounding them, their error, refitting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fit:
    """Scale and bias `[R, G, 1]` of each group."""

    scale: Tensor
    bias: Tensor

    def where(self, better: Tensor, other: Fit) -> Fit:
        """This one where `better` `[R, G, 1]`, elsewhere the other."""
        return Fit(
            torch.where(better, self.scale, other.scale), torch.where(better, self.bias, other.bias)
        )

    def stored(self, dtype: torch.dtype) -> Fit:
        """In float32, rounded to what `dtype` holds."""
        most = torch.finfo(dtype).max
        scale, bias = (x.clamp(-most, most).to(dtype).float() for x in (self.scale, self.bias))
        return Fit(scale, bias)


@dataclass(frozen=True)
class Groups:
    """A band of weights `[R, G, g]`, with the importance `[G, g]` of each input, and levels."""

    w: Tensor
    importance: Tensor
    top: int

    def integers(self, fit: Fit) -> Tensor:
        """The nearest levels, as floats; a group of scale 0 is all bias."""
        inverse = torch.where(fit.scale == 0, 0.0, 1.0 / fit.scale)
        return ((self.w - fit.bias) * inverse).round_().clamp_(0, self.top)

    def error(self, fit: Fit, q: Tensor) -> Tensor:
        """Weighted squared error of each group, `[R, G, 1]`."""
        off = torch.addcmul(fit.bias, q, fit.scale).sub_(self.w)
        return off.square_().mul_(self.importance).sum(-1, keepdim=True)

    def least_squares(self, q: Tensor, target: Tensor) -> Fit:
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
        return Fit(scale, bias)

    def spread(self, share: float) -> Fit:
        """Levels spread evenly over `share` of each group's range."""
        low, high = self.w.aminmax(dim=-1, keepdim=True)
        low, high = low * share, high * share
        return Fit((high - low) / self.top, low)
