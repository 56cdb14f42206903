"""An engine's own thread, asked by many others."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.loop import EngineLoop
from starquill.engine.running import Event
from starquill.types import Delta, EngineOptions, GenerateRequest, SamplingParams
from tests import tiny

SECONDS = 60  # for a thread that has gone wrong


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    return tiny.load_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=400)


def read(engine: Engine, request: GenerateRequest) -> Iterator[Delta]:
    """What a server does, without asyncio."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(request, events.put)
    while True:
        event = events.get(timeout=SECONDS)
        if isinstance(event, Exception):
            raise event
        yield event
        if event.finish_reason:
            return


def requests(count: int) -> list[GenerateRequest]:
    params = SamplingParams(max_tokens=30, temperature=0.9, logit_bias={0: -100.0})
    return [
        GenerateRequest(
            f"r{n}", tuple(tiny.random_ids(5 + 20 * n, seed=n)), replace(params, seed=n)
        )
        for n in range(count)
    ]


def test_b54_each_of_many_threads_gets_its_own(loaded: LoadedModel) -> None:
    """B54: requests of several threads got each other's text."""
    made = requests(8)
    alone = [[d.token_id for d in Engine(loaded).generate(request)] for request in made]
    found: list[list[int | None]] = [[] for _ in made]
    with EngineLoop(Engine(loaded, EngineOptions(slots=4))) as loop:

        def ask(n: int) -> None:
            for _ in range(3):
                found[n] = [d.token_id for d in read(loop.engine, made[n])]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(made))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert loop.is_alive
    assert found == alone


def test_it_wakes_for_a_request_and_ends_when_closed(loaded: LoadedModel) -> None:
    loop = EngineLoop(Engine(loaded))
    with loop:
        for request in requests(2):
            assert len(list(read(loop.engine, request))) == 30
    assert not loop.is_alive


def test_it_ends_with_a_request_half_way(loaded: LoadedModel) -> None:
    loop = EngineLoop(Engine(loaded))
    params = SamplingParams(max_tokens=390, logit_bias={0: -100.0})
    with loop:
        first = next(read(loop.engine, GenerateRequest("r", (5,), params)))
        assert first.finish_reason is None
    assert not loop.is_alive


def test_a_fault_of_its_own_ends_it_and_is_seen(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B54: the worker was dead and the server still said that all was well."""
    engine = Engine(loaded)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def fail() -> bool:
        raise RuntimeError("a fault")

    monkeypatch.setattr(engine, "step", fail)
    loop = EngineLoop(engine)
    with loop:
        loop._thread.join(SECONDS)
        assert not loop.is_alive
    assert "the engine's thread ended" in caplog.text


def test_reading_by_oneself_beside_the_thread(loaded: LoadedModel, tmp_path: Path) -> None:
    """`Generation` steps the engine itself; with a thread that does too, nothing is lost."""
    made = requests(3)
    alone = [[d.token_id for d in Engine(loaded).generate(request)] for request in made]
    with EngineLoop(Engine(loaded)) as loop:
        assert [[d.token_id for d in loop.engine.generate(r)] for r in made] == alone
