"""What clients of a cluster talk to: it passes calls on to replicas, and outlives them.

Nothing of an answer in one piece is shown before all of it is here, so a call whose replica dies is
made again. A stream cannot be taken back: it ends with an error that says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from starquill.server.calling import Call
from starquill.server.errors import ApiError
from starquill.server.middleware import REQUEST_ID, Guard, Record
from starquill.server.options import ServerOptions
from starquill.server.stream import event, unless_client_leaves

Forward = Callable[[Call], AsyncIterator[Message]]
MOST_TRIES = 5  # a call that ends every replica it reaches must not end them all for ever
STREAMS = {"text/event-stream": "events", "application/x-ndjson": "lines"}
LOST = "the replica that wrote this was lost; what came so far is not the whole answer"

log = logging.getLogger("starquill")


class FrontMetrics:
    """What the front counts; the replicas' own figures are in Ray's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answers = Counter(
            "starquill_front_http_requests",
            "Requests by status.",
            ("status",),
            registry=self.registry,
        )
        self.lost = Counter(
            "starquill_front_lost_calls",
            "Calls whose replica was lost before their end, by what became of them.",
            ("outcome",),
            registry=self.registry,
        )

    def answered(self, _: Scope, status: int) -> None:
        self._answers.labels(str(status)).inc()


class Front:
    """An ASGI application before replicas. `lost` are errors after which another may answer.

    `replicas` tells how many run of each model.
    """

    def __init__(
        self,
        forward: Forward,
        lost: tuple[type[Exception], ...],
        replicas: Callable[[], Mapping[str, int]],
        metrics: FrontMetrics,
    ) -> None:
        self._forward = forward
        self._lost = lost
        self._replicas = replicas
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is told to speak nothing else"
        http = Request(scope, receive)
        if (own := await self._own(scope["path"])) is not None:
            await own(scope, receive, send)
            return
        call = Call.of(scope, await http.body())
        await unless_client_leaves(http, self._pass_on(call, send))

    async def _own(self, path: str) -> Response | None:
        """Answers that are not a replica's."""
        if path == "/metrics":
            text = generate_latest(self._metrics.registry)
            return Response(text, media_type=CONTENT_TYPE_LATEST)
        if path == "/health":
            counts = await asyncio.to_thread(self._replicas)
            if absent := [model for model, count in counts.items() if not count]:
                whose = f" of {', '.join(absent)}" if len(counts) > 1 else ""
                told = f"no replica{whose} runs now; others are being started"
                return ApiError(503, told).response()
            models = {"models": dict(counts)} if len(counts) > 1 else {}
            return JSONResponse({"status": "ok", "replicas": sum(counts.values()), **models})
        return None

    async def _pass_on(self, call: Call, send: Send) -> None:
        for _ in range(MOST_TRIES):
            passing = Passing(send)
            try:
                async with aclosing(cast(Any, self._forward(call))) as messages:
                    async for message in messages:
                        await passing.take(message)
                await passing.finish()
                return
            except self._lost as error:
                log.warning("a replica was lost (%s)", type(error).__name__)
                if passing.shown:
                    self._metrics.lost.labels("stream ended").inc()
                    await passing.end_with(ApiError(503, LOST))
                    return
                self._metrics.lost.labels("called again").inc()
        raise ApiError(500, f"{MOST_TRIES} replicas were lost while they worked on this request")


class Passing:
    """One try: holds the answer back until it is whole, or a stream until its first text."""

    def __init__(self, send: Send) -> None:
        self.shown = False
        self._send = send
        self._held: list[Message] = []
        self._kind: str | None = None

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            media = Headers(raw=message["headers"]).get("Content-Type", "").partition(";")[0]
            self._kind = STREAMS.get(media.strip())
        self._held.append(message)
        if self._kind is not None and (self.shown or message.get("body")):
            await self.finish()

    async def finish(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self.shown = True
            await self._send(message)

    async def end_with(self, error: ApiError) -> None:
        told = event(error.body())
        if self._kind == "events":
            told = b"event: error\n" + told
        else:
            told = told.removeprefix(b"data: ").rstrip() + b"\n"
        await self._send({"type": "http.response.body", "body": told, "more_body": False})


def create_front(front: Front, options: ServerOptions, metrics: FrontMetrics) -> ASGIApp:
    """`front` behind what `create_app` puts before its routes."""
    app: ASGIApp = Guard(front, options)
    if options.cors:
        app = CORSMiddleware(
            app,
            allow_origins=options.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    return Record(app, metrics)  # type: ignore[arg-type]  # it needs `answered` alone
