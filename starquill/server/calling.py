"""Calling the application without a socket: from a batch, or from another machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from starquill.errors import StarquillError

LOOK_AGAIN_SECONDS = 1.0
_CARRIED = ("method", "path", "raw_path", "query_string", "headers", "client", "http_version")


class EngineEndedError(StarquillError):
    """The engine's thread has ended: nothing that waits for it will ever be answered."""


@dataclass(frozen=True)
class Call:
    """A request that can be sent to another process: of its ASGI scope, what is plain data."""

    scope: dict[str, Any]
    body: bytes = b""

    @classmethod
    def of(cls, scope: Any, body: bytes) -> Call:
        return cls({name: scope[name] for name in _CARRIED if name in scope}, body)

    @classmethod
    def post(cls, path: str, body: object) -> Call:
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        return cls({"method": "POST", "path": path, "headers": headers}, json.dumps(body).encode())


async def messages(
    app: ASGIApp, call: Call, alive: Callable[[], bool] = lambda: True
) -> AsyncIterator[Message]:
    """What `app` sends in answer to `call`. Who stops reading is a client that disconnects.

    Raises EngineEndedError when `alive` turns false before the end.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    unread = [call.body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(call), receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.ensure_future(run())
    try:
        while (message := await _next(sent, alive)) is not None:
            yield message
        await task
    finally:
        left.set()
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _next(sent: asyncio.Queue[Message | None], alive: Callable[[], bool]) -> Message | None:
    while True:
        with suppress(TimeoutError):
            return await asyncio.wait_for(sent.get(), LOOK_AGAIN_SECONDS)
        if not alive():
            raise EngineEndedError("the engine's thread has ended; its log says why")


async def ask(
    app: ASGIApp, call: Call, alive: Callable[[], bool] = lambda: True
) -> tuple[int, dict[str, Any]]:
    """The whole answer to a call that is answered with a JSON object: its status, the object."""
    status, parts = 500, []
    async for message in messages(app, call, alive):
        if message["type"] == "http.response.start":
            status = message["status"]
        parts.append(message.get("body", b""))
    return status, json.loads(b"".join(parts))


def _scope(call: Call) -> dict[str, Any]:
    path: str = call.scope["path"]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "client": None,
        "server": None,
        **call.scope,
        "state": {},
    }
