"""Kind d, the clients: those that leave, and many at once.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.testclient import TestClient

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.loop import EngineLoop
from starquill.server.app import create_app
from starquill.server.options import ServerOptions
from starquill.types import EngineOptions, SamplingParams
from tests import tiny
from tests.server.serving import listening, serving
from tests.server.standing_in import Gate
from tests.server.test_app import error_of

ROUTE = "/v1/completions"
END, PREFIX, MIDDLE, SUFFIX, PAD, REPOSITORY, FILE, ISSUE = tiny.SPECIAL_TOKENS
PROMPT = [9, 10, 11]
CONTEXT = 64


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny.load_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """One that could write for hours."""
    return tiny.load_tiny(tmp_path_factory.mktemp("long"), max_position_embeddings=2**20)


def byte_ids(loaded: LoadedModel, data: bytes) -> list[int]:
    """One token for each byte."""
    table = loaded.require_tokenizer().token_bytes
    return [table.index(bytes([byte])) for byte in data]


def until(holds: Callable[[], bool]) -> None:
    """Wait for another thread to get there."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class Watched:
    """A server whose model computes a step when the test lets it."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions) -> None:
        x = byte_ids(loaded, b"x")
        self.gate = Gate(tiny.scripted(loaded, x, 0).model)
        self.engine = Engine(dataclasses.replace(loaded, model=self.gate), options)
        self.abandoned = threading.Semaphore(0)
        abandon = self.engine.abandon

        def noticed(running: Any) -> None:
            abandon(running)
            self.abandoned.release()

        self.engine.abandon = noticed  # type: ignore[method-assign]
        self.app = create_app(self.engine, ServerOptions("tiny"))
        self.address = ""

    def post(self, **body: Any) -> http.client.HTTPConnection:
        """Ask without waiting for the answer."""
        connection = http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=30)
        body = {"prompt": PROMPT, "max_tokens": 100_000, "temperature": 0, **body}
        connection.request("POST", ROUTE, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def step(self, count: int = 1) -> None:
        """Let the model compute steps, once it wants to."""
        for _ in range(count):
            assert self.gate.entered.acquire(timeout=30)
            self.gate.free.release()

    def none_is_left(self) -> bool:
        stats = self.engine.stats()
        return stats.running == stats.waiting == 0


@contextmanager
def watched(loaded: LoadedModel, **options: Any) -> Iterator[Watched]:
    server = Watched(loaded, EngineOptions(lookup=0, **options))
    with EngineLoop(server.engine), listening(server.app) as server.address:
        try:
            yield server
        finally:
            server.gate.open()


@pytest.mark.parametrize("stream", [False, True])
def test_b53_leaving_while_it_writes(long: LoadedModel, stream: bool) -> None:
    """B53: a request whose client had left went on to its end."""
    with watched(long) as server:
        client = server.post(stream=stream)
        server.step(3)
        if stream:
            answer = client.getresponse()
            assert answer.readline().startswith(b"data: ")
        assert server.gate.entered.acquire(timeout=30)  # within the fourth step
        client.close()
        if stream:
            answer.close()
        assert server.abandoned.acquire(timeout=30)
        server.gate.free.release()
        until(server.none_is_left)
        assert server.gate.steps == 4
        server.gate.open()
        assert httpx.get(f"{server.address}/health").status_code == 200


def test_b53_leaving_during_the_prompt(long: LoadedModel) -> None:
    """B53: a long prompt was computed to its end for nobody."""
    with watched(long, prefill_chunk=4) as server:
        client = server.post(prompt=[9] * 40)
        server.step()
        assert server.gate.entered.acquire(timeout=30)
        client.close()
        assert server.abandoned.acquire(timeout=30)
        server.gate.free.release()
        until(server.none_is_left)
        assert server.gate.steps == 2


@pytest.mark.parametrize("stream", [False, True])
def test_b53_leaving_while_it_waits(long: LoadedModel, stream: bool) -> None:
    """B53: a request that waited was computed although its client had left."""
    with watched(long, slots=1, queue=2) as server:
        first = server.post(max_tokens=3)
        assert server.gate.entered.acquire(timeout=30)
        second = server.post(stream=stream)
        until(lambda: server.engine.stats().running + server.engine.stats().waiting == 2)
        second.close()
        assert server.abandoned.acquire(timeout=30)
        server.gate.free.release()
        server.step(2)
        answer = json.loads(first.getresponse().read())
        assert answer["choices"][0]["text"] == "xxx"
        until(server.none_is_left)
        assert server.gate.steps == 3
        first.close()


def test_b53_the_others_go_on(long: LoadedModel) -> None:
    """B53: ending one request hung the server, or changed what another was writing."""
    with serving(long) as url:
        body = {"prompt": [9, 30, 40], "max_tokens": 40, "temperature": 1, "seed": 4}
        alone = httpx.post(url + ROUTE, json=body, timeout=60).json()["choices"]

        def leave(seed: int) -> None:
            many = {**body, "seed": seed, "max_tokens": 100_000, "stream": True}
            with httpx.stream("POST", url + ROUTE, json=many, timeout=60) as answer:
                next(answer.iter_lines())

        with ThreadPoolExecutor(4) as pool:
            leaving = [pool.submit(leave, seed) for seed in range(3)]
            beside = pool.submit(httpx.post, url + ROUTE, json=body, timeout=60)
            for one in leaving:
                one.result()
            assert beside.result().json()["choices"] == alone


# --- many clients ---


def test_b54_each_answer_is_as_if_alone(loaded: LoadedModel) -> None:
    """B54: answers of concurrent requests were mixed up."""
    engine = Engine(loaded)
    never = {0: -100.0}
    bodies = [
        {
            "prompt": tiny.random_ids(2 + 5 * number, seed=number),
            "max_tokens": 8,
            "temperature": float(number % 2),
            "seed": number,
        }
        for number in range(8)
    ]
    expected = []
    for body in bodies:
        sampling = {key: value for key, value in body.items() if key != "prompt"}
        params = SamplingParams(**sampling, logit_bias=never)  # type: ignore[arg-type]
        deltas = engine.generate(body["prompt"], params)  # type: ignore[arg-type]
        expected.append("".join(delta.text for delta in deltas))
    with serving(loaded) as url, ThreadPoolExecutor(8) as pool:

        def ask(body: dict[str, Any]) -> str:
            asked = {**body, "logit_bias": {"0": -100}}
            text: str = httpx.post(url + ROUTE, json=asked).json()["choices"][0]["text"]
            return text

        assert list(pool.map(ask, bodies * 2)) == expected * 2


class Failing:
    """A model that raises when it sees a certain token."""

    def __init__(self, model: Any, token: int) -> None:
        self.model, self.token = model, token

    def hidden(self, batch: Any) -> Any:
        if (batch.ids == self.token).any():
            raise RuntimeError("a secret")
        return self.model.hidden(batch)

    def logits(self, hidden: Any) -> Any:
        return self.model.logits(hidden)


def test_b54_a_failing_request_ends_alone(loaded: LoadedModel) -> None:
    """B54: an exception inside the model killed the worker; the server still said it was well."""
    bad = 77
    script = tiny.scripted(loaded, byte_ids(loaded, b"x"), 0)
    failing = dataclasses.replace(loaded, model=Failing(script.model, bad))
    with serving(failing) as url, ThreadPoolExecutor(8) as pool:

        def ask(token: int) -> httpx.Response:
            body = {"prompt": [9, token], "max_tokens": 20, "temperature": 0}
            return httpx.post(url + ROUTE, json=body)

        answers = list(pool.map(ask, [8, bad, 9, 10, bad, 11, 12, bad]))
        for number, answer in enumerate(answers):
            if number in (1, 4, 7):
                assert "secret" not in error_of(answer, 500)["message"]
            else:
                assert answer.json()["choices"][0]["text"] == "x" * 20
        assert httpx.get(f"{url}/health").status_code == 200


def test_b54_a_worker_that_died_is_told(loaded: LoadedModel) -> None:
    """B54: the thread had died, and the server still answered that all was well."""
    engine = Engine(loaded)
    loop = EngineLoop(engine)
    client = TestClient(create_app(engine, ServerOptions("tiny"), lambda: loop.is_alive))
    with loop:
        assert client.get("/health").status_code == 200
    error_of(client.get("/health"), 503)
