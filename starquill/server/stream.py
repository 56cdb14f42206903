"""Server-sent events, and clients that leave before their answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

T = TypeVar("T")
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeftError(Exception):
    """Nobody is there to read the answer."""


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
    text = data if isinstance(data, str) else json_text(data)
    return f"data: {text}\n\n".encode()


def json_text(data: dict[str, Any]) -> str:
    """JSON in one line; NaN and infinities, which it has not, are a fault."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def streamed(content: AsyncIterator[bytes], kind: str = "text/event-stream") -> Response:
    """An answer in parts, which nobody on the way to the client may keep or collect."""
    return StreamingResponse(content, 200, STREAM_HEADERS, kind)
