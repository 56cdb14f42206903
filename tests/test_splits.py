"""All that a model can do, over several devices: to the last bit as on one, or as near as may be.

Disk and memory compute the same bits. The other device of `tests/other_device.py` computes with
torch's kernels, as a GPU does, so that there only the last digits may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.anymoe.config import AnyMoeConfig
from starquill.anymoe.experts import open_base
from starquill.anymoe.training import write
from starquill.checkpoint import mapped
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.quantizing import QuantOptions, quantize_checkpoint
from starquill.types import EngineOptions, GenerateRequest, SamplingParams
from tests import moe, other_device, tiny
from tests.adapters import making, making_xlora
from tests.anymoe import making as making_anymoe

PARAMS = SamplingParams(max_tokens=8, logprobs=3, logit_bias={0: -100.0})
WAYS: tuple[Any, ...] = ("a", None, {"a": 0.7, "b": 0.3}, "b", "c")
Rows = list[list[Any]]


@pytest.fixture(autouse=True)
def map_tiny_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(mapped, "MAPPED_FROM", 2048)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters: plain with biases, DoRA, and one of the embedding too."""
    top = tmp_path_factory.mktemp("adapters")
    made: dict[str, dict[str, Any]] = {
        "a": {"r": 4, "bias": "all"},
        "b": {"r": 2, "use_dora": True},
        "c": {"r": 3, "target_modules": ["embed_tokens", "c_fc"]},
    }
    return {
        name: making.peft_folder(top / name, seed=seed, **options)[0]
        for seed, (name, options) in enumerate(made.items())
    }


def written(loaded: LoadedModel, ways: tuple[Any, ...] = (None, None, None)) -> Rows:
    """Tokens and log probabilities of requests that run together."""
    engine = Engine(loaded, EngineOptions(slots=len(ways), prefill_chunk=8))
    runs = [
        engine.generate(
            GenerateRequest(f"r{n}", tuple(tiny.random_ids(5 + 9 * n, seed=n)), PARAMS, adapter=way)
        )
        for n, way in enumerate(ways)
    ]
    found: Rows = [[] for _ in runs]
    for _ in range(PARAMS.max_tokens):
        for rows, run in zip(found, runs, strict=True):
            delta = next(run)
            assert delta.logprobs is not None
            rows.append((delta.token_id, delta.logprobs.chosen))
    return found


def with_adapters(folder: Path, folders: dict[str, Path], **options: Any) -> LoadedModel:
    loaded = load(folder, **options)
    for name, adapter in folders.items():
        loaded.adapters.load(name, adapter)
    return loaded


