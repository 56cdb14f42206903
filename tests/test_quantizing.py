"""`quantize_checkpoint`: what is written loads back to the same bits, here and in mlx-lm."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from starquill import loading
from starquill.checkpoint import memory
from starquill.checkpoint.save import ShardWriter
from starquill.engine.loaded import LoadedModel
from starquill.errors import (
    BadRequestError,
    CapacityError,
    CheckpointError,
    NumericsError,
    StarquillError,
)
from starquill.quant.affine import BITS, GROUPS, AffineWeight
from starquill.quantizing import LoadProgress, QuantOptions, quantize_checkpoint
from tests import tiny

load = functools.partial(loading.load, exact=True)  # to compare closely

INDEX = "model.safetensors.index.json"
F16 = tiny.SHARED / "data" / "starcoder2-tiny" / "gguf" / "f16.gguf"
shared = pytest.mark.skipif(not tiny.SHARED.exists(), reason=tiny.NO_SHARED)
SCHEMES = [f"q{bits}-g{group}" for bits in BITS for group in GROUPS]
mx.set_default_device(mx.cpu)


def _weights(loaded: LoadedModel) -> dict[str, Any]:
    found = {}
    for path, module in loaded.model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and not isinstance(weight, Tensor):
            found[f"{path}.weight"] = weight
    return found


def _assert_same_bits(one: LoadedModel, other: LoadedModel) -> None:
    ours, theirs = _weights(one), _weights(other)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.scheme == theirs[name].scheme
        if isinstance(weight, AffineWeight):
            for part in ("packed", "scales", "biases"):
                mine, saved = getattr(weight, part), getattr(theirs[name], part)
                assert mine.dtype == saved.dtype
                assert torch.equal(mine, saved), f"{name} {part}"
        else:
            assert torch.equal(weight.dequantize(), theirs[name].dequantize())
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, other.model.get_parameter(name)), name
    ids = tiny.random_ids(10)
    assert torch.equal(tiny.our_logits(one, ids), tiny.our_logits(other, ids))


def _source(folder: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    raw = tiny.config(**changes)
    head = changes.get("tie_word_embeddings") is False
    state = {name: tensor.to(dtype) for name, tensor in tiny.weights(raw, head).items()}
    folder = tiny.write_checkpoint(folder, raw, state)
    tiny.write_json(folder / "generation_config.json", {"eos_token_id": [0, 6]})
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def _quantize(source: Path, out: Path, quant: str, *overrides: str, **more: Any) -> Any:
    return quantize_checkpoint(source, out, QuantOptions(quant, overrides, **more))


@pytest.mark.parametrize("quant", [*SCHEMES, "3-rtn", "4-hqq", "mixed-2-6", "mixed-4-6"])
def test_what_is_written_loads_to_the_same_bits(tmp_path: Path, quant: str) -> None:
    source = _source(tmp_path / "m", hidden_size=128, intermediate_size=256)
    result = _quantize(source, tmp_path / "out", quant)
    _assert_same_bits(load(source, quant=quant), load(tmp_path / "out"))
    assert load(tmp_path / "out").warnings == load(source).warnings
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert result.bytes_written == sum(tensor.nbytes for tensor in stored.values())
    assert result.bytes_read == sum(
        tensor.nbytes for tensor in load_file(source / "model.safetensors").values()
    )


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("hidden", "inner"), [(48, 80), (16, 48), (72, 200), (96, 100)])
def test_odd_widths_load_to_the_same_bits(
    tmp_path: Path, bits: int, hidden: int, inner: int
) -> None:
    """Rows that end within a 32-bit word at 3 and 5 bits; matrices that stay dense."""
    source = _source(tmp_path / "m", hidden_size=hidden, intermediate_size=inner)
    _quantize(source, tmp_path / "out", f"q{bits}-g64")
    _assert_same_bits(load(source, quant=f"q{bits}-g64"), load(tmp_path / "out"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e5])
def test_any_dtype_and_size(tmp_path: Path, dtype: torch.dtype, size: float) -> None:
    """Scales that float16 cannot hold are stored wider."""
    state = tiny.weights(tiny.config())
    name = "model.layers.0.mlp.c_fc.weight"
    state = {n: (t * size if n == name else t).to(dtype) for n, t in state.items()}
    if not bool(state[name].isfinite().all()):
        state[name] = state[name].nan_to_num(posinf=60000.0, neginf=-60000.0)
    source = tiny.write_checkpoint(tmp_path / "m", state=state)
    _quantize(source, tmp_path / "out", "4")
    _assert_same_bits(load(source, quant="4"), load(tmp_path / "out"))


@pytest.mark.parametrize("tie", [..., True, False], ids=["absent", "tied", "own head"])
def test_embedding_and_head(tmp_path: Path, tie: Any) -> None:
    source = _source(tmp_path / "m", tie_word_embeddings=tie)
    _quantize(source, tmp_path / "out", "q3-g32")
    _assert_same_bits(load(source, quant="q3-g32"), load(tmp_path / "out"))
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.scales" in stored) == (tie is False)


def test_the_config_says_what_is_stored(tmp_path: Path) -> None:
    overrides = (r"layers\.0\.mlp=q8-g32", r"layers\.1\.self_attn\.q_proj=dense")
    source = _source(tmp_path / "m")
    tiny.write_json(
        source / "config.json", {**json.loads((source / "config.json").read_text()), "kept": [1]}
    )
    _quantize(source, tmp_path / "out", "4", *overrides)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    settings = raw["quantization"]
    assert raw["quantization_config"] == settings
    assert raw["kept"] == [1]
    assert {k: settings[k] for k in ("group_size", "bits", "mode")} == {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
    }
    others = {k: (v["bits"], v["group_size"]) for k, v in settings.items() if isinstance(v, dict)}
    assert others == {
        "model.embed_tokens": (6, 64),
        "model.layers.0.mlp.c_fc": (8, 32),
        "model.layers.0.mlp.c_proj": (8, 32),
    }
    stored = load_file(tmp_path / "out" / "model.safetensors")
    dense = "model.layers.1.self_attn.q_proj"
    assert stored[f"{dense}.weight"].dtype == torch.bfloat16
    assert f"{dense}.scales" not in stored
    assert stored["model.layers.0.mlp.c_fc.weight"].dtype == torch.uint32


# --- others read it ---


@pytest.mark.parametrize("quant", [f"q{b}-g{g}" for b in BITS for g in (32, 64)] + ["mixed-3-6"])
def test_mlx_lm_reads_the_same_values_and_logits(tmp_path: Path, quant: str) -> None:
    from mlx_lm.utils import load_model

    source = _source(tmp_path / "m", hidden_act="gelu", sliding_window=None)
    _quantize(source, tmp_path / "out", quant)
    loaded = load(tmp_path / "out")
    model, config = load_model(tmp_path / "out")
    stored: Any = mx.load(str(tmp_path / "out" / "model.safetensors"))
    for name, weight in _weights(loaded).items():
        module = name.removesuffix(".weight")
        if module == "lm_head":
            continue
        scales, biases = (stored[f"{module}.{p}"].astype(mx.float32) for p in ("scales", "biases"))
        told = {**config["quantization"], **config["quantization"].get(module, {})}
        values = mx.dequantize(
            stored[name], scales, biases, group_size=told["group_size"], bits=told["bits"]
        )
        theirs = torch.from_numpy(np.array(values))
        torch.testing.assert_close(weight.dequantize(), theirs, rtol=2**-22, atol=1e-7)
    model.set_dtype(mx.float32)
    ids = tiny.random_ids(20)
    logits = torch.from_numpy(np.array(model(mx.array([ids])).astype(mx.float32)))[0]
    torch.testing.assert_close(tiny.our_logits(loaded, ids), logits, rtol=0, atol=2e-4)


# --- the folder ---


def test_what_belongs_to_the_model_comes_along(tmp_path: Path) -> None:
    source = _source(tmp_path / "m")
    (source / "notes.bin").write_bytes(b"not ours")
    _quantize(source, tmp_path / "out", "4")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    for name in names - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    loaded = load(tmp_path / "out")
    assert loaded.end_ids == {0, 6}
    assert loaded.chat_template is not None


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 60_000])
def test_shards_and_their_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    small = functools.partial(ShardWriter, shard_bytes=shard_bytes)
    monkeypatch.setattr("starquill.quantizing.ShardWriter", small)
    source = _source(tmp_path / "m")
    result = _quantize(source, tmp_path / "out", "4")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count > 1
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == result.bytes_written
    stored = {n: file for file in files for n in load_file(tmp_path / "out" / file)}
    assert index["weight_map"] == stored
    _assert_same_bits(load(source, quant="4"), load(tmp_path / "out"))


def test_others_may_read_the_files(tmp_path: Path) -> None:
    """A scratch folder is private; the finished one is as any new folder."""
    mask = os.umask(0o022)
    try:
        _quantize(_source(tmp_path / "m"), tmp_path / "out", "4")
    finally:
        os.umask(mask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {0o644}, modes


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError, SystemExit])
@pytest.mark.parametrize("place", ["apply_isq", "_write_companions", "finish"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "empty folder"])
def test_an_interrupted_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, place: str, there: bool
) -> None:
    source = _source(tmp_path / "m")
    out = tmp_path / "place" / "out"
    (out if there else out.parent).mkdir(parents=True)
    calls = []

    def fail(*arguments: Any) -> Any:
        calls.append(1)
        if place != "apply_isq" or len(calls) == 9:
            raise error
        return arguments[-1]

    owner = "ShardWriter.finish" if place == "finish" else place
    monkeypatch.setattr(f"starquill.quantizing.{owner}", fail)
    with pytest.raises(error):
        _quantize(source, out, "4")
    assert list(out.parent.iterdir()) == ([out] if there else [])
    assert not there or not any(out.iterdir())
    monkeypatch.undo()
    _quantize(source, out, "4")
    _assert_same_bits(load(source, quant="4"), load(out))
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("kind", ["folder", "file", "itself"])
def test_what_exists_is_not_touched(tmp_path: Path, kind: str) -> None:
    source = _source(tmp_path / "m")
    out = source if kind == "itself" else tmp_path / "out"
    if kind == "folder":
        out.mkdir()
        (out / "mine").write_text("x")
    elif kind == "file":
        out.write_text("x")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(BadRequestError, match="exists"):
        _quantize(source, out, "4")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_tensor_that_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    state = tiny.weights(tiny.config())
    state["model.layers.1.mlp.c_fc.weight"][3, 3] = float("nan")
    source = tiny.write_checkpoint(tmp_path / "m", state=state)
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.c_fc\.weight"):
        _quantize(source, tmp_path / "out", "4")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape"])
def test_a_checkpoint_that_would_not_load_is_refused(tmp_path: Path, damage: str) -> None:
    """Better now than when the result is loaded."""
    state = tiny.weights(tiny.config())
    name = "model.layers.0.mlp.c_fc.weight"
    state |= {"unexpected": {"stray.weight": torch.ones(64, 64)}}.get(damage, {})
    if damage == "missing":
        del state[name]
    if damage == "shape":
        state[name] = state[name][:-1]
    source = tiny.write_checkpoint(tmp_path / "m", state=state)
    with pytest.raises(CheckpointError, match=r"stray" if damage == "unexpected" else "c_fc"):
        _quantize(source, tmp_path / "out", "4")
    assert not (tmp_path / "out").exists()


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    seen: list[LoadProgress] = []
    source = _source(tmp_path / "m")
    options = QuantOptions("4")
    result = quantize_checkpoint(source, tmp_path / "out", options, on_progress=seen.append)
    assert [at.done for at in seen] == sorted(at.done for at in seen)
    assert {at.total for at in seen} == {result.bytes_read}
    assert (seen[0].done, seen[-1].done) == (0, result.bytes_read)
    assert {at.summary for at in seen} == {result.summary}
    assert {at.result for at in seen} == {result.bytes_written}
    loading_seen: list[LoadProgress] = []
    loaded = load(source, quant="4", on_progress=loading_seen.append)
    held = {id(weight): weight.nbytes for weight in _weights(loaded).values()}
    vectors = sum(4 * parameter.numel() for parameter in loaded.model.parameters())
    assert loading_seen[0].result == sum(held.values()) + vectors
    assert loading_seen[0].peak > loading_seen[0].result


def test_what_cannot_fit_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _source(tmp_path / "m")
    seen: list[LoadProgress] = []
    load(source, quant="4", on_progress=seen.append)
    monkeypatch.setattr(memory, "available_memory", lambda: seen[0].peak)
    load(source, quant="4")
    monkeypatch.setattr(memory, "available_memory", lambda: seen[0].peak - 1)
    with pytest.raises(CapacityError, match=r"needs 0\.0 GB and 0\.0 GB .* fewer bits"):
        load(source, quant="4")
    with pytest.raises(CapacityError, match=r"--quant 4"):
        load(source)


# --- from GGUF ---


@shared
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another model's files"])
def test_from_a_dense_gguf_file(tmp_path: Path, beside: bool) -> None:
    """All of it comes from the file; what lies in its folder belongs to something else."""
    place = tmp_path / "files"
    place.mkdir()
    path = place / "f16.gguf"
    path.symlink_to(F16)
    if beside:
        tiny.write_json(place / "tokenizer.json", tiny.byte_tokenizer())
        tiny.write_json(place / "generation_config.json", {"eos_token_id": 77})
        (place / "README.md").write_text("of another model")
    _quantize(path, tmp_path / "out", "4")
    one, other = load(path, quant="4"), load(tmp_path / "out")
    _assert_same_bits(one, other)
    assert other.end_ids == one.end_ids == {0}
    tokenizers = one.require_tokenizer(), other.require_tokenizer()
    for text in ("def f(x):\n    return 2024\n", "é😀 \t", "<fim_middle>"):
        for special in (False, True):
            first, second = (t.encode(text, parse_special=special) for t in tokenizers)
            assert first == second
    assert not (tmp_path / "out" / "README.md").exists()


@shared
def test_a_quantized_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StarquillError, match="quantized already"):
        _quantize(F16.with_name("q4_0.gguf"), tmp_path / "out", "4")
    assert list(tmp_path.iterdir()) == []


# --- memory ---

_PEAK = """
import sys
from starquill.loading import load
load(sys.argv[1], quant="4")
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to tell the peak")
def test_the_peak_is_the_result_and_a_bound(tmp_path: Path) -> None:
    """Six layers of the 3B model's width, in a file of holes: 1.45 GB of bf16."""
    raw = tiny.config(
        hidden_size=3072, intermediate_size=12288, num_attention_heads=24, num_hidden_layers=6
    )
    raw |= {"num_key_value_heads": 2, "vocab_size": 49152}
    shapes = tiny.shapes(raw)
    tiny.write_json(tmp_path / "config.json", raw)
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    command = [sys.executable, "-c", _PEAK, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    matrices = sorted(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    quantized = sum(matrices) * 4.5 / 8 + 49152 * 3072 * 2 / 8
    assert int(told.stdout) < quantized + 4 * sum(matrices[-2:]) + 400e6
    assert int(told.stdout) < 2 * sum(matrices), "more than the checkpoint itself"
