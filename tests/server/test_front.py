"""The front before replicas: what becomes of a call whose replica is lost, at any place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from starquill.server.calling import Call
from starquill.server.front import MOST_TRIES, Front, FrontMetrics, create_front
from starquill.server.options import ServerOptions

JSON, EVENTS, LINES = "application/json", "text/event-stream", "application/x-ndjson"
DONE = b"data: [DONE]\n\n"


class LostError(Exception):
    """Stands for Ray's."""


class Replicas:
    """Each call is answered by the next of `tries`: pieces of a body, and where it is lost."""

    def __init__(self, media: str, *tries: list[bytes | Exception]) -> None:
        self.media = media
        self.tries = list(tries)
        self.calls: list[Call] = []
        self.closed = 0

    async def forward(self, call: Call) -> AsyncIterator[Message]:
        self.calls.append(call)
        pieces = self.tries.pop(0)
        headers = [(b"content-type", self.media.encode() + b"; charset=utf-8")]
        try:
            if pieces and pieces[0] != b"":  # an empty one first is lost before the status too
                yield {"type": "http.response.start", "status": 200, "headers": headers}
            for piece in pieces:
                if isinstance(piece, Exception):
                    raise piece
                yield {"type": "http.response.body", "body": piece, "more_body": True}
            yield {"type": "http.response.body", "body": b"", "more_body": False}
        finally:
            self.closed += 1


def ask(
    replicas: Replicas, path: str = "/v1/completions", count: int = 1, **settings: Any
) -> httpx.Response:
    metrics = FrontMetrics()
    front = Front(replicas.forward, (LostError,), lambda: {"one": count}, metrics)
    options = ServerOptions(name="front", **settings)
    transport = httpx.ASGITransport(create_front(front, options, metrics))  # type: ignore[arg-type]

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            method = "GET" if path in ("/health", "/metrics") else "POST"
            return await client.request(method, path, content=b"{}")

    return asyncio.run(post())


@pytest.mark.parametrize("before", [[b""], [], [b'{"a":'], [b'{"a":', b"1"], [b'{"a":', b"1}"]])
def test_an_answer_in_one_piece_is_asked_for_again(before: list[bytes | Exception]) -> None:
    replicas = Replicas(JSON, [*before, LostError()], [b'{"b":', b"2}"])
    answer = ask(replicas)
    assert (answer.status_code, answer.json()) == (200, {"b": 2})
    assert [call.body for call in replicas.calls] == [b"{}", b"{}"]
    assert replicas.closed == 2


def test_a_call_that_ends_every_replica_is_given_up() -> None:
    replicas = Replicas(JSON, *([LostError()] for _ in range(MOST_TRIES + 1)))
    answer = ask(replicas)
    assert answer.status_code == 500
    assert str(MOST_TRIES) in answer.json()["error"]["message"]
    assert len(replicas.calls) == MOST_TRIES


@pytest.mark.parametrize("media", [EVENTS, LINES])
def test_a_stream_without_text_yet_begins_again(media: str) -> None:
    replicas = Replicas(media, [LostError()], [b"data: 1\n\n", DONE])
    assert ask(replicas).content == b"data: 1\n\n" + DONE


def test_a_stream_of_events_ends_with_an_error() -> None:
    replicas = Replicas(EVENTS, [b"data: 1\n\n", LostError()], [DONE])
    shown, told, last = ask(replicas).content.partition(b"event: error\ndata: ")
    assert (shown, bool(told)) == (b"data: 1\n\n", True)
    assert "lost" in json.loads(last)["error"]["message"]
    assert len(replicas.calls) == 1


def test_a_stream_of_lines_ends_with_an_error() -> None:
    replicas = Replicas(LINES, [b'{"a": 1}\n', LostError()], [b"{}\n"])
    first, last = ask(replicas).content.splitlines()
    assert json.loads(first) == {"a": 1}
    assert "lost" in json.loads(last)["error"]["message"]


def test_other_errors_are_not_repeated() -> None:
    replicas = Replicas(JSON, [ValueError("a fault")], [b"{}"])
    assert ask(replicas).status_code == 500
    assert len(replicas.calls) == 1


def test_who_is_let_in_is_asked_at_the_front() -> None:
    assert ask(Replicas(JSON), api_key="secret").status_code == 401
    assert ask(Replicas(JSON), most_body_bytes=1).status_code == 413


def test_health_is_whether_a_replica_runs() -> None:
    assert ask(Replicas(JSON), "/health", 2).json() == {"status": "ok", "replicas": 2}
    assert ask(Replicas(JSON), "/health", 0).status_code == 503


def test_figures_are_the_fronts_own() -> None:
    assert "starquill_front_lost_calls" in ask(Replicas(JSON), "/metrics").text


def test_a_client_that_leaves_ends_its_call() -> None:
    async def run() -> None:
        ended, begun = asyncio.Event(), asyncio.Event()

        async def forward(_: Call) -> AsyncIterator[Message]:
            try:
                begun.set()
                await asyncio.Event().wait()
                yield {}
            finally:
                ended.set()

        metrics = FrontMetrics()
        front = Front(forward, (LostError,), lambda: {"one": 1}, metrics)
        app = create_front(front, ServerOptions(name="front"), metrics)
        receive = receiving([{"type": "http.request"}], begun)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await asyncio.wait_for(app(scope, receive, sending), 60)
        await asyncio.wait_for(ended.wait(), 60)

    asyncio.run(run())


def receiving(messages: list[Message], then: asyncio.Event) -> Callable[[], Any]:
    async def receive() -> Message:
        if messages:
            return messages.pop()
        await then.wait()
        return {"type": "http.disconnect"}

    return receive


async def sending(message: Message) -> None:
    raise AssertionError(f"nobody is there for {message}")
