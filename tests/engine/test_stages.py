"""A model whose layers are in several processes: here in several `LayerStage`s of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from starquill.adapters.adapter import AdapterPart
from starquill.checkpoint.build import expected_tensors
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel, Stage
from starquill.engine.stages import LayerStage, joined
from starquill.errors import (
    AdapterError,
    BadRequestError,
    CapacityError,
    StageLostError,
    StarquillError,
    UnsupportedError,
)
from starquill.kernels.attention import BLOCK
from starquill.loading import load
from starquill.nn.stages import StageStep, as_array, as_tensor
from starquill.placement.stages import StageOf, read_stages
from starquill.quantizing import QuantOptions
from starquill.types import EngineOptions, GenerateRequest, SamplingParams
from tests import moe, tiny
from tests.adapters import making, making_xlora

LAYERS = 4
PARAMS = SamplingParams(max_tokens=30, logprobs=0, logit_bias={0: -100.0})
PROMPTS = [tiny.random_ids(n, seed=n) for n in (3, 70, 9, 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny.config(num_hidden_layers=LAYERS, max_position_embeddings=512, sliding_window=48)
    return tiny.write_checkpoint(tmp_path_factory.mktemp("stages") / "model", raw)


def parts(model: str | Path, stages: str, **options: Any) -> list[LoadedModel]:
    split = read_stages(stages)
    return [load(model, stage=StageOf(split, n), **options) for n in range(split.count)]


def staged(model: str | Path, stages: str, **options: Any) -> LoadedModel:
    first, *rest = parts(model, stages, **options)
    return joined(first, [LayerStage(one) for one in rest])


def written(loaded: LoadedModel, **options: Any) -> list[list[Any]]:
    """What requests together get: pieces of prompts, lookup, reused prefixes, blocks used again."""
    engine = Engine(loaded, EngineOptions(**{"slots": 3, "prefill_chunk": 64, **options}))
    runs = [engine.generate(GenerateRequest("r", tuple(ids), PARAMS)) for ids in PROMPTS]
    # The last one again, but for its end: it begins with a copy of a part of a block.
    runs.append(engine.generate(GenerateRequest("r", (*PROMPTS[3][:150], 5, 6, 7), PARAMS)))
    found = [
        [(delta.token_id, delta.logprobs and delta.logprobs.chosen) for delta in run]
        for run in runs
    ]
    assert engine.stats().cached_tokens > 0
    return found


@pytest.mark.parametrize("stages", ["2", "4", "0-2,3", "0,1-2,3"])
@pytest.mark.parametrize("quant", [None, "4"])
def test_stages_write_what_one_process_does(folder: Path, stages: str, quant: str | None) -> None:
    """To the last bit; with just enough blocks for one sequence, they change hands."""
    block = tiny.cache_block_bytes(load(folder))
    few = {"cache_bytes": 12 * block}
    expected = written(load(folder, quant=quant), **few)
    assert written(staged(folder, stages, quant=quant), **few) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_of_two_bytes_go_as_they_are(folder: Path, dtype: Any) -> None:
    ids = tiny.random_ids(20)
    expected = making.logits(load(folder, dtype=dtype), ids=ids)
    assert torch.equal(making.logits(staged(folder, "2", dtype=dtype), ids=ids), expected)
    x = torch.randn(2, 3, 4).to(getattr(torch, dtype))
    assert torch.equal(as_tensor(as_array(x), x.dtype), x)


@pytest.mark.parametrize("family", sorted(moe.RAW))
def test_mixtures_too(tmp_path: Path, family: str) -> None:
    raw = moe.config(family)
    moe.write(tmp_path, raw, moe.reference(raw))
    ids = tiny.random_ids(20)
    expected = making.logits(load(tmp_path), ids=ids)
    assert torch.equal(making.logits(staged(tmp_path, "2"), ids=ids), expected)


def test_each_process_reads_its_own_tensors_alone(folder: Path) -> None:
    """The first also the ends; together they read each tensor once."""
    told: list[int] = []
    split = read_stages("0,1-2,3")
    held = []
    for number in range(3):
        last = [0]
        one = load(
            folder, stage=StageOf(split, number), on_progress=lambda p, to=last: to.append(p.done)
        )
        told.append(last[-1])
        held.append({name for name in names_of(one) if not is_meta(one, name)})
    whole = names_of(load(folder)) - {"lm_head.weight"}
    assert held[1] == {name for name in whole if ".layers.1." in name or ".layers.2." in name}
    assert held[2] == {name for name in whole if ".layers.3." in name}
    assert held[0] - {"lm_head.weight"} == whole - held[1] - held[2]
    assert told[1] == 2 * told[2]
    assert sum(told) == sum(t.nbytes for t in tiny.weights(tiny_raw(folder)).values())


def tiny_raw(folder: Path) -> dict[str, Any]:
    from starquill.checkpoint.files import read_json

    return read_json(folder / "config.json")


def names_of(loaded: LoadedModel) -> set[str]:
    return set(expected_tensors(loaded.model))


def is_meta(loaded: LoadedModel, name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    value = getattr(loaded.model.get_submodule(path), attribute)
    return bool(getattr(value, "data", value).is_meta)


def test_caches_are_where_their_layers_are(folder: Path) -> None:
    first, second = parts(folder, "0-2,3")
    stage = LayerStage(second)
    cache = Engine(joined(first, [stage]))._stepper._runner.cache
    there = stage._cache
    assert there is not None
    assert [cache.layer(n)[0].is_meta for n in range(LAYERS)] == [False] * 3 + [True]
    assert [there.layer(n)[0].is_meta for n in range(LAYERS)] == [True] * 3 + [False]
    assert cache.blocks == there.blocks


class Recording:
    """A stage that notes what it is asked, and answers as `inner` does."""

    def __init__(self, inner: Stage) -> None:
        self.inner = inner
        self.layers = inner.layers
        self.is_alive = True
        self.steps: list[StageStep] = []
        self.opened: list[int] = []
        self.room: int | None = None

    def most_blocks(self) -> int | None:
        return self.room

    def open(self, blocks: int) -> int:
        self.opened.append(blocks)
        return self.inner.open(blocks)

    def forward(self, step: StageStep) -> np.ndarray:
        if not self.is_alive:
            raise StageLostError("a stage was lost")
        self.steps.append(step)
        return self.inner.forward(step)

    def fill(self, slot: int, given: Mapping[str, AdapterPart]) -> None:
        self.inner.fill(slot, given)

    def empty(self, slot: int) -> None:
        self.inner.empty(slot)


def recorded(folder: Path) -> tuple[LoadedModel, Recording]:
    first, second = parts(folder, "2")
    stage = Recording(LayerStage(second))
    return joined(first, [stage]), stage


def test_what_a_stage_is_sent(folder: Path) -> None:
    loaded, stage = recorded(folder)
    block = tiny.cache_block_bytes(loaded)
    options = EngineOptions(slots=1, cache_bytes=9 * block, prefill_chunk=64, lookup=0)
    engine = Engine(loaded, options)
    ids = tiny.random_ids(100)
    params = replace(PARAMS, max_tokens=3)
    list(engine.generate(ids, params))
    pieces, written_ones = stage.steps[:2], stage.steps[2:]
    assert [step.x.shape for step in pieces] == [(1, 64, 64), (1, 36, 64)]
    assert [step.positions[0, 0] for step in pieces] == [0, 64]
    assert [step.positions.tolist() for step in written_ones] == [[[100]], [[101]]]
    assert {step.spans.tolist()[0] for step in stage.steps} == {103}
    assert {step.scales is None for step in stage.steps} == {True}
    assert not any(step.copies for step in stage.steps)  # all its blocks are fresh
    stage.steps.clear()
    list(engine.generate([*ids[:80], 5, 6, 7], params))
    kept = stage.steps[0].tables[0]
    # From the second block 16 tokens are as they were: it is copied so far.
    assert [(c[1], c[2]) for c in stage.steps[0].copies] == [(kept[1], 80 - BLOCK)]
    assert stage.steps[0].positions.tolist() == [[80, 81, 82]]


def test_a_stage_with_little_memory_limits_the_cache(folder: Path) -> None:
    loaded, stage = recorded(folder)
    Engine(loaded, EngineOptions(slots=4))
    stage.room = stage.opened[0] - 5
    Engine(loaded, EngineOptions(slots=4))
    assert stage.opened[1] == stage.opened[0] - 5


def test_a_lost_stage_is_told_to_all_who_run(folder: Path) -> None:
    loaded, stage = recorded(folder)
    engine = Engine(loaded, EngineOptions(slots=2))
    runs = [engine.generate(tiny.random_ids(9, seed=n), PARAMS) for n in range(3)]
    for run in runs[:2]:
        next(run)
    stage.is_alive = False
    for run in runs:
        with pytest.raises(StageLostError):
            list(run)
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_stage_serves_one_engine(folder: Path) -> None:
    loaded = staged(folder, "2")
    before = Engine(loaded)
    Engine(loaded)
    with pytest.raises(StarquillError, match="serve another engine"):
        before.complete("ab", PARAMS)


def test_tables_are_held_against_the_cache(folder: Path) -> None:
    """Native code would believe them."""
    loaded, stage = recorded(folder)
    engine = Engine(loaded, EngineOptions(slots=1))
    list(engine.generate([1, 2, 3], PARAMS))
    step = stage.steps[-1]
    for wrong in (-1, stage.opened[0] + 1):
        with pytest.raises(IndexError):
            stage.forward(replace(step, tables=np.full_like(step.tables, wrong)))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """PEFT's own, with its logits."""
    top = tmp_path_factory.mktemp("adapters")
    made = {"a": {"r": 4}, "b": {"r": 2, "use_dora": True}}
    return {
        name: making.peft_folder(top / name, seed, **options)
        for seed, (name, options) in enumerate(made.items())
    }


