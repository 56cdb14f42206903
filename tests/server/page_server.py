"""A server in a thread, and answers in the shape of the real routes, for the page alone."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from starquill.server import page
from starquill.server.stream import event


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """The address at which `app` answers until the block ends."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # from here on callers wait for the server, and none is refused
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@dataclass(frozen=True)
class Token:
    """A token, its probability, and what else was likely."""

    text: str
    p: float
    others: Mapping[str, float] = field(default_factory=dict)


def chunk(*tokens: Token, text: str | None = None, finish: str | None = None) -> dict[str, Any]:
    """One event of a completion; its text is that of its tokens unless `text` says otherwise."""
    scores = {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [math.log(token.p) for token in tokens],
        "top_logprobs": [
            {text: math.log(p) for text, p in {**token.others, token.text: token.p}.items()}
            for token in tokens
        ],
    }
    choice = {
        "index": 0,
        "text": "".join(token.text for token in tokens) if text is None else text,
        "logprobs": scores if tokens else None,
        "finish_reason": finish,
    }
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


USAGE = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [],
    "usage": {
        "prompt_tokens": 1234,
        "completion_tokens": 4,
        "total_tokens": 1238,
        "prompt_tokens_details": {"cached_tokens": 1200},
    },
}
RETURN = (
    chunk(Token("return", 0.9, {"yield": 0.05})),
    chunk(Token(" a", 0.4, {" b": 0.5})),
    chunk(Token(" +", 0.97), Token(" b", 0.2, {" c": 0.1})),
    chunk(finish="stop"),
    USAGE,
    "[DONE]",
)


@dataclass
class Fake:
    """What the server answers, and what it was asked.

    A completion is `answer`'s events. With `hold_after` it stops after so many of them until
    `resume` is set, or the client leaves, which sets `left`. `failure` (status, body) comes instead
    of a completion.
    """

    answer: tuple[dict[str, Any] | str, ...] = RETURN
    hold_after: int | None = None
    failure: tuple[int, str] | None = None
    key: str | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)
    failed: bool = False

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(page.router)
        app.router.routes += [
            Route("/v1/completions", Completions(self), methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/props", self.props),
        ]
        return app

    def refusal(self, http: Request) -> JSONResponse | None:
        if self.key is None or http.headers.get("authorization") == f"Bearer {self.key}":
            return None
        self.failed = True
        return JSONResponse({"error": {"message": "no key", "code": 401}}, 401)

    async def models(self, http: Request) -> JSONResponse:
        model = {"id": "quill-small", "object": "model", "owned_by": "starquill"}
        return self.refusal(http) or JSONResponse({"object": "list", "data": [model]})

    async def props(self, http: Request) -> JSONResponse:
        facts = {"default_generation_settings": {"n_ctx": 16384}, "total_slots": 8}
        return self.refusal(http) or JSONResponse(facts)


@dataclass(frozen=True)
class Completions:
    """The completions route, told to the byte: it can stop in the middle and watch the client."""

    fake: Fake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        fake = self.fake
        fake.asked.append(json.loads(await http.body()))
        if (refusal := fake.refusal(http)) is not None:
            return await refusal(scope, receive, send)
        status, failure = fake.failure or (200, "")
        fake.failed |= status != 200
        kind = b"application/json" if fake.failure else b"text/event-stream"
        start = {"type": "http.response.start", "status": status}
        await send({**start, "headers": [(b"content-type", kind)]})
        for sent, data in enumerate(fake.answer if not fake.failure else ()):
            if sent == fake.hold_after and await _left(receive, fake.resume):
                fake.left.set()
                return None
            await send(_piece(event(data), more=True))
        await send(_piece(failure.encode(), more=False))
        return None


async def _left(receive: Receive, resume: threading.Event) -> bool:
    """Whether the client leaves before `resume` is set."""
    leaving = asyncio.ensure_future(receive())  # the body is read: only a disconnect can follow
    resuming = asyncio.ensure_future(asyncio.to_thread(resume.wait))
    await asyncio.wait({leaving, resuming}, return_when=asyncio.FIRST_COMPLETED)
    left = leaving.done() and leaving.result()["type"] == "http.disconnect"
    leaving.cancel()
    resume.set()  # its thread ends too
    return left


def _piece(body: bytes, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
