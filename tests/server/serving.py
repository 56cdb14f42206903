"""A real server for tests: uvicorn on a free port of this machine, in a thread."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from starquill.engine.engine import DEFAULTS, Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.loop import EngineLoop
from starquill.server.app import create_app
from starquill.server.options import ServerOptions
from starquill.types import EngineOptions

NAME = "tiny"


class Running(uvicorn.Server):
    """Says when it can be asked, and leaves the process's signals alone."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False))
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """`app` over HTTP; yields its address, as `http://127.0.0.1:12345`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Running(app)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        assert server.ready.wait(30), "the server did not start"
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server did not end"


@contextmanager
def serving_engine(engine: Engine, **options: Any) -> Iterator[str]:
    """A server for `engine`, with fields of `ServerOptions`; yields its address."""
    with EngineLoop(engine) as loop:
        named = ServerOptions(**{"name": NAME, **options})
        with listening(create_app(engine, named, lambda: loop.is_alive)) as address:
            yield address


@contextmanager
def serving(
    loaded: LoadedModel, engine_options: EngineOptions = DEFAULTS, **options: Any
) -> Iterator[str]:
    """The same for an engine made here."""
    with serving_engine(Engine(loaded, engine_options), **options) as address:
        yield address


@contextmanager
def asking(
    loaded: LoadedModel, engine_options: EngineOptions = DEFAULTS, **options: Any
) -> Iterator[TestClient]:
    """The same application without a socket: a client that calls it."""
    engine = Engine(loaded, engine_options)
    with EngineLoop(engine) as loop:
        named = ServerOptions(**{"name": NAME, **options})
        yield TestClient(create_app(engine, named, lambda: loop.is_alive))


def streamed(lines: Iterable[str]) -> list[Any]:
    """The data of server-sent events, the last of which must be `[DONE]`."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]
