"""Several requests of one call, run at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from starquill.engine.running import Deliver, Event, Running
from starquill.server.errors import ApiError
from starquill.types import Delta, GenerateRequest


class Submitting(Protocol):
    """The part of an engine that is needed here."""

    def submit(self, request: GenerateRequest, deliver: Deliver) -> Running: ...

    def abandon(self, running: Running) -> None: ...


class Together(AsyncIterator[tuple[int, Delta]]):
    """Iterate for each delta and the number of its request; `close` ends them all.

    They are submitted at once, so that one which cannot run refuses the call before anything was
    answered. The first that fails or is cancelled fails all of them.
    """

    def __init__(self, engine: Submitting, requests: Sequence[GenerateRequest]) -> None:
        self._engine = engine
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._unfinished = len(requests)
        self.running: list[Running] = []
        loop = asyncio.get_running_loop()
        try:
            for number, request in enumerate(requests):
                deliver = _into(self._events, number, loop)
                self.running.append(engine.submit(request, deliver))
        except BaseException:
            self.close()
            raise

    async def __anext__(self) -> tuple[int, Delta]:
        if not self._unfinished:
            raise StopAsyncIteration
        number, event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        if event.finish_reason == "cancelled":
            raise ApiError(503, "the request was cancelled before its end")
        self._unfinished -= event.finish_reason is not None
        return number, event

    def close(self) -> None:
        """Nobody reads on: whatever still runs ends at the engine's next step."""
        for running in self.running:
            self._engine.abandon(running)

    def __del__(self) -> None:
        # A response that never began to be sent has nobody who could close this.
        self.close()


def _into(
    events: asyncio.Queue[tuple[int, Event]], number: int, loop: asyncio.AbstractEventLoop
) -> Callable[[Event], None]:
    """Called in the engine's thread. It must not keep the reader alive, see `__del__`."""

    def deliver(event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(events.put_nowait, (number, event))

    return deliver
