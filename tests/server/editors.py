"""A real HTTP server over an engine, for tests of the routes that editors speak."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from starquill.engine.engine import Engine
from starquill.engine.loop import EngineLoop
from starquill.server.app import create_app
from starquill.server.options import ServerOptions

NAME = "starcoder2-tiny"
DEADLINE = 30


@contextmanager
def serving(engine: Engine, known_loop: EngineLoop | None = None) -> Iterator[httpx.Client]:
    """A client of a server that answers from `engine`, and that knows of `known_loop` if given."""
    loop = EngineLoop(engine)
    app = create_app(engine, ServerOptions(NAME), lambda: (known_loop or loop).is_alive)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    with loop:
        thread.start()
        began = time.monotonic()
        while not server.started:
            assert thread.is_alive()
            assert time.monotonic() - began < DEADLINE
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join(DEADLINE)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream of server-sent events, each one line."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]
