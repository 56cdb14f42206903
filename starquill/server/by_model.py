"""Several models behind one front: each call goes to the replicas of the model that it names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, unquote

from starlette.types import Message

from starquill.errors import listing
from starquill.server.calling import Call
from starquill.server.errors import ApiError
from starquill.server.models import DEFAULT_TAG

Forward = Callable[[Call], AsyncIterator[Message]]
# Where each model tells of itself, and the field that has the list.
LISTS = {"/v1/models": "data", "/api/tags": "models", "/api/ps": "models"}
ONE = "/v1/models/"
_NAMES = ("model", "name")  # Ollama has had both


class ByModel:
    """`forward` for all models together.

    `adapters` are those of each model, by its name; an adapter's alias means its model too. A call
    that names none is for the first model, or for the one of its query's `model`. Lists of models
    are asked for once: what is served does not change.
    """

    def __init__(
        self, forwards: Mapping[str, Forward], adapters: Mapping[str, Sequence[str]]
    ) -> None:
        self._forwards = dict(forwards)
        self._models = {name: name for name in forwards}
        for model, aliases in adapters.items():
            self._models |= dict.fromkeys(aliases, model)
        self._lists: dict[str, bytes] = {}

    async def forward(self, call: Call) -> AsyncIterator[Message]:
        path, method = call.scope["path"], call.scope["method"]
        if path in LISTS and method in ("GET", "HEAD"):
            for message in _json(await self._listed(path, call), method == "GET"):
                yield message
            return
        async for message in self._forwards[self._model(call)](call):
            yield message

    def _model(self, call: Call) -> str:
        named = _named(call)
        if named is None:
            return next(iter(self._forwards))
        model = self._models.get(named, self._models.get(named.removesuffix(DEFAULT_TAG)))
        if model is None:
            known = listing(list(self._models))
            raise ApiError(404, f"no model {named!r:.80} here (this server has {known})", "model")
        return model

    async def _listed(self, path: str, call: Call) -> bytes:
        if path not in self._lists:
            asked = Call({**call.scope, "method": "GET"})
            parts = [_whole(forward(asked)) for forward in self._forwards.values()]
            found = [json.loads(body) for body in await asyncio.gather(*parts)]
            field = LISTS[path]
            items = [item for one in found for item in one[field]]
            self._lists[path] = json.dumps({**found[0], field: items}).encode()
        return self._lists[path]


def _named(call: Call) -> str | None:
    """The model that a call names, if it does; replicas see to bodies that make no sense."""
    path: str = call.scope["path"]
    if path.startswith(ONE):
        return unquote(path.removeprefix(ONE))
    try:
        body: Any = json.loads(call.body) if call.body else None
    except ValueError:
        body = None
    names = [body.get(name) for name in _NAMES] if isinstance(body, dict) else []
    query = parse_qs(call.scope.get("query_string", b"").decode("latin-1"))
    names += query.get("model", [])
    return next((name for name in names if isinstance(name, str) and name), None)


async def _whole(messages: AsyncIterator[Message]) -> bytes:
    return b"".join([message.get("body", b"") async for message in messages])


def _json(body: bytes, shown: bool) -> list[Message]:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    return [
        {"type": "http.response.start", "status": 200, "headers": headers},
        {"type": "http.response.body", "body": body if shown else b"", "more_body": False},
    ]
