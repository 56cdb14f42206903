"""Kind f: parts of a model on several devices, some on disk, and devices that run out.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.checkpoint import mapped
from starquill.checkpoint.source import SafetensorsSource
from starquill.engine.loaded import LoadedModel
from starquill.errors import CapacityError
from starquill.loading import load
from starquill.nn.experts import ExpertLinear
from starquill.nn.linear import Embedding, Linear
from starquill.quant.weight import moved, tensors_of
from starquill.quantizing import QuantOptions, quantize_checkpoint
from tests import tiny

LAYERS = 4
MAPS = ["cpu", "disk", "cpu=0-1,disk=2-3", "disk=0-1,cpu=2-3", "disk=0-3,embed=cpu,head=cpu"]


@pytest.fixture(autouse=True)
def map_tiny_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "MAPPED_FROM", 2048)


def folder(where: Path, head: bool) -> Path:
    raw = tiny.config(num_hidden_layers=LAYERS, tie_word_embeddings=not head)
    dense = tiny.write_checkpoint(where / "dense", raw, tiny.weights(raw, head))
    quantize_checkpoint(dense, where / "4", QuantOptions("4"))
    return where / "4"


def held(loaded: LoadedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the model keeps in whatever way: rope tables would be among them."""
    yield from loaded.model.named_parameters(remove_duplicate=False)
    yield from loaded.model.named_buffers(remove_duplicate=False)
    for path, module in loaded.model.named_modules():
        if isinstance(module, Linear | Embedding | ExpertLinear):
            yield from ((f"{path}.weight", tensor) for tensor in tensors_of(module.weight))
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}", value


@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
def test_b62_nothing_is_left_on_meta(tmp_path: Path, device_map: str, head: bool) -> None:
    """B62: layers that were offloaded stayed on `meta`, and so did the tied side."""
    loaded = load(folder(tmp_path, head), device_map=device_map)
    tensors = dict(held(loaded))
    assert tensors
    assert not [name for name, tensor in tensors.items() if tensor.is_meta]
    assert tiny.our_logits(loaded, tiny.random_ids(9)).isfinite().all()


@pytest.mark.parametrize("device_map", MAPS)
def test_b62_a_tied_pair_is_one_matrix_and_counted_once(tmp_path: Path, device_map: str) -> None:
    """B62: the head on one device read a weight on another, or its memory was counted twice."""
    model = folder(tmp_path, head=False)
    loaded = load(model, device_map=device_map)
    head, embedding = loaded.model.lm_head, loaded.model.model.embed_tokens
    assert head.weight is embedding.weight
    placement = loaded.placement
    if placement is None:
        return
    assert placement.embed == placement.head
    counted = sum(use.weights for use in placement.uses.values())
    distinct = {t.data_ptr(): t.nbytes for _, t in held(loaded)}
    assert counted == sum(distinct.values())


class Wants:
    """Stands for a second device: it is asked for by name and gives so many tensors, no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, value: Any, device: str) -> Any:
        assert device == "cuda:0"
        self.room -= 1
        if self.room < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return moved(value, "cpu")


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def free() -> dict[str, float]:
        return {"cpu": 8e9, "cuda:0": 8e8}

    for module in ("starquill.placing", "starquill.settling"):
        monkeypatch.setattr(f"{module}.free_memory", free)


@pytest.mark.parametrize("room", [0, 3, 20])
def test_a_device_that_runs_out_is_named_with_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_devices: None, room: int
) -> None:
    """Of B62's kind: the plan had room, another program took it, and a traceback was all."""
    model = tiny.write_checkpoint(tmp_path, tiny.config(num_hidden_layers=LAYERS))
    monkeypatch.setattr("starquill.settling.moved", Wants(room))
    with pytest.raises(CapacityError) as caught:
        load(model, device_map="cuda:0", max_seq_len=32)
    message = str(caught.value)
    assert message.isprintable()
    assert re.match(r"(layer \d|the embedding|the head) ran out of memory on cuda:0: ", message)
    assert "kB and 800.00 MB are free; what fits: --device-map" in message


def test_memory_that_runs_out_while_reading_is_told_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of B62's kind: here it is the CPU's memory, which torch tells in words alone."""
    model = folder(tmp_path, head=True)

    def read(_self: Any, name: str) -> Tensor:
        if "layers.1.self_attn.q_proj" in name:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return original(_self, name)

    original = SafetensorsSource.read
    monkeypatch.setattr(SafetensorsSource, "read", read)
    with pytest.raises(CapacityError, match=r"layer 1 ran out of memory on cpu: it asks for"):
        load(model, device_map="cpu=0-1,disk=2-3")


def test_a_run_from_disk_that_is_killed_leaves_the_files(tmp_path: Path) -> None:
    """Of B62's kind: offloading wrote folders that a kill left half-made. Ours are only read."""
    model = folder(tmp_path, head=True)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    code = (
        "import starquill, sys\n"
        "from starquill.checkpoint import mapped\n"
        "mapped.MAPPED_FROM = 2048\n"
        f"engine = starquill.Engine(starquill.load({str(model)!r}, device_map='disk'))\n"
        "while True:\n"
        "    for delta in engine.generate([1, 2, 3], starquill.SamplingParams(max_tokens=50)):\n"
        "        print(delta.token_id, flush=True)\n"
    )
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before
    assert not list(tmp_path.glob("**/.*"))
    ids = tiny.random_ids(9)
    memory, disk = load(model), load(model, device_map="disk")
    assert torch.equal(tiny.our_logits(memory, ids), tiny.our_logits(disk, ids))
