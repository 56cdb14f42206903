"""Several models behind one front: which call goes where, and what is told of all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from starquill.server.by_model import ByModel
from starquill.server.calling import Call
from starquill.server.front import Front, FrontMetrics, create_front
from starquill.server.options import ServerOptions

ADAPTERS = {"coder": ("sql", "rust"), "small": ()}


class Replicas:
    """Those of one model: they answer with its name, or with lists of what it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[Call] = []

    async def forward(self, call: Call) -> AsyncIterator[Message]:
        self.calls.append(call)
        items = [{"id": name} for name in (self.name, *ADAPTERS[self.name])]
        said = {
            "/v1/models": {"object": "list", "data": items},
            "/api/tags": {"models": items},
        }.get(call.scope["path"], {"by": self.name})
        headers = [(b"content-type", b"application/json")]
        yield {"type": "http.response.start", "status": 200, "headers": headers}
        yield {"type": "http.response.body", "body": json.dumps(said).encode(), "more_body": False}


class Server:
    def __init__(self, **counts: int) -> None:
        self.models = {name: Replicas(name) for name in ADAPTERS}
        by_model = ByModel({name: one.forward for name, one in self.models.items()}, ADAPTERS)
        metrics = FrontMetrics()
        running = dict.fromkeys(ADAPTERS, 1) | counts
        front = Front(by_model.forward, (), lambda: running, metrics)
        self.app: Any = create_front(front, ServerOptions(name="front"), metrics)

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                return await client.request(method, path, content=None if body is None else content)

        return asyncio.run(send())


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/v1/completions", {"model": "small"}, "small"),
        ("/v1/completions", {"model": "coder"}, "coder"),
        ("/v1/chat/completions", {"model": "rust"}, "coder"),
        ("/api/chat", {"model": "small:latest"}, "small"),
        ("/api/show", {"name": "small"}, "small"),
        ("/infill", {}, "coder"),  # who names none means the first
        ("/infill?model=small", {}, "small"),
        ("/v1/completions", b"{no JSON", "coder"),  # a replica says what is wrong with it
        ("/v1/completions", ["a list"], "coder"),
        ("/v1/completions", {"model": 3}, "coder"),
    ],
)
def test_a_call_goes_to_the_model_that_it_names(path: str, body: Any, model: str) -> None:
    assert Server().ask("POST", path, body).json() == {"by": model}


def test_a_model_that_is_not_there_is_told_with_those_that_are() -> None:
    answer = Server().ask("POST", "/v1/completions", {"model": "other"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404, "model")
    assert "'other'" in error["message"]
    assert "coder, small, sql, rust" in error["message"]
    assert Server().ask("GET", "/v1/models/other").status_code == 404
    assert Server().ask("GET", "/v1/models/sql").json() == {"by": "coder"}


@pytest.mark.parametrize(("path", "field"), [("/v1/models", "data"), ("/api/tags", "models")])
def test_lists_have_all_models_and_are_asked_for_once(path: str, field: str) -> None:
    server = Server()
    assert server.ask("HEAD", path).content == b""
    for _ in range(2):
        listed = server.ask("GET", path).json()[field]
        assert [item["id"] for item in listed] == ["coder", "sql", "rust", "small"]
    assert [len(one.calls) for one in server.models.values()] == [1, 1]


def test_health_is_that_of_every_model() -> None:
    sound = Server(small=2).ask("GET", "/health").json()
    assert sound == {"status": "ok", "replicas": 3, "models": {"coder": 1, "small": 2}}
    unsound = Server(coder=0).ask("GET", "/health")
    assert unsound.status_code == 503
    assert "coder" in unsound.json()["error"]["message"]
