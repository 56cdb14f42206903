"""Which experts a token goes to, and with what weight: `[..., E] -> [..., A]` twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from starquill.kernels import elementwise, experts


@dataclass(frozen=True)
class Routes:
    """The A experts of each token by rank, the best first, and their weights; `[..., A]`."""

    experts: Tensor  # int64
    weights: Tensor  # float32

    @classmethod
    def none_yet(cls, layers: int, top: int) -> Routes:
        """Room for what a sequence chooses in each of `layers`: `[layers, A]`."""
        experts = torch.zeros(layers, top, dtype=torch.int64)
        return cls(experts, torch.zeros(layers, top))

    @classmethod
    def of_rows(cls, each: Sequence[Routes]) -> Routes:
        """Of the sequence of each row: `[B, layers, A]`."""
        return cls(torch.stack([r.experts for r in each]), torch.stack([r.weights for r in each]))

    def of_layer(self, layer: int, like: Tensor) -> Routes:
        """`[B, layers, A] -> [B, T, A]`, the same for all tokens of a row of `like` `[B, T, D]`."""
        shape = (-1, like.shape[1], -1)
        experts, weights = (
            part[:, layer, None].expand(shape).to(like.device)
            for part in (self.experts, self.weights)
        )
        return Routes(experts, weights)

    def of(self, rows: Sequence[int]) -> Routes:
        """Those of some rows of the batch."""
        return Routes(self.experts[rows], self.weights[rows])


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
    if elementwise.takes(scores):
        return Routes(*experts.sparsemixer(scores, jitter))
    left, chosen, weights = scores, [], []
    for _ in range(2):
        best, expert = left.max(dim=-1, keepdim=True)
        distance = (best - scores) / scores.abs().clamp(min=best)
        close = left.masked_fill(distance > 2 * jitter, float("-inf"))
        weights.append(close.softmax(-1).gather(-1, expert))
        chosen.append(expert)
        left = left.scatter(-1, expert, float("-inf"))
    return Routes(torch.cat(chosen, -1), torch.cat(weights, -1))
