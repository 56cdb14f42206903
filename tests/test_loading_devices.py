"""Loading by a device map: what stays where it was, what is on disk, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.checkpoint import mapped
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError, CapacityError, CheckpointError, UnsupportedError
from starquill.loading import load
from starquill.nn.disk import Extent, ReadAhead
from starquill.nn.experts import GatedExperts, PlainExperts
from starquill.nn.route import ONE_DEVICE, Route
from starquill.placing import DeviceOptions, Request, Subject
from starquill.quant.weight import Computing
from starquill.quantizing import QuantOptions, quantize_checkpoint
from starquill.types import EngineOptions, SamplingParams
from tests import moe, tiny

LAYERS = 4
DISK = "cpu=0-1,disk=2-3"


@pytest.fixture(autouse=True)
def map_tiny_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "MAPPED_FROM", 2048)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny.config(num_hidden_layers=LAYERS, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("dense")
    return tiny.write_checkpoint(folder, raw, tiny.weights(raw, head=True))


@pytest.fixture(scope="module")
def quantized(dense: Path) -> Path:
    out = dense.parent / f"{dense.name}-4"
    quantize_checkpoint(dense, out, QuantOptions("4"))
    return out


def reader(loaded: LoadedModel) -> ReadAhead:
    route = loaded.model.route
    assert isinstance(route, Route)
    assert route.disk is not None
    return route.disk


def logits(loaded: LoadedModel, ids: Sequence[int]) -> Tensor:
    return tiny.our_logits(loaded, ids, chunk=7)


def written(loaded: LoadedModel) -> list[list[int | None]]:
    """By three requests at once."""
    engine = Engine(loaded, EngineOptions(slots=3))
    params = SamplingParams(max_tokens=8, logit_bias={0: -100.0})
    runs = [engine.generate(tiny.random_ids(n, seed=n), params) for n in (3, 11, 30)]
    return [[delta.token_id for delta in run] for run in runs]


@pytest.mark.parametrize("choice", [{}, {"device_map": "auto"}, {"device_map": "cpu"},
                                    {"max_memory": "cpu=2GB"}])  # fmt: skip
def test_where_one_device_has_room_nothing_is_between(dense: Path, choice: dict[str, Any]) -> None:
    loaded = load(dense, **choice)
    assert loaded.model.route is ONE_DEVICE
    assert loaded.placement is None
    ids = tiny.random_ids(30)
    assert torch.equal(logits(loaded, ids), logits(load(dense), ids))


@pytest.mark.parametrize(
    "device_map", [DISK, "disk", "disk=0-3,embed=cpu,head=cpu", "disk=1,default=cpu,head=disk"]
)
@pytest.mark.parametrize("budget", [None, "cpu=470MB"])
@pytest.mark.parametrize("form", ["quantized", "dense"])
def test_a_run_from_disk_equals_that_from_memory(
    form: str, device_map: str, budget: str | None, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(form)
    ids = tiny.random_ids(30)
    memory = load(folder)
    loaded = load(folder, device_map=device_map, max_memory=budget, max_batch_size=3)
    assert torch.equal(logits(loaded, ids), logits(memory, ids))
    assert written(loaded) == written(memory)
    assert reader(loaded).read_bytes > 0


def test_bfloat16_stays_as_it_is_stored(tmp_path: Path) -> None:
    raw = tiny.config(num_hidden_layers=LAYERS)
    state = {name: value.bfloat16() for name, value in tiny.weights(raw).items()}
    folder = tiny.write_checkpoint(tmp_path, raw, state)
    ids = tiny.random_ids(20)
    loaded = load(folder, device_map=DISK)
    assert torch.equal(logits(loaded, ids), logits(load(folder), ids))
    with pytest.raises(UnsupportedError, match=r"layer 2 cannot stay on disk: model\.layers\.2"):
        load(folder, device_map=DISK, dtype="float32")


def test_a_tied_head_on_disk_is_read_as_the_head(tmp_path: Path) -> None:
    raw = tiny.config(num_hidden_layers=LAYERS)
    folder = tiny.write_checkpoint(tmp_path, raw)
    loaded = load(folder, device_map="disk")
    assert list(reader(loaded).parts) == [0, 1, 2, 3, "head"]
    ids = tiny.random_ids(20)
    assert torch.equal(logits(loaded, ids), logits(load(folder), ids))


def test_auto_keeps_the_budget(quantized: Path) -> None:
    checkpoint = open_checkpoint(locate(quantized))
    subject = Subject(checkpoint, Computing(torch.float32, as_stored=True), None)
    whole = Request(subject, DeviceOptions("cpu", max_seq_len=32)).place().uses["cpu"].total
    budget = whole - 60_000
    loaded = load(quantized, max_memory=f"cpu={budget},disk=inf", max_seq_len=32)
    assert loaded.placement is not None
    assert "disk" in loaded.placement.devices.layers
    ids = tiny.random_ids(20)
    assert torch.equal(logits(loaded, ids), logits(load(quantized), ids))
    ahead, use = reader(loaded), loaded.placement.uses["cpu"]
    assert ahead.room <= budget - use.total + use.buffers


def test_loading_keeps_nothing_in_memory(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[int] = []
    drop = Extent.drop

    def noted(extent: Extent, *, cached: bool) -> None:
        dropped.append(extent.nbytes)
        drop(extent, cached=cached)

    monkeypatch.setattr(Extent, "drop", noted)
    loaded = load(quantized, device_map=DISK)
    assert sum(dropped) >= sum(e.nbytes for part in reader(loaded).parts.values() for e in part)
    assert reader(loaded).resident == {}


def test_the_files_are_only_read(quantized: Path) -> None:
    def state() -> dict[str, tuple[str, int]]:
        return {
            p.name: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns)
            for p in quantized.iterdir()
        }

    before = state()
    written(load(quantized, device_map="disk"))
    assert state() == before


def test_what_cannot_be_mapped_says_what_to_do(dense: Path, quantized: Path) -> None:
    for wrong in ({"quant": "4"}, {"dtype": "bfloat16"}):
        with pytest.raises(UnsupportedError) as caught:
            load(dense, device_map=DISK, **wrong)  # type: ignore[arg-type]
        assert "the head cannot stay on disk: lm_head.weight" in str(caught.value)
        assert "starquill quantize MODEL --out OUT --quant 4" in str(caught.value)
        assert str(caught.value).isprintable()
    with pytest.raises(UnsupportedError, match="layers on disk"):
        load(quantized, device_map=DISK).requantize("4")


def test_damage_on_disk_is_found_when_loading(dense: Path, tmp_path: Path) -> None:
    state = tiny.weights(tiny.config(num_hidden_layers=LAYERS))
    state["model.layers.3.mlp.c_fc.weight"][5, 5] = float("nan")
    folder = tiny.write_checkpoint(tmp_path, tiny.config(num_hidden_layers=LAYERS), state)
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.c_fc\.weight has values"):
        load(folder, device_map=DISK)


@pytest.mark.parametrize(
    ("options", "error", "facts"),
    [
        ({"device_map": "cpu=0-1"}, BadRequestError, ["layers 2 to 3 have no device"]),
        ({"device_map": "cpu=0-2,disk=2-3"}, BadRequestError, ["layers 2 are in both"]),
        ({"device_map": "cpu=0-4"}, BadRequestError, ["passes the last layer, 3"]),
        ({"device_map": "gpu"}, BadRequestError, ["'gpu' is no device map"]),
        ({"device_map": "cuda:7"}, BadRequestError, ["cuda:7 is not on this machine (it has cpu"]),
        ({"max_memory": "cuda:7=9GB"}, BadRequestError, ["cuda:7 is not on this machine"]),
        ({"max_memory": "cpu=lots"}, BadRequestError, ["'cpu=lots' has no size"]),
        ({"max_memory": {"cpu": -1}}, BadRequestError, ["--max-memory"]),
        ({"max_memory": "disk=inf"}, BadRequestError, ["give --max-memory a cpu=SIZE"]),
        ({"max_seq_len": 65}, BadRequestError, ["max_seq_len is 65 (expected 1 to 64)"]),
        ({"max_batch_size": 0}, BadRequestError, ["max_batch_size is 0"]),
        (
            {"max_memory": "cpu=1MB"},
            CapacityError,
            ["the embedding does not fit on cpu", "nothing smaller fits either", "disk=inf"],
        ),
    ],
)
def test_what_cannot_be_is_told_in_a_line(
    dense: Path, options: dict[str, Any], error: type[Exception], facts: list[str]
) -> None:
    with pytest.raises(error) as caught:
        load(dense, **options)
    message = str(caught.value)
    assert message.isprintable()
    for fact in facts:
        assert fact in message


def test_budgets_may_be_numbers(quantized: Path) -> None:
    loaded = load(quantized, max_memory={"cpu": 10**9, "disk": float("inf")})
    assert loaded.placement is None


def test_a_file_of_devices_needs_no_quant(quantized: Path, dense: Path, tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text('"2-3": {device: disk}\ndefault: {device: cpu}\n')
    assert list(reader(load(quantized, topology=file)).parts) == [2, 3, "head"]
    assert load(quantized, topology=file, device_map="cpu").placement is None
    file.write_text('"2-3": {quant: 8}\n')
    with pytest.raises(BadRequestError, match="need --quant"):
        load(dense, topology=file)
    assert load(dense, quant="4", topology=file).placement is None


@pytest.mark.parametrize("family", sorted(moe.RAW))
@pytest.mark.parametrize("quant", [True, False])
def test_experts_come_one_by_one(tmp_path: Path, family: str, quant: bool) -> None:
    raw = moe.config(family)
    folder = moe.write(tmp_path / "m", raw, moe.reference(raw))
    stored = tmp_path / "q"
    quantize_checkpoint(
        folder,
        stored,
        QuantOptions("8", overrides=() if quant else (".*=dense",)),
    )
    ids = tiny.random_ids(20)
    memory, loaded = load(stored), load(stored, device_map="disk")
    assert torch.equal(logits(loaded, ids), logits(memory, ids))
    assert written(loaded) == written(memory)
    found = [m for m in loaded.model.modules() if isinstance(m, GatedExperts | PlainExperts)]
    assert found
    for mixture in found:
        assert mixture.disk is not None
    cache = found[0].disk.cache  # type: ignore[union-attr]
    # With room for two experts they are fetched again and again, and nothing else changes.
    size = sum(extent.nbytes for extent in found[0].disk.experts[0])  # type: ignore[union-attr]
    before, cache.room = cache.fetched, 2 * size
    assert written(loaded) == written(memory)
    assert cache.fetched > before


def test_experts_stored_one_by_one_are_refused(tmp_path: Path) -> None:
    raw = moe.config("mixtral")
    folder = moe.write(tmp_path, raw, moe.reference(raw))
    with pytest.raises(UnsupportedError, match="starquill quantize"):
        load(folder, device_map="disk")
