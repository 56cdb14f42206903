"""The application without a socket, and a replica whose engine ends."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest
from starlette.types import Message, Receive, Scope, Send

from starquill.engine.engine import Engine
from starquill.engine.loop import EngineLoop
from starquill.loading import load
from starquill.server import calling
from starquill.server.app import create_app
from starquill.server.calling import Call, EngineEndedError, ask, messages
from starquill.server.on_ray import Replica
from starquill.server.options import ServerOptions
from tests import tiny

PATH = "/v1/completions"
BODY = {"prompt": "ab", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    raw = tiny.config(max_position_embeddings=2**20)
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("calling") / "model", raw)
    return Engine(load(folder))


def test_a_call_is_answered(engine: Engine) -> None:
    app = create_app(engine, ServerOptions(name="mine"))
    with EngineLoop(engine):
        status, said = asyncio.run(ask(app, Call.post(PATH, BODY)))
        refused, error = asyncio.run(ask(app, Call.post(PATH, {**BODY, "top_p": 2})))
        missing, _ = asyncio.run(ask(app, Call.post("/nowhere", {})))
    assert (status, said["model"], said["usage"]["completion_tokens"]) == (200, "mine", 4)
    assert (refused, error["error"]["param"], missing) == (400, "top_p", 404)


def test_who_stops_reading_has_left() -> None:
    found: list[Message] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        found.append(await receive())

    async def run() -> None:
        reading = messages(app, Call.post(PATH, {}))
        assert (await anext(reading))["body"] == b"a"
        await reading.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert found in ([], [{"type": "http.disconnect"}])


def test_a_fault_of_the_application_is_told() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise LookupError("a fault")

    with pytest.raises(LookupError):
        asyncio.run(ask(app, Call.post(PATH, {})))


def test_a_replica_whose_engine_ends_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next question about its health, and to those who wait for an answer."""
    monkeypatch.setattr(calling, "LOOK_AGAIN_SECONDS", 0.01)
    options = ServerOptions(name="mine", api_key="asked at the front")

    def end() -> NoReturn:
        raise EngineEndedError("instead of this process")

    replica = Replica(lambda _: (engine, options), end=end)
    long = {**BODY, "max_tokens": 2**19, "logit_bias": {"0": -100}, "stream": True}

    async def run() -> None:
        answer = replica.answer(Call.post(PATH, long))
        assert (await anext(answer))["status"] == 200
        replica.check_health()
        await asyncio.to_thread(replica._loop.close)
        with pytest.raises(EngineEndedError):
            async for _ in answer:
                pass

    asyncio.run(run())
    with pytest.raises(EngineEndedError):
        replica.check_health()