def test_adapters_act_in_every_stage(
    tmp_path: Path, adapters: Mapping[str, tuple[Path, torch.Tensor]]
) -> None:
    """Loaded, replaced and unloaded while the model runs; as PEFT, and as one process to a bit."""
    whole = making.base(tmp_path)
    loaded = staged(tmp_path / "base", "2")
    for name, (path, expected) in adapters.items():
        for one in (whole, loaded):
            one.adapters.load(name, path)
        found = making.logits(loaded, loaded.adapters, {name: 1.0})
        assert torch.allclose(found, expected, atol=1e-3)
        assert torch.equal(found, making.logits(whole, whole.adapters, {name: 1.0}))
    mixed = {"a": 0.7, "b": 0.3}
    assert torch.equal(
        making.logits(loaded, loaded.adapters, mixed), making.logits(whole, whole.adapters, mixed)
    )
    for one in (whole, loaded):
        one.adapters.unload("a")
        one.adapters.load("a", adapters["b"][0])
    again = making.logits(loaded, loaded.adapters, {"a": 1.0})
    assert torch.equal(again, making.logits(whole, whole.adapters, {"b": 1.0}))
    for name in ("a", "b"):
        loaded.adapters.unload(name)
    for module in loaded.model.modules():
        assert not getattr(getattr(module, "lora", None), "parts", {})
    stage = loaded.stages[0]
    assert isinstance(stage, LayerStage)
    held = [getattr(m, "lora", None) for m in stage._loaded.model.modules()]
    assert any(bank is not None for bank in held)
    assert not any(bank.parts for bank in held if bank is not None)


