"""Rotary position embedding: frequencies per scaling type, and the half-split rotation.

Formulas: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753);
checked against transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starquill.kernels import elementwise

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope"]


@dataclass(frozen=True)
class LongRope:
    """LongRoPE's own divisor of each frequency, `[Dh/2]`, and the scale of cos and sin."""

    factors: tuple[float, ...]
    scale: float


@dataclass(frozen=True)
class RopeConfig:
    """Everything the frequencies depend on. `original_context` is the length trained on.

    `short` and `long` are for sequences that stay within it and for those that do not.
    """

    theta: float
    head_dim: int
    type: RopeType = "default"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short: LongRope | None = None
    long: LongRope | None = None

    @property
    def needs_span(self) -> bool:
        """Whether the length that a sequence may reach counts."""
        return self.type in ("dynamic", "longrope")


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """The scale that YaRN puts on cos and sin when the config gives none."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _inverse_frequencies(theta: float, head_dim: int, factors: float | Tensor = 1.0) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (factors * theta**exponents)  # [Dh/2]


def _yarn_frequencies(rope: RopeConfig) -> Tensor:
    """Interpolate the slow dimensions by `factor`, keep the fast ones, ramp between (YaRN §3.2)."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return rope.head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    steps = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    interpolated = ((steps - low) / (high - low)).clamp(0, 1)
    fast = _inverse_frequencies(rope.theta, rope.head_dim)
    return fast / rope.factor * interpolated + fast * (1 - interpolated)


def frequencies(rope: RopeConfig, span: int) -> Tensor:
    """Inverse frequencies `[Dh/2]` for a sequence of `span` tokens in all.

    Two types depend on `span`. Past the trained context `dynamic`'s base grows with the length of
    the whole sequence, and `longrope` takes other factors. One sequence keeps one span, so that
    cached keys stay valid.
    """
    if rope.type == "longrope":
        factors = torch.tensor(_long_rope(rope, span).factors, dtype=torch.float32)
        return _inverse_frequencies(rope.theta, rope.head_dim, factors)
    if rope.type == "yarn":
        return _yarn_frequencies(rope)
    if rope.type == "linear":
        return _inverse_frequencies(rope.theta, rope.head_dim) / rope.factor
    if rope.type == "dynamic" and span > rope.original_context:
        growth = rope.factor * span / rope.original_context - (rope.factor - 1)
        theta = rope.theta * growth ** (rope.head_dim / (rope.head_dim - 2))
        return _inverse_frequencies(theta, rope.head_dim)
    return _inverse_frequencies(rope.theta, rope.head_dim)


def reach(rope: RopeConfig, trained: int) -> int:
    """How long a sequence may get: `dynamic` goes past its length, other types include it."""
    return int(trained * rope.factor) if rope.type == "dynamic" else trained


def turning(rope: RopeConfig, span: int) -> int:
    """Keys of sequences turn alike where this is equal: see `frequencies`."""
    if not rope.needs_span or span <= rope.original_context:
        return 0
    return span if rope.type == "dynamic" else 1


def _long_rope(rope: RopeConfig, span: int) -> LongRope:
    chosen = rope.long if span > rope.original_context else rope.short
    assert chosen is not None
    return chosen


def _scales(rope: RopeConfig, spans: Tensor) -> np.float32 | NDArray[np.float32]:
    """What cos and sin are scaled by: one number, or of each row `[B, 1, 1]`."""
    if rope.type != "longrope":
        return np.float32(rope.attention_factor)
    scales = [_long_rope(rope, span).scale for span in spans.tolist()]
    return np.array(scales, dtype=np.float32)[:, None, None]


def rope_table(rope: RopeConfig, positions: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for `positions` `[B, T]`, as `[B, 1, T, Dh]` float32.

    `spans` `[B]` is the length that each row's sequence may reach (see `frequencies`).
    """
    if rope.needs_span:
        inverse = np.stack([_frequencies(rope, int(span))[None] for span in spans])  # [B, 1, Dh/2]
    else:
        inverse = _frequencies(rope, 0)
    # numpy: torch's cos and sin of a few values wake all of its threads, for milliseconds.
    angles = positions.numpy(force=True)[..., None].astype(np.float32) * inverse  # [B, T, Dh/2]
    scales = _scales(rope, spans)
    cos, sin = (
        torch.from_numpy(np.concatenate((half, half), axis=-1)[:, None])
        for half in (np.cos(angles) * scales, np.sin(angles) * scales)
    )
    return cos, sin


@lru_cache(maxsize=64)
def _frequencies(rope: RopeConfig, span: int) -> NDArray[np.float32]:
    return frequencies(rope, span).numpy()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[B, H, T, Dh]`: dimension i pairs with i + Dh/2 (GPT-NeoX order)."""
    if elementwise.takes(x) and cos.dtype is torch.float32:
        return elementwise.rotate(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
