"""Requests to a server and when each part of its answers came; only the standard library."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from itertools import pairwise
from typing import Any

from servers import HOST

Json = dict[str, Any]
TIMEOUT = 600.0


@dataclass(frozen=True)
class Streamed:
    """A streamed answer. Times are of one clock; `times` has those of all events with text.

    `first` is when the first event came, whatever it held.
    """

    sent: float
    first: float
    times: tuple[float, ...]
    ended: float
    tokens: int
    text: str

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.times)]


def post(port: int, path: str, body: Json) -> tuple[int, Json]:
    """Status and answer of a request that is not streamed."""
    connection = HTTPConnection(HOST, port, timeout=TIMEOUT)
    try:
        response = _send(connection, path, body)
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def stream(port: int, path: str, body: Json) -> Streamed:
    """A streamed request, read to its end; `body` is OpenAI's or llama.cpp's."""
    connection = HTTPConnection(HOST, port, timeout=TIMEOUT)
    try:
        sent = time.perf_counter()
        response = _send(connection, path, {**body, "stream": True})
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {response.read(500)!r}")
        return _collect(sent, events(response))
    finally:
        connection.close()


def events(response: HTTPResponse) -> Iterator[Json]:
    """The objects of a stream of server-sent events."""
    while line := response.readline():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _send(connection: HTTPConnection, path: str, body: Json) -> HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def _collect(sent: float, arriving: Iterable[Json]) -> Streamed:
    first = ended = sent
    times: list[float] = []
    texts: list[str] = []
    tokens, is_whole = 0, False
    for event in arriving:
        ended = time.perf_counter()
        first = ended if first == sent else first
        if "error" in event:
            raise RuntimeError(f"the stream ended with {event['error']}")
        if text := text_of(event):
            times.append(ended)
            texts.append(text)
        tokens = max(tokens, _tokens_of(event))
        is_whole = is_whole or _is_last(event)
    if not is_whole:
        raise RuntimeError("the stream ended without saying why (expected a reason at its end)")
    return Streamed(sent, first, tuple(times), ended, tokens, "".join(texts))


def text_of(event: Json) -> str:
    """What an event or an answer adds: OpenAI's completion form, or llama.cpp's."""
    if choices := event.get("choices"):
        return choices[0].get("text") or ""
    return event.get("content") or ""


def _is_last(event: Json) -> bool:
    if choices := event.get("choices"):
        return choices[0].get("finish_reason") is not None
    return event.get("stop") is True


def _tokens_of(event: Json) -> int:
    usage = event.get("usage") or {}
    return int(usage.get("completion_tokens") or event.get("tokens_predicted") or 0)


def at_once(port: int, path: str, clients: Sequence[Sequence[Json]]) -> list[Streamed]:
    """One thread per client; each sends its requests one after the other."""

    def run(bodies: Sequence[Json]) -> list[Streamed]:
        return [stream(port, path, body) for body in bodies]

    with ThreadPoolExecutor(len(clients)) as pool:
        return [answer for answers in pool.map(run, clients) for answer in answers]


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """The median, and what 95 of 100 stay below."""
    ranks = statistics.quantiles(seconds, n=20, method="inclusive")
    return {"p50": round(1000 * ranks[9], 1), "p95": round(1000 * ranks[18], 1)}