def test_an_adapter_that_a_stage_refuses_is_nowhere(
    tmp_path: Path, adapters: Mapping[str, tuple[Path, torch.Tensor]]
) -> None:
    making.base(tmp_path)
    first, second = parts(tmp_path / "base", "2")
    stage = Recording(LayerStage(second))
    loaded = joined(first, [stage])

    def refuse(slot: int, given: Mapping[str, AdapterPart]) -> None:
        stage.inner.fill(slot, given)
        raise AdapterError("it does not fit")

    stage.fill = refuse  # type: ignore[method-assign]
    with pytest.raises(AdapterError, match="does not fit"):
        loaded.adapters.load("a", adapters["a"][0])
    assert loaded.adapters.list() == ()
    assert not any(
        bank.parts for m in second.model.modules() if (bank := getattr(m, "lora", None)) is not None
    )


def test_xlora_weighs_adapters_in_every_stage(tmp_path: Path) -> None:
    making.base(tmp_path)
    folders = making_xlora.adapters(tmp_path)
    made = making_xlora.write(tmp_path / "xlora", making_xlora.reference(folders), folders, "xlora")
    whole = load(tmp_path / "base", xlora=made)
    loaded = staged(tmp_path / "base", "2", xlora=made)

    def text(one: LoadedModel) -> list[Any]:
        request = GenerateRequest("r", tuple(making.IDS), replace(PARAMS, max_tokens=12))
        return [(d.token_id, d.logprobs) for d in Engine(one).generate(request)]

    assert text(loaded) == text(whole)


def test_what_does_not_go_with_stages_is_refused(folder: Path, tmp_path: Path) -> None:
    topology = tmp_path / "topology.yml"
    topology.write_text("0-3:\n  device: cpu\n", encoding="utf-8")
    refused: Sequence[tuple[dict[str, Any], str]] = [
        ({"device_map": "cpu"}, "a device map"),
        ({"max_memory": "cpu=1GiB", "topology": topology}, "a limit of memory and devices"),
        ({"quant": QuantOptions("4", calibrate=folder)}, "calibration"),
        ({"quant": QuantOptions("4", distill=folder)}, "distillation"),
    ]
    for options, told in refused:
        with pytest.raises(UnsupportedError, match=told):
            parts(folder, "2", **options)
    with pytest.raises(BadRequestError, match="has 4 layers"):
        parts(folder, "5")
    with pytest.raises(UnsupportedError, match="in other processes"):
        staged(folder, "2").requantize("4")
    with pytest.raises(CapacityError):  # as without stages
        Engine(staged(folder, "2"), EngineOptions(cache_bytes=1))
