"""Stand-ins for an engine and a model, for what a real one would do only by chance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starquill.engine.loaded import LoadedModel
from starquill.types import Delta, EngineOptions, EngineStats, GenerateRequest, GenerationStats

Event = Delta | Exception


@dataclass
class Submitted:
    """A request that the engine below was given."""

    request: GenerateRequest
    cached: int = 0
    abandoned: bool = False

    def stats(self) -> GenerationStats:
        return GenerationStats(self.request.prompt_tokens, 3, 0.0, 0.0, None, None, self.cached)


class AnsweringEngine:
    """Delivers for each request the events that `answer` gives, at once."""

    def __init__(
        self, model: LoadedModel, answer: Callable[[GenerateRequest], Sequence[Event]]
    ) -> None:
        self.model = model
        self.options = EngineOptions()
        self.answer = answer
        self.submitted: list[Submitted] = []

    def submit(self, request: GenerateRequest, deliver: Callable[[Event], None]) -> Submitted:
        cached = len(self.submitted) + 1
        self.submitted.append(Submitted(request, cached))
        for event in self.answer(request):
            deliver(event)
        return self.submitted[-1]

    def abandon(self, running: Submitted) -> None:
        running.abandoned = True

    def stats(self) -> EngineStats:
        return EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


class Gate:
    """A model that computes a step only when the test lets it, and counts them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps = 0
        self.free = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def hidden(self, batch: Any) -> Any:
        self.entered.release()
        self.free.acquire()
        self.steps += 1
        return self.model.hidden(batch)

    def logits(self, hidden: Any) -> Any:
        return self.model.logits(hidden)

    def open(self) -> None:
        """Never stop again."""
        self.free.release(1_000_000)