def near(found: Rows, expected: Rows) -> None:
    """The same tokens; values but for what other kernels round."""
    for ours, theirs in zip(found, expected, strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [v for _, v in ours] == pytest.approx([v for _, v in theirs], abs=2e-3)


DISK = ["cpu=0,disk=1", "disk", "disk=0,cpu=1,embed=cpu,head=cpu"]
OTHER = ["cuda:0", "cuda:0=0,cpu=1", "cpu=0,cuda:0=1,embed=cpu", "cuda:0=0,cuda:1=1"]


@pytest.fixture(params=["float32", "quantized"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tiny.write_checkpoint(tmp_path / "base")
    if request.param == "float32":
        return folder
    quantize_checkpoint(folder, tmp_path / "base-8", QuantOptions("8"))
    return tmp_path / "base-8"


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with other_device.devices(monkeypatch, "cuda:0", "cuda:1"):
        yield


@pytest.mark.parametrize("device_map", DISK)
def test_adapters_by_request_from_disk(
    base: Path, folders: dict[str, Path], device_map: str
) -> None:
    expected = written(with_adapters(base, folders), WAYS)
    assert written(with_adapters(base, folders, device_map=device_map), WAYS) == expected
    assert len({str(rows) for rows in expected}) == len(WAYS)


@pytest.fixture
def on_one(base: Path, folders: dict[str, Path]) -> Rows:
    """Before there is another device: what memory alone gives."""
    return written(with_adapters(base, folders, exact=True), WAYS)


@pytest.mark.parametrize("device_map", OTHER)
def test_adapters_by_request_on_another_device(
    base: Path, folders: dict[str, Path], device_map: str, on_one: Rows, other: None
) -> None:
    loaded = with_adapters(base, folders, device_map=device_map, exact=True)
    together = written(loaded, WAYS)
    near(together, on_one)


Made = tuple[Path, dict[str, Any]]


def a_moqe(top: Path, family: str) -> Made:
    raw = moe.config(family)
    folder = moe.write(top / "moe", raw, moe.reference(raw))
    quantize_checkpoint(folder, top / "moqe", QuantOptions("4", organization="moqe"))
    return top / "moqe", {}


def an_anymoe(top: Path, lora_experts: str) -> Made:
    base = making_anymoe.checkpoint(top / "base", 0)
    experts = {name: making_anymoe.lora(top / name, seed) for seed, name in enumerate("xy", 3)}
    if lora_experts == "merge":
        experts["x"] = making_anymoe.checkpoint(top / "full", 1)
    gates = making_anymoe.forced((0, 2), 1, 3)
    config = AnyMoeConfig(lora_experts=lora_experts)  # type: ignore[arg-type]
    return write(open_base(base), experts, gates, top / "mixture", config), {}


def an_xlora(top: Path, form: str) -> Made:
    folders = making_xlora.adapters(top / "adapters")
    model = making_xlora.reference(folders, layerwise_scalings=True, xlora_depth=2)
    acting = making_xlora.write(top / "acting", model, folders, form)
    return tiny.write_checkpoint(top / "base"), {"xlora": acting}


MODELS: dict[str, Callable[[Path], Made]] = {
    "moqe": lambda top: a_moqe(top, "starcoder2_moe"),
    "moqe gated": lambda top: a_moqe(top, "qwen3_moe"),
    "anymoe": lambda top: an_anymoe(top, "merge"),
    "anymoe of deltas": lambda top: an_anymoe(top, "delta"),
    "xlora": lambda top: an_xlora(top, "xlora"),
}


@pytest.fixture(params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any], int, Rows]:
    """A folder, options to load it with, its layers, and what it writes from memory."""
    folder, options = MODELS[request.param](tmp_path)
    one = load(folder, exact=True, **options)
    return folder, options, one.config.num_hidden_layers - 1, written(one)


@pytest.mark.parametrize("device_map", ["disk", "cpu=0,disk=1-{last}"])
def test_mixtures_and_xlora_from_disk(made: Any, device_map: str) -> None:
    folder, options, last, expected = made
    where = device_map.format(last=last)
    assert written(load(folder, exact=True, device_map=where, **options)) == expected


@pytest.mark.parametrize("device_map", ["cuda:0", "cpu=0,cuda:0=1-{last}", "cuda:0=0,cpu=1-{last}"])
def test_mixtures_and_xlora_on_another_device(made: Any, device_map: str, other: None) -> None:
    folder, options, last, expected = made
    near(
        written(load(folder, exact=True, device_map=device_map.format(last=last), **options)),
        expected,
    )


def test_a_request_is_the_same_in_any_company_there(base: Path, other: None) -> None:
    loaded = load(base, device_map="cuda:0=0,cpu=1")
    alone = [row for n in range(3) for row in written_alone(loaded, n)]
    together = [row for rows in written(loaded) for row in rows]
    assert together == alone


def written_alone(loaded: LoadedModel, n: int) -> list[Any]:
    engine = Engine(loaded, EngineOptions(slots=1, prefill_chunk=8))
    prompt = tuple(tiny.random_ids(5 + 9 * n, seed=n))
    deltas = list(engine.generate(GenerateRequest("r", prompt, PARAMS)))
    return [(d.token_id, d.logprobs and d.logprobs.chosen) for d in deltas]


def test_the_other_device_is_strict(other: None) -> None:
    """What fails on a GPU fails on what stands for one."""
    there = torch.ones(3, 4).to("cuda:0")
    wrong: list[Callable[[Tensor], Any]] = [
        lambda t: t + torch.ones(3, 4),
        lambda t: t @ torch.ones(4, 4).to("cuda:1"),
        lambda t: t.data_ptr(),
        lambda t: t.numpy(),
        lambda t: torch.ones(3)[t.long()],
    ]
    for each in wrong:
        with pytest.raises((RuntimeError, TypeError)):
            each(there)
    assert there.device == torch.device("cuda:0")
    assert not there.is_cpu
    assert (there * 2).cpu().tolist() == [[2.0] * 4] * 3
