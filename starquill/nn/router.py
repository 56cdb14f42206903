"""Which experts a token goes to, and with what weight: `[..., E] -> [..., A]` twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from starquill.kernels import elementwise, experts


@dataclass(frozen=True)
class Routes:
    """The A experts of each token by rank, the best first, and their weights; `[..., A]`."""

    experts: Tensor  # int64
    weights: Tensor  # float32


Router = Callable[[Tensor], Routes]


def top_of_softmax(logits: Tensor, top: int, normalise: bool) -> Routes:
    """The `top` likeliest by a softmax over all; with `normalise` their weights sum to 1."""
    scores = logits.float()
    if elementwise.takes(scores):
        return Routes(*experts.top_of_softmax(scores, top, normalise))
    weights, chosen = scores.softmax(-1).topk(top, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routes(chosen, weights)


def sparsemixer(logits: Tensor, jitter: float) -> Routes:
    """Two experts as SparseMixer-v2 chooses them (arXiv 2409.12136), without its noise.

    The likeliest, weighted by a softmax over those that come close to it, as `jitter` says; then
    the same among the others.
    """
    scores = logits.float()
    left, chosen, weights = scores, [], []
    for _ in range(2):
        best, expert = left.max(dim=-1, keepdim=True)
        distance = (best - scores) / scores.abs().clamp(min=best)
        close = left.masked_fill(distance > 2 * jitter, float("-inf"))
        weights.append(close.softmax(-1).gather(-1, expert))
        chosen.append(expert)
        left = left.scatter(-1, expert, float("-inf"))
    return Routes(torch.cat(chosen, -1), torch.cat(weights, -1))
