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

    def scores(self, gates: Gates, rows: Sequence[int], *, pooled: bool) -> Tensor:
        """`[L, n, E]` of the means of `rows`, or of all their tokens."""
        return gates.scores(self.means[:, list(rows)] if pooled else self.states.of(rows))

    def loss(self, scores: Tensor, rows: Sequence[int], *, pooled: bool) -> Tensor:
        """The sum over layers: gates of different layers do not meet, so each learns its own."""
        if self.costs is not None:
            each = [c.mean(0, keepdim=True) if pooled else c for c in (self.costs[r] for r in rows)]
            return _weighed(scores, torch.cat(each))
        wanted = torch.tensor([self.labels[row] for row in rows])
        if not pooled:
            counts = torch.tensor([self.states.lengths[row] for row in rows])
            wanted = wanted.repeat_interleave(counts)
        return F.cross_entropy(scores.flatten(0, 1), wanted.repeat(len(scores))) * len(scores)


def _weighed(scores: Tensor, costs: Tensor) -> Tensor:
    """Each token is a lesson for the expert that is best, and counts by what others cost.

    The expected cost itself is no such bowl: gates that are sure too early never leave its rim.
    """
    weight = costs.mean(-1)
    weight = weight / weight.sum().clamp_min(1e-12)
    best = costs.argmin(-1).repeat(len(scores))
    each = F.cross_entropy(scores.flatten(0, 1), best, reduction="none")
    return (each.view(len(scores), -1) * weight).sum()


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
        optimizer = torch.optim.AdamW([weight, bias], lr=rate, weight_decay=0.0)
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

    def _epoch(self, lessons: Lessons, split: Split, config: AnyMoeConfig) -> None:
        pooled = config.gate == "mean"
        # Each epoch has a seed of its own, so that a resumed run sees the same order.
        seed = hashlib.sha256(f"{config.seed} {self.epoch}".encode()).digest()[:8]
        order = np.random.default_rng(int.from_bytes(seed)).permutation(split.training).tolist()
        total = 0.0
        for start in range(0, len(order), config.batch_size):
            rows = order[start : start + config.batch_size]
            scores = lessons.scores(self.gates, rows, pooled=pooled)
            loss = lessons.loss(scores, rows, pooled=pooled)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(rows)
        self.epoch += 1
        count = len(self.gates.layers)
        entry = {"epoch": self.epoch, "loss": total / len(order) / count}
        judged = entry["loss"]
        if split.held_out:
            found = judge(self.gates, lessons, split.held_out)
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
def judge(gates: Gates, lessons: Lessons, rows: Sequence[int]) -> Judged:
    """Row by row: a row's expert is that of its mean score, a token's that of its own."""
    given, together = [], []
    layers, experts = gates.bias.shape
    counts, hits = torch.zeros(layers, experts), torch.zeros(layers)
    row_loss = token_loss = 0.0
    tokens = sum(lessons.states.lengths[row] for row in rows)
    for row in rows:
        scores = lessons.scores(gates, [row], pooled=False)  # [L, T, E]
        mean = scores.mean(1, keepdim=True)  # what the mean of the states scores
        row_loss += float(lessons.loss(mean, [row], pooled=True)) / len(rows)
        share = lessons.states.lengths[row] / tokens
        token_loss += float(lessons.loss(scores, [row], pooled=False)) * share
        given.append(mean[:, 0].argmax(-1))
        together.append(scores.softmax(-1).mean((0, 1)).argmax())
        chosen = scores.argmax(-1)
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
