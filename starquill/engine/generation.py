"""`Generation`: a running request as its reader sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from starquill.engine.running import Deliver, Event, Running
from starquill.types import Delta, GenerateRequest, GenerationStats


class Driver(Protocol):
    """The part of an engine that a `Generation` needs."""

    def step(self) -> bool: ...

    def end(self, running: Running) -> Delta | None: ...

    def abandon(self, running: Running) -> None: ...


class Generation(Iterator[Delta]):
    """Iterate for its deltas; `cancel` ends it early.

    Asking for a delta makes the engine work until there is one, for every request that it has: no
    other thread is needed, and nothing is computed that nobody asked for. What was computed for
    this request meanwhile waits here.
    """

    def __init__(self, engine: Driver, submit: Callable[[Deliver], Running]) -> None:
        self._engine = engine
        self._waiting: deque[Event] = deque()
        self._running = submit(self._waiting.append)
        self._ended = False

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        while not self._waiting:
            self._engine.step()
            if self._ended:  # cancelled by another thread
                raise StopIteration
        event = self._waiting.popleft()
        if isinstance(event, Exception):
            self._ended = True
            raise event
        self._ended = event.finish_reason is not None
        return event

    def cancel(self) -> Delta | None:
        """End now; the last delta, with all text not yet read, or None when it had ended."""
        if self._ended:
            return None
        self._ended = True
        last = self._engine.end(self._running)
        unread = "".join(event.text for event in self._waiting if isinstance(event, Delta))
        return Delta(self.request.id, None, unread + (last.text if last else ""), None, "cancelled")

    def __del__(self) -> None:
        # A reader that went away must not keep its place. It may not have begun.
        if not getattr(self, "_ended", True):
            self._engine.abandon(self._running)

    @property
    def request(self) -> GenerateRequest:
        return self._running.request

    @property
    def stats(self) -> GenerationStats:
        """Counts and times up to now."""
        return self._running.stats()

    @property
    def scalings(self) -> Tensor | None:
        """With X-LoRA, how strongly each of K adapters acted, `[T, M, K]`; else None.

        Row t is for the prompt's or the text's token t as it was read, to choose token t + 1. M
        are the Linears that carry adapters (`model.xlora.layers`), K are `model.xlora.names`.
        """
        scalings = self._running.scalings
        return None if scalings is None else scalings.array()
