"""From the engine's thread to asyncio: a request's deltas, and server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request

from starquill.engine.engine import Engine
from starquill.engine.running import Event
from starquill.types import Delta, GenerateRequest

T = TypeVar("T")


class ClientLeftError(Exception):
    """Nobody is there to read the answer."""


async def deltas(engine: Engine, request: GenerateRequest) -> AsyncIterator[Delta]:
    """Run `request`; leaving the iteration early ends it at the engine's next step."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def deliver(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    running = engine.submit(request, deliver)
    try:
        while True:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            yield event
            if event.finish_reason is not None:
                return
    finally:
        engine.abandon(running)


async def unless_client_leaves(http: Request, work: Awaitable[T]) -> T:
    """Await `work`; a client that disconnects cancels it (raises ClientLeftError)."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def event(data: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n".encode()
