"""A step's way over devices: what hops, how often, and that nothing else changes."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import CapacityError
from starquill.loading import load
from starquill.nn.cache import CacheShape, KvCache
from starquill.nn.route import Route
from starquill.types import EngineOptions, SamplingParams
from tests import moe, tiny

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
LAYERS = 4


class Hops:
    """Two logical devices, both really the CPU; notes what goes where."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, tensor: Tensor, device: str) -> Tensor:
        self.seen.append((device, tuple(tensor.shape)))
        return tensor.clone()


def routed(loaded: LoadedModel, layers: str, embed: str = "a", head: str = "a") -> Hops:
    hops = Hops()
    names = {"a": "cpu", "b": "other"}
    loaded.model.route = Route(
        tuple(names[name] for name in layers), names[embed], names[head], move=hops
    )
    return hops


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_checkpoint(tmp_path, tiny.config(num_hidden_layers=LAYERS))


@pytest.mark.parametrize("layers", ["aabb", "abab", "bbbb", "aaab"])
@pytest.mark.parametrize("outer", ["aa", "ab", "bb", "ba"])
def test_a_split_run_equals_the_one_device_run(folder: Path, layers: str, outer: str) -> None:
    ids = tiny.random_ids(20)
    expected = tiny.our_logits(load(folder), ids)
    loaded = load(folder)
    hops = routed(loaded, layers, *outer)
    assert torch.equal(tiny.our_logits(loaded, ids), expected)
    # Ids, each change of device on the way, and cos and sin once where the other device is.
    way = [outer[0], *layers, outer[1]]
    changes = sum(one != other for one, other in pairwise(way))
    tables = 2 * ("b" in layers)
    assert len(hops.seen) == (outer[0] == "b") + changes + tables


def test_what_a_step_shares_is_brought_once_for_each_device(folder: Path) -> None:
    loaded = load(folder)
    hops = routed(loaded, "abab")
    tiny.our_logits(loaded, tiny.random_ids(12), chunk=6)
    shapes = Counter(hops.seen)
    assert shapes["other", (1, 1, 6, 16)] == 2 * 2  # cos and sin, in each of two steps
    assert shapes["other", (1, 6, 64)] == 2 * 2
    assert shapes["cpu", (1, 6, 64)] == 2 * 2


def test_batches_and_adapters_go_with_it(folder: Path) -> None:
    prompts = [tiny.random_ids(n, seed=n) for n in (3, 17, 9)]
    params = SamplingParams(max_tokens=6, logit_bias={0: -100.0})

    def texts(loaded: LoadedModel) -> list[list[int | None]]:
        engine = Engine(loaded, EngineOptions(slots=3))
        runs = [engine.generate(prompt, params) for prompt in prompts]
        return [[delta.token_id for delta in run] for run in runs]

    expected = texts(load(folder))
    loaded = load(folder)
    hops = routed(loaded, "abba", "b", "b")
    assert texts(loaded) == expected
    assert {device for device, _ in hops.seen} == {"cpu", "other"}


@pytest.mark.parametrize("family", sorted(moe.RAW))
def test_mixtures_go_the_same_way(tmp_path: Path, family: str) -> None:
    raw = moe.config(family)
    moe.write(tmp_path, raw, moe.reference(raw))
    ids = tiny.random_ids(12)
    expected = tiny.our_logits(load(tmp_path), ids)
    loaded = load(tmp_path)
    hops = routed(loaded, "ab", "b", "a")
    assert torch.equal(tiny.our_logits(loaded, ids), expected)
    assert hops.seen


def test_caches_are_where_their_layers_are() -> None:
    """`meta` stands for a device that the native kernels do not serve."""
    cache = KvCache(CacheShape(3, 2, 16), torch.float32, 4, devices=["cpu", "meta", "cpu"])
    assert [cache.layer(n)[0].device.type for n in range(3)] == ["cpu", "meta", "cpu"]
    tables, positions = torch.tensor([[1, 2]]), torch.tensor([[0, 1, 2]])
    assert cache.plan(tables, positions, 0).paged.tables.device.type == "cpu"
    there = cache.plan(tables, positions, 1)
    assert there.paged.tables.device.type == there.paged.starts.device.type == "meta"
    assert not there.native


def gpu_logits(folder: Path, device_map: str, ids: list[int], quant: str | None = None) -> Tensor:
    """`exact`, since a GPU's products do not round activations as the CPU's else do."""
    loaded = load(folder, device_map=device_map, quant=quant, exact=True)
    engine = Engine(loaded)
    place = engine._stepper._runner.cache.place(len(ids))
    hidden = engine._stepper._runner.advance(place, ids)
    return engine._stepper._runner.all_logits(hidden)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("quant", [None, "4"])
def test_a_gpu_beside_the_cpu(folder: Path, quant: str | None) -> None:
    ids = tiny.random_ids(20)
    run = partial(gpu_logits, folder, ids=ids, quant=quant)
    expected = run(device_map="cpu")
    for device_map in ("cuda:0", "cuda:0=0-1,cpu=2-3", "cpu=0-1,cuda:0=2-3,embed=cpu"):
        assert torch.allclose(run(device_map=device_map), expected, atol=1e-3), device_map


@pytest.mark.gpu
@NEEDS_TWO
def test_two_gpus_equal_one(folder: Path) -> None:
    ids = tiny.random_ids(20)
    one, two = (gpu_logits(folder, m, ids) for m in ("cuda:0", "cuda:0=0-1,cuda:1=2-3"))
    assert torch.equal(one, two)


def test_an_engine_offers_what_was_planned_for(folder: Path) -> None:
    loaded = load(folder, max_seq_len=16, max_batch_size=2)
    assert loaded.placement is None  # all of it has room on the CPU
    engine = Engine(loaded)
    with pytest.raises(CapacityError, match="16"):
        engine.generate(tiny.random_ids(17), SamplingParams(max_tokens=1))
    runs = [engine._stepper._options.slots, engine._stepper._runner.cache.blocks]
    assert runs == [2, 2 * 2 + 1]
