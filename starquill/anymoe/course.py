"""Training gates on states that are there already: an epoch costs the gates and nothing else."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from starquill.anymoe.config import PATIENCE, AnyMoeConfig
from starquill.anymoe.gates import Gates
from starquill.anymoe.rows import Split
from starquill.anymoe.states import States
from starquill.errors import NumericsError

OnEpoch = Callable[["Course"], None]


@dataclass(frozen=True, eq=False)
class Lessons:
    """States, and of each row its expert; for the lm objective by row what it costs `[T, E]`."""

    states: States
    labels: Sequence[int]
    costs: Sequence[Tensor] | None
    experts: int

    @cached_property
    def means(self) -> Tensor:
        return self.states.means()

    def inputs(self, rows: Sequence[int], *, pooled: bool) -> Tensor:
        """`[L, n, D]`: the means of `rows`, or all their tokens."""
        return self.means[:, list(rows)] if pooled else self.states.of(rows)

    def wanted(self, rows: Sequence[int], *, pooled: bool) -> Wanted:
        """For what `inputs` gives."""
        lengths = self.states.lengths
        if self.costs is None:
            each = [self.labels[r] for r in rows for _ in range(1 if pooled else lengths[r])]
            return Wanted(torch.tensor(each), torch.full((len(each),), 1 / len(each)))
        costs = [self.costs[r] for r in rows]
        return _weighed(torch.cat([c.mean(0, keepdim=True) if pooled else c for c in costs]))


@dataclass(frozen=True, eq=False)
class Wanted:
    """The expert of each input, and what it counts, `[n]` each."""

    experts: Tensor
    weights: Tensor

    def loss(self, scores: Tensor) -> Tensor:
        """Cross-entropy of `scores` `[L, E, n]`, the sum over layers: gates of different layers do
        not meet, so each learns its own.
        """
        each = F.cross_entropy(
            scores, self.experts.expand(len(scores), -1), reduction="none"
        )  # [L, n]
        return (each * self.weights).sum()

    def slope(self, scores: Tensor) -> Tensor:
        """`[L, E, n]`: the gradient of `loss`, (softmax of the scores - what is wanted) · weight.

        torch's autograd comes to the same, several times as slowly: gates are thin.
        """
        slope = scores.softmax(1)
        experts = self.experts.expand(len(scores), 1, -1)
        slope.scatter_add_(1, experts, slope.new_full((), -1.0).expand(experts.shape))
        return slope.mul_(self.weights)


def _weighed(costs: Tensor) -> Wanted:
    """Each token is a lesson for the expert that is best, and counts by what others cost.

    The expected cost itself is no such bowl: gates that are sure too early never leave its rim.
    """
    weight = costs.mean(-1)
    return Wanted(costs.argmin(-1), weight / weight.sum().clamp_min(1e-12))


@dataclass
class Course:
    """Where training stands: `save` and `resume` keep all of it."""

    gates: Gates
    optimizer: torch.optim.AdamW
    epoch: int = 0
    best: float = math.inf
    best_epoch: int = 0
    best_gates: Gates | None = None
    history: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def begin(cls, layers: Sequence[int], experts: int, width: int, rate: float) -> Course:
        """Gates that know nothing: all experts are equally likely, so no seed matters."""
        weight = torch.zeros(len(layers), experts, width, requires_grad=True)
        bias = torch.zeros(len(layers), experts, requires_grad=True)
        optimizer = torch.optim.AdamW([weight, bias], lr=rate, weight_decay=0.0, fused=True)
        return cls(Gates(tuple(layers), weight, bias), optimizer)

    def save(self, path: Path) -> None:
        best = self.best_gates
        state = {
            "gates": (self.gates.weight.detach(), self.gates.bias.detach()),
            "best_gates": None if best is None else (best.weight, best.bias),
            "optimizer": self.optimizer.state_dict(),
            "numbers": (self.epoch, self.best, self.best_epoch),
            "history": self.history,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            self.gates.weight.copy_(state["gates"][0])
            self.gates.bias.copy_(state["gates"][1])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.best, self.best_epoch = state["numbers"]
        if state["best_gates"] is not None:
            self.best_gates = Gates(self.gates.layers, *state["best_gates"])
        self.history = state["history"]

    @property
    def is_stale(self) -> bool:
        """Whether the held-out loss has not fallen for long."""
        return self.epoch - self.best_epoch >= PATIENCE

    def run(self, lessons: Lessons, split: Split, config: AnyMoeConfig, on_epoch: OnEpoch) -> Gates:
        """Go on until all epochs are through, or held-out rows say that it is enough."""
        while self.epoch < config.epochs and not (split.held_out and self.is_stale):
            self._epoch(lessons, split, config)
            on_epoch(self)
        assert self.best_gates is not None
        return self.best_gates

    @torch.no_grad()
    def _step(self, lessons: Lessons, rows: Sequence[int], *, pooled: bool) -> float:
        """Learn from `rows`; the loss that they had before."""
        inputs = lessons.inputs(rows, pooled=pooled)  # [L, n, D]
        wanted = lessons.wanted(rows, pooled=pooled)
        scores = self.gates.scores(inputs)
        slope = wanted.slope(scores)
        self.gates.weight.grad, self.gates.bias.grad = slope @ inputs, slope.sum(2)
        self.optimizer.step()
        return float(wanted.loss(scores))

    def _epoch(self, lessons: Lessons, split: Split, config: AnyMoeConfig) -> None:
        pooled = config.gate == "mean"
        # Each epoch has a seed of its own, so that a resumed run sees the same order.
        seed = hashlib.sha256(f"{config.seed} {self.epoch}".encode()).digest()[:8]
        order = np.random.default_rng(int.from_bytes(seed)).permutation(split.training).tolist()
        total = 0.0
        for start in range(0, len(order), config.batch_size):
            rows = order[start : start + config.batch_size]
            total += self._step(lessons, rows, pooled=pooled) * len(rows)
        self.epoch += 1
        count = len(self.gates.layers)
        entry = {"epoch": self.epoch, "loss": total / len(order) / count}
        judged = entry["loss"]
        if split.held_out:
            found = judge(self.gates, lessons, split.held_out, pooled=pooled)
            judged = entry["held_out_loss"] = found.loss_of(pooled)
            entry["accuracy"] = found.accuracy
            entry["token_accuracy"] = found.token_accuracy
        self.history.append(entry)
        if not math.isfinite(judged):
            raise NumericsError(
                f"the loss of the gates is {judged} after {self.epoch} epochs; lower the learning "
                "rate"
            )
        if judged < self.best or self.best_gates is None:
            self.best, self.best_epoch = judged, self.epoch
            weight, bias = (t.detach().clone() for t in (self.gates.weight, self.gates.bias))
            self.best_gates = Gates(self.gates.layers, weight, bias)


@dataclass(frozen=True, eq=False)
class Judged:
    """How gates did on rows: `given[l, r]` is the expert that layer l finds for row r."""

    given: Tensor  # [L, rows]
    together: Tensor  # [rows]: by all layers
    labels: Tensor  # [rows]
    token_hits: Tensor  # [L]
    token_counts: Tensor  # [L, E]: tokens that go to each expert
    tokens: int
    row_loss: float
    token_loss: float

    def loss_of(self, pooled: bool) -> float:
        return self.row_loss if pooled else self.token_loss

    @property
    def accuracy(self) -> float:
        return float((self.given == self.labels).float().mean())

    @property
    def token_accuracy(self) -> float:
        return float(self.token_hits.float().mean()) / self.tokens

    @property
    def by_layer(self) -> tuple[float, ...]:
        return tuple((self.given == self.labels).float().mean(1).tolist())

    def by_expert(self, experts: int) -> tuple[float, ...]:
        hits = (self.given == self.labels).float().mean(0)
        found = (hits[self.labels == e] for e in range(experts))
        return tuple(float(h.mean()) if len(h) else math.nan for h in found)

    def confusion(self, experts: int) -> tuple[tuple[int, ...], ...]:
        pairs = (self.labels * experts + self.together).bincount(minlength=experts**2)
        return tuple(map(tuple, pairs.view(experts, experts).tolist()))

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple((self.token_counts.float().mean(0) / self.tokens).tolist())


@torch.no_grad()
def judge(gates: Gates, lessons: Lessons, rows: Sequence[int], *, pooled: bool) -> Judged:
    """Row by row: a row's expert is that of its mean score, a token's that of its own.

    With `pooled` gates a token's is that of its row.
    """
    given, together = [], []
    layers, experts = gates.bias.shape
    counts, hits = torch.zeros(layers, experts), torch.zeros(layers)
    row_loss = token_loss = 0.0
    tokens = sum(lessons.states.lengths[row] for row in rows)
    for row in rows:
        scores = gates.scores(lessons.inputs([row], pooled=False))  # [L, E, T]
        mean = scores.mean(2, keepdim=True)  # what the mean of the states scores
        row_loss += float(lessons.wanted([row], pooled=True).loss(mean)) / len(rows)
        share = lessons.states.lengths[row] / tokens
        token_loss += float(lessons.wanted([row], pooled=False).loss(scores)) * share
        given.append(mean[:, :, 0].argmax(-1))
        together.append(scores.softmax(1).mean((0, 2)).argmax())
        chosen = scores.argmax(1)  # [L, T]
        if pooled:
            chosen = given[-1][:, None].expand_as(chosen)
        counts += F.one_hot(chosen, experts).sum(1)
        hits += (chosen == lessons.labels[row]).sum(1)
    return Judged(
        given=torch.stack(given, dim=1),
        together=torch.stack(together),
        labels=torch.tensor([lessons.labels[row] for row in rows]),
        token_hits=hits,
        token_counts=counts,
        tokens=tokens,
        row_loss=row_loss / layers,
        token_loss=token_loss / layers,
    )
