"""What a mixture is made from, and what is told about the making; plain data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from starquill.errors import BadRequestError

Gate = Literal["mean", "token"]
Objective = Literal["label", "lm"]
LoraExperts = Literal["merge", "delta"]

BASE = "base"  # what expert 0, the base model's own MLP, is called
PATIENCE = 10


@dataclass(frozen=True)
class AnyMoeConfig:
    """How gates are trained, and what is saved.

    `layers` become mixtures, all where it is None. A `token` gate learns from every token, and
    chooses `top_k` experts for each; a `mean` gate from the mean over a prompt, and chooses once.
    `objective` is the rows' labels, or `lm`: the loss that each expert's model has on the rows.
    `lora_experts` says whether LoRAs become whole MLPs or stay deltas of the base's. A share of
    `held_out` rows is kept from training: to stop early, and to report. Of a row the first
    `tokens` are read. Without `bundle` the folder refers to the experts instead of holding them.
    """

    layers: Sequence[int] | None = None
    epochs: int = 100
    learning_rate: float = 1e-3
    batch_size: int = 4
    seed: int = 0
    gate: Gate = "token"
    top_k: int = 1
    objective: Objective = "label"
    lora_experts: LoraExperts = "merge"
    held_out: float = 0.2
    tokens: int = 512
    bundle: bool = True

    def check(self, experts: int) -> None:
        """Raise BadRequestError for what cannot be, with `experts` of them besides the base."""
        for name, value, known in (
            ("gate", self.gate, get_args(Gate)),
            ("objective", self.objective, get_args(Objective)),
            ("lora_experts", self.lora_experts, get_args(LoraExperts)),
        ):
            if value not in known:
                raise BadRequestError(f"{name} is {value!r} (expected {' or '.join(known)})")
        for name, number in (("epochs", self.epochs), ("batch_size", self.batch_size)):
            if number < 1:
                raise BadRequestError(f"{name} is {number} (expected 1 or more)")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise BadRequestError(f"learning_rate is {self.learning_rate} (expected more than 0)")
        if not 0 <= self.held_out < 1:
            raise BadRequestError(f"held_out is {self.held_out} (expected 0 to below 1)")
        if self.tokens < 2:
            raise BadRequestError(f"tokens is {self.tokens} (expected 2 or more)")
        if experts < 1:
            raise BadRequestError("a mixture needs an expert besides the base; name one")
        if not 1 <= self.top_k <= experts + 1:
            raise BadRequestError(
                f"top_k is {self.top_k} (expected 1 to {experts + 1}: the base and {experts} more)"
            )

    def chosen(self, layers: int) -> tuple[int, ...]:
        """The layers that become mixtures, of a model with so many."""
        if self.layers is None:
            return tuple(range(layers))
        found = tuple(sorted(set(self.layers)))
        if wrong := [n for n in found if not 0 <= n < layers]:
            raise BadRequestError(f"layers has {wrong[0]}, and the model has 0 to {layers - 1}")
        if not found:
            raise BadRequestError("layers is empty (expected some, as 0-3,5)")
        return found


def read_layers(text: str) -> tuple[int, ...]:
    """`0-15,20` as numbers."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise BadRequestError(f"layers is {text!r} (expected numbers and ranges, as 0-15,20)")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(sorted(set(found)))


def check_names(experts: Mapping[str, str | Path]) -> tuple[str, ...]:
    """The names of all experts, the base first."""
    for name in experts:
        if not re.fullmatch(r"[\w.+-]+", name) or name == BASE or name.isdigit():
            raise BadRequestError(
                f"an expert is called {name!r} (expected letters, digits, and . _ + -; no number, "
                f"and not {BASE!r}, which is the base model's)"
            )
    return (BASE, *experts)


@dataclass(frozen=True)
class TrainProgress:
    """How far it has come: `stage` is `reading`, `training` or `writing`."""

    stage: str
    done: int
    total: int
    note: str = ""


OnProgress = Callable[[TrainProgress], None]


@dataclass(frozen=True)
class TrainReport:
    """What came out. Numbers are of held-out rows, of all rows where none were held out.

    `accuracy` is the share of rows whose expert a layer's gate finds from all their tokens, the
    mean over layers, `by_layer` and `by_expert` too; `token_accuracy` counts tokens by the expert
    that each goes to (with `mean` gates its row's). `confusion[e][f]` is how many rows of expert e
    all layers together give to f, `shares[e]` how many of all tokens go to expert e, the mean over
    layers.
    """

    out: Path
    experts: tuple[str, ...]
    layers: tuple[int, ...]
    epochs: int
    best_epoch: int
    rows: int
    held_out: int
    loss: float
    accuracy: float
    token_accuracy: float
    by_layer: tuple[float, ...]
    by_expert: tuple[float, ...]
    confusion: tuple[tuple[int, ...], ...]
    shares: tuple[float, ...]
    warnings: tuple[str, ...] = ()
