"""Requests with adapters of their own in one engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError, BusyError
from starquill.types import EngineOptions, GenerateRequest, SamplingParams
from tests import tiny
from tests.adapters import making

PARAMS = SamplingParams(max_tokens=25, logprobs=0, logit_bias={0: -100.0})
PROMPT = tuple(tiny.random_ids(30))
Adapter = str | Mapping[str, float] | None
WAYS: tuple[Adapter, ...] = ("a", None, "b", {"a": 0.7, "b": 0.3}, {"a": 0.5}, {"a": 1.0}, {})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("adapters")
    made = {"a": {"r": 4}, "b": {"r": 2, "use_dora": True}, "other": {"r": 4}}
    return {
        name: making.peft_folder(top / name, seed=seed, **options)[0]
        for seed, (name, options) in enumerate(made.items())
    }


@pytest.fixture
def loaded(tmp_path: Path, folders: dict[str, Path]) -> LoadedModel:
    torch.set_num_threads(1)
    found = making.base(tmp_path)
    for name in ("a", "b"):
        found.adapters.load(name, folders[name])
    return found


def request(adapter: Adapter, prompt: tuple[int, ...] = PROMPT) -> GenerateRequest:
    return GenerateRequest("r", prompt, PARAMS, adapter=adapter)


def run(engine: Engine, adapter: Adapter) -> list[Any]:
    return [
        (d.token_id, d.logprobs and d.logprobs.chosen) for d in engine.generate(request(adapter))
    ]


def test_each_request_has_its_own_in_one_batch(loaded: LoadedModel, tmp_path: Path) -> None:
    """To the last bit as alone, and without one as in a model that never had any."""
    options = EngineOptions(prefix_cache=False)
    alone = [run(Engine(loaded, options), way) for way in WAYS]
    engine = Engine(loaded, options)
    running = [engine.generate(request(way)) for way in WAYS]
    together: list[list[Any]] = [[] for _ in running]
    for _ in range(PARAMS.max_tokens):
        for found, generation in zip(together, running, strict=True):
            delta = next(generation)
            found.append((delta.token_id, delta.logprobs and delta.logprobs.chosen))
    assert together == alone
    assert alone[1] == alone[6] == run(Engine(making.base(tmp_path / "never"), options), None)
    assert alone[0] == alone[5]
    assert len({str(found) for found in alone}) == 5


def test_b43_no_cache_crosses_adapters(loaded: LoadedModel, folders: dict[str, Path]) -> None:
    """B43: the same prompt with another adapter, another weight, or other bytes of one name."""
    engine = Engine(loaded)
    cold = Engine(loaded, EngineOptions(prefix_cache=False))
    for _ in range(2):
        for way in WAYS:
            found, expected = run(engine, way), run(cold, way)
            assert [token for token, _ in found] == [token for token, _ in expected]
            values = [value for _, value in found]
            assert values == pytest.approx([value for _, value in expected], abs=1e-5)
    assert engine.stats().cached_tokens > 0
    loaded.adapters.load("a", folders["other"])
    found, expected = run(engine, "a"), run(cold, "a")
    assert [token for token, _ in found] == [token for token, _ in expected]


def test_replacing_and_unloading_do_not_disturb_a_running_request(
    loaded: LoadedModel, folders: dict[str, Path]
) -> None:
    engine = Engine(loaded, EngineOptions(prefix_cache=False))
    expected = run(engine, "a")
    running = engine.generate(request("a"))
    waiting = engine.generate(request("a"))
    found = [next(running)]
    loaded.adapters.load("a", folders["other"])
    found += [next(running) for _ in range(5)]
    loaded.adapters.unload("a")
    found += list(running)
    assert [(d.token_id, d.logprobs and d.logprobs.chosen) for d in found] == expected
    assert [d.token_id for d in waiting] == [token for token, _ in expected]
    with pytest.raises(BadRequestError, match="no adapter 'a'"):
        engine.generate(request("a"))


@pytest.mark.parametrize("end", ["finish", "cancel", "leave", "nothing", "busy"])
def test_every_end_gives_the_lease_back(loaded: LoadedModel, end: str) -> None:
    engine = Engine(loaded, EngineOptions(slots=1, queue=1 if end != "busy" else 0))
    made = request("a")
    if end == "nothing":
        made = GenerateRequest("r", PROMPT, SamplingParams(max_tokens=0), adapter="a")
    generation = engine.generate(made)
    next(generation)
    if end == "finish":
        list(generation)
    elif end == "cancel":
        generation.cancel()
    elif end == "leave":
        del generation
        engine.step()
    elif end == "busy":
        with pytest.raises(BusyError):
            engine.generate(request("b"))
        generation.cancel()
    assert [info.leases for info in loaded.adapters.list()] == [0, 0]
