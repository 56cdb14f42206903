"""What the comparisons with other programs share: our side, taking turns, ratios."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starquill.engine.runner import Runner
from starquill.loading import load
from starquill.nn.cache import blocks_for
from starquill.nn.linear import Linear

MOST_DECODED = 1024  # tokens after a prompt


class Ours:
    def __init__(self, folder: Path, quant: str | None = None) -> None:
        self.loaded = load(folder, quant=quant)
        weights = {
            id(m.weight): m.weight for m in self.loaded.model.modules() if isinstance(m, Linear)
        }
        self.bytes_per_token = sum(weight.nbytes for weight in weights.values())
        self._start(0)

    def encode(self, text: str) -> list[int]:
        assert self.loaded.tokenizer is not None
        return self.loaded.tokenizer.encode(text)

    def prefill(self, ids: list[int]) -> None:
        self._start(len(ids))
        self.runner.prefill(self.place, ids)

    def decode(self, ids: list[int]) -> None:
        for token in ids:
            self.runner.decode([self.place], [[token]])

    def _start(self, tokens: int) -> None:
        """An empty cache, with room for what is decoded after `tokens`."""
        span = min(tokens + MOST_DECODED, self.loaded.config.context_length)
        self.runner = Runner(self.loaded, blocks_for(span))
        self.place = self.runner.cache.place(span)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def random_ids(count: int) -> list[int]:
    """The same ones at every call, within the embedded model's vocabulary too."""
    return random.Random(count).choices(range(100, 5000), k=count)


def in_turn(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each measure; they take turns, in an order that turns around each round."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds):
        for name in list(measures)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(measures[name]())
    return {name: round(statistics.median(rates), 2) for name, rates in found.items()}


def against(rates: dict[str, float]) -> dict[str, Any]:
    theirs = max(rate for name, rate in rates.items() if name != "starquill")
    return {"tokens_per_second": rates, "ratio": round(rates["starquill"] / theirs, 3)}
