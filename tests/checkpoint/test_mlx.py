"""MLX's affine layout against MLX itself: fixtures, every packing, overrides, contradictions."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from starquill import loading
from starquill.checkpoint.describe import describe
from starquill.engine.loaded import LoadedModel
from starquill.errors import CheckpointError, StarquillError, UnsupportedError
from starquill.quant.affine import AffineWeight
from tests import tiny

load = functools.partial(loading.load, exact=True)  # to compare closely

DATA = tiny.SHARED / "data" / "starcoder2-tiny"
shared = pytest.mark.skipif(not tiny.SHARED.exists(), reason=tiny.NO_SHARED)
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
# Wide enough for groups of 128; no two matrices of a layer have one shape by accident.
RAW = tiny.config(hidden_size=128, intermediate_size=384, num_attention_heads=4)
STATE = tiny.weights(RAW, head=True)
C_PROJ = "model.layers.1.mlp.c_proj"
Packings = Mapping[str, "tuple[int, int] | None"]


mx.set_default_device(mx.cpu)


def _to_mlx(tensor: Tensor) -> Any:
    return mx.array(tensor.float().numpy())


def _to_torch(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array.astype(mx.float32)))


def _modules(state: Mapping[str, Tensor]) -> list[str]:
    return [n.removesuffix(".weight") for n, t in state.items() if t.ndim == 2]


def _quantized(
    state: Mapping[str, Tensor], packings: Packings, dtype: Any = mx.float16
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`state` quantized by MLX, and what MLX says that it stands for."""
    arrays: dict[str, Any] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in state.items():
        packing = packings.get(name.removesuffix(".weight"))
        array = _to_mlx(tensor)
        if packing is None:
            arrays[name], meant[name] = array, tensor
            continue
        module, (bits, group) = name.removesuffix(".weight"), packing
        parts = mx.quantize(array.astype(dtype), group_size=group, bits=bits)
        arrays |= zip((name, f"{module}.scales", f"{module}.biases"), parts, strict=True)
        wide = [parts[0], *(part.astype(mx.float32) for part in parts[1:])]
        meant[name] = _to_torch(mx.dequantize(*wide, group_size=group, bits=bits))
    return arrays, meant


def _write(folder: Path, arrays: Mapping[str, Any], raw: dict[str, Any], settings: Any) -> Path:
    tiny.write_checkpoint(folder, raw, state={"unused": torch.zeros(1)})
    mx.save_safetensors(str(folder / "model.safetensors"), dict(arrays), {"format": "mlx"})
    both = dict.fromkeys(("quantization", "quantization_config"), settings)
    tiny.write_json(folder / "config.json", {**raw, **(both if settings is not None else {})})
    return folder


def _checkpoint(
    folder: Path,
    packings: Packings,
    settings: Any,
    head: bool = False,
    dtype: Any = mx.float16,
) -> tuple[Path, dict[str, Tensor]]:
    """A folder as mlx-lm writes it, and the weights that it holds."""
    state = {n: t for n, t in STATE.items() if head or not n.startswith(HEAD)}
    arrays, meant = _quantized(state, packings, dtype)
    raw = {**RAW, "tie_word_embeddings": not head}
    return _write(folder, arrays, raw, settings), meant


def _uniform(bits: int, group: int, **other: tuple[int, int] | None) -> Packings:
    named = {name.replace("__", "."): packing for name, packing in other.items()}
    return {**dict.fromkeys(_modules(STATE), (bits, group)), **named}


def _module_weight(loaded: LoadedModel, name: str) -> Any:
    return loaded.model.get_submodule(name.removesuffix(".weight")).weight


def _assert_holds(loaded: LoadedModel, meant: Mapping[str, Tensor]) -> None:
    """Each matrix is what MLX dequantizes, but for the one rounding of scale·q + bias."""
    for name, tensor in meant.items():
        if tensor.ndim == 2:
            found = _module_weight(loaded, name).dequantize()
            torch.testing.assert_close(found, tensor, rtol=2**-22, atol=1e-7)
        else:
            assert torch.equal(loaded.model.get_parameter(name).data, tensor.float()), name


def _assert_runs_as(loaded: LoadedModel, raw: dict[str, Any], meant: dict[str, Tensor]) -> None:
    """Logits are transformers' for the dequantized weights."""
    ids = tiny.random_ids(20)
    expected = tiny.reference_logits(raw, meant, ids)
    torch.testing.assert_close(tiny.our_logits(loaded, ids), expected, rtol=0, atol=2e-4)


def _refused(model: Path, *facts: str, kind: type[StarquillError] = CheckpointError) -> None:
    for read in (load, describe):
        with pytest.raises(kind) as caught:
            read(model)
        for fact in facts:
            assert fact in str(caught.value)


# --- fixtures made by mlx-lm ---

FIXTURES = ("q2-g64", "q3-g64", "q4-g32", "q4-g64", "q5-g64", "q6-g128", "q8-g64", "mixed")


def _copy(name: str, folder: Path, **changes: Any) -> Path:
    shutil.copytree(DATA / f"mlx-{name}", folder, copy_function=shutil.copyfile)
    raw = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", {**raw, **changes})
    return folder


@shared
def test_every_fixture_is_tested() -> None:
    found = {path.name.removeprefix("mlx-") for path in DATA.glob("mlx-*")}
    assert found == set(FIXTURES)


@shared
@pytest.mark.parametrize("name", FIXTURES)
def test_a_fixtures_integers_and_values_are_mlxs(name: str, tmp_path: Path) -> None:
    folder = _copy(name, tmp_path / "m")
    stored: dict[str, Any] = mx.load(str(folder / "model.safetensors"))  # type: ignore[assignment]
    loaded = load(folder)
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    seen = 0
    for key in [k for k in stored if k.endswith(".scales")]:
        module = key.removesuffix(".scales")
        told = {**settings, **settings.get(module, {})}
        bits, group = told["bits"], told["group_size"]
        weight = _module_weight(loaded, module)
        assert isinstance(weight, AffineWeight)
        assert weight.scheme == f"q{bits}-g{group}"
        packed, *halves = (stored[f"{module}.{p}"] for p in ("weight", "scales", "biases"))
        one, zero = (mx.full(halves[0].shape, v, mx.float32) for v in (1.0, 0.0))
        integers = mx.dequantize(packed, one, zero, group_size=group, bits=bits)
        assert torch.equal(weight.integers().float(), _to_torch(integers))
        for ours, theirs in zip((weight.scales, weight.biases), halves, strict=True):
            assert str(ours.dtype).removeprefix("torch.") in str(theirs.dtype)
            assert torch.equal(ours.float(), _to_torch(theirs))
        wide = [part.astype(mx.float32) for part in halves]
        values = _to_torch(mx.dequantize(packed, *wide, group_size=group, bits=bits))
        torch.testing.assert_close(weight.dequantize(), values, rtol=2**-22, atol=1e-7)
        seen += 1
    assert seen == 13 or name == "mixed"


def _mlx_lm_logits(folder: Path, ids: list[int]) -> Tensor:
    """What mlx-lm computes from `folder` in float32, `[T, V]`."""
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return _to_torch(model(mx.array([ids])))[0]


@shared
@pytest.mark.parametrize("name", FIXTURES)
def test_logits_follow_a_fixtures(name: str, tmp_path: Path) -> None:
    """mlx-lm ignores the window and computed these in bfloat16, with the exact GELU.

    In float32 it agrees to rounding; the stored logits are as near as bfloat16 lets them.
    """
    ids = np.load(DATA / "ids.npy").tolist()
    theirs = torch.from_numpy(np.load(DATA / f"mlx-{name}" / "logits.npy")).float()
    exact = load(_copy(name, tmp_path / "e", sliding_window=None, hidden_act="gelu"))
    wide = _mlx_lm_logits(tmp_path / "e", ids)
    torch.testing.assert_close(tiny.our_logits(exact, ids), wide, rtol=0, atol=5e-5)
    free = tiny.our_logits(load(_copy(name, tmp_path / "f", sliding_window=None)), ids)
    held = tiny.our_logits(load(_copy(name, tmp_path / "w")), ids)
    assert float((free - theirs).square().mean().sqrt()) < 0.07 * float(theirs.std())
    torch.testing.assert_close(held[:16], free[:16], rtol=0, atol=1e-4)
    assert float((held[16:] - theirs[16:]).square().mean().sqrt()) > 0.5 * float(theirs.std())


# --- B25: every packing that there is ---


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_b25_every_packing(tmp_path: Path, bits: int, group: int) -> None:
    """B25: another group or other bits were read as the default; scales of every dtype."""
    dtype = {32: mx.bfloat16, 64: mx.float16, 128: mx.float32}[group]
    settings = {"group_size": group, "bits": bits, "mode": "affine"}
    folder, meant = _checkpoint(tmp_path, _uniform(bits, group), settings, dtype=dtype)
    loaded = load(folder)
    assert loaded.warnings == ()
    _assert_holds(loaded, meant)
    assert _module_weight(loaded, C_PROJ).scheme == f"q{bits}-g{group}"
    if group == 64:
        _assert_runs_as(loaded, {**RAW, "tie_word_embeddings": True}, meant)
    assert f"q{bits}-g{group} (13 tensors)" in str(describe(folder).quantization)
    assert describe(folder).parameters == sum(t.numel() for t in meant.values())


@pytest.mark.parametrize(
    "settings",
    [{"group_size": 64, "bits": 4}, {"bits": 4, "group_size": 64, "mode": "affine"}],
    ids=["old file", "new file"],
)
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_b25_old_files_and_either_key(tmp_path: Path, settings: Any, key: str) -> None:
    folder, meant = _checkpoint(tmp_path, _uniform(4, 64), None)
    tiny.write_json(folder / "config.json", {**RAW, "tie_word_embeddings": True, key: settings})
    _assert_holds(load(folder), meant)


@pytest.mark.parametrize("bits", [0, 1, 7, 16, "4", 4.5, None, True, [4], -4])
def test_b25_bits_that_there_are_not(tmp_path: Path, bits: Any) -> None:
    folder, _ = _checkpoint(tmp_path, _uniform(4, 64), {"group_size": 64, "bits": bits})
    _refused(folder, "bits", "c_proj")


@pytest.mark.parametrize("group", [0, 1, 48, 256, "64", None, [64], -64, 1e9])
def test_b25_groups_that_there_are_not(tmp_path: Path, group: Any) -> None:
    folder, _ = _checkpoint(tmp_path, _uniform(4, 64), {"group_size": group, "bits": 4})
    _refused(folder, "group", "c_proj")


def test_b25_numbers_written_as_fractions(tmp_path: Path) -> None:
    """Some tools write 4.0; it is 4 or it is refused, and never a fault of ours."""
    folder, meant = _checkpoint(tmp_path, _uniform(4, 64), {"group_size": 64.0, "bits": 4.0})
    try:
        loaded = load(folder)
    except CheckpointError:
        return
    _assert_holds(loaded, meant)


# --- B24: overrides ---


def test_b24_overrides_are_by_module(tmp_path: Path) -> None:
    """B24: an override that matches no module path left the global bits in force."""
    packings = _uniform(4, 64, model__layers__0__mlp__c_fc=None)
    packings = {**packings, C_PROJ: (6, 32), EMBEDDING: (8, 64)}
    settings = {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        C_PROJ: {"bits": 6, "group_size": 32},
        EMBEDDING: {"bits": 8},
        "model.layers.0.mlp.c_fc": False,
        "model.layers.0.self_attn.q_proj": True,
    }
    folder, meant = _checkpoint(tmp_path, packings, settings)
    loaded = load(folder)
    _assert_holds(loaded, meant)
    assert loaded.warnings == ()
    assert _module_weight(loaded, C_PROJ).scheme == "q6-g32"
    assert _module_weight(loaded, EMBEDDING).scheme == "q8-g64"
    assert _module_weight(loaded, "model.layers.0.mlp.c_fc").scheme == "float32"
    _assert_runs_as(loaded, {**RAW, "tie_word_embeddings": True}, meant)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_b24_any_packing_as_an_override(tmp_path: Path, bits: int, group: int) -> None:
    settings = {"group_size": 32, "bits": 5, C_PROJ: {"bits": bits, "group_size": group}}
    folder, meant = _checkpoint(tmp_path, {**_uniform(5, 32), C_PROJ: (bits, group)}, settings)
    _assert_holds(load(folder), meant)


@pytest.mark.parametrize("said", BITS)
@pytest.mark.parametrize("stored", BITS)
def test_b24_other_bits_than_the_tensors_are_an_error(
    tmp_path: Path, said: int, stored: int
) -> None:
    """B24: "expected shape (640) but received (960)", or worse, shapes that agree."""
    if said == stored:
        return
    packings = {**_uniform(4, 32), C_PROJ: (stored, 32)}
    settings = {"group_size": 32, "bits": 4, C_PROJ: {"bits": said, "group_size": 32}}
    folder, _ = _checkpoint(tmp_path, packings, settings)
    _refused(folder, C_PROJ, f"{said} bits")
    # The same by an override that was forgotten.
    if stored != 4:
        del settings[C_PROJ]
        folder, _ = _checkpoint(tmp_path / "forgotten", packings, settings)
        _refused(folder, C_PROJ, "4 bits")


@pytest.mark.parametrize(("said", "stored"), [(32, 64), (64, 32), (128, 64), (64, 128), (16, 32)])
def test_b24_other_groups_than_the_tensors_are_an_error(
    tmp_path: Path, said: int, stored: int
) -> None:
    settings = {"group_size": said, "bits": 4}
    folder, _ = _checkpoint(tmp_path, _uniform(4, stored), settings)
    _refused(folder, C_PROJ, f"group {said}")


@pytest.mark.parametrize(
    ("said", "stored"), [((8, 32), (4, 64)), ((4, 64), (2, 128)), ((3, 64), (6, 32))]
)
def test_b24_bits_and_group_wrong_together(
    tmp_path: Path, said: tuple[int, int], stored: tuple[int, int]
) -> None:
    """Words and groups a row agree with both readings; the model's width tells them apart."""
    settings = {"bits": said[0], "group_size": said[1]}
    folder, _ = _checkpoint(tmp_path, _uniform(*stored), settings)
    with pytest.raises(CheckpointError, match=r"c_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("key", ["layers.1.mlp.c_proj", f"{C_PROJ}.weight", "model.nothing", "x"])
def test_b24_an_override_that_matches_nothing_is_told(tmp_path: Path, key: str) -> None:
    settings = {"group_size": 64, "bits": 4, key: {"bits": 4, "group_size": 64}}
    folder, meant = _checkpoint(tmp_path, _uniform(4, 64), settings)
    loaded = load(folder)
    _assert_holds(loaded, meant)
    assert any(key in warning for warning in loaded.warnings)
    assert any(key in warning for warning in describe(folder).warnings)


def test_b24_scales_where_the_config_says_dense(tmp_path: Path) -> None:
    settings = {"group_size": 64, "bits": 4, C_PROJ: False}
    folder, _ = _checkpoint(tmp_path, _uniform(4, 64), settings)
    _refused(folder, C_PROJ)


def test_no_settings_at_all(tmp_path: Path) -> None:
    folder, _ = _checkpoint(tmp_path, _uniform(4, 64), None)
    with pytest.raises(CheckpointError, match="scales"):
        load(folder)


@pytest.mark.parametrize("settings", [{}, [], "4", 4, True, {"bits": 4}, {"group_size": 64}])
def test_settings_of_any_kind_are_no_fault_of_ours(tmp_path: Path, settings: Any) -> None:
    folder, meant = _checkpoint(tmp_path, _uniform(4, 64), settings)
    try:
        loaded = load(folder)
    except StarquillError:
        return
    _assert_holds(loaded, meant)


# --- tensors that are missing, or not what they are called ---


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
@pytest.mark.parametrize("module", [C_PROJ, EMBEDDING])
def test_a_missing_part_is_named(tmp_path: Path, part: str, module: str) -> None:
    folder, _ = _checkpoint(tmp_path, _uniform(4, 64), {"group_size": 64, "bits": 4})
    state = load_file(folder / "model.safetensors")
    del state[f"{module}.{part}"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert module in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t[:-1],
        lambda t: t[..., :-1],
        lambda t: t[None],
        lambda t: t.flatten()[0],
        lambda t: t.flatten(),
        lambda t: t[:0],
        lambda t: t.view(torch.int32 if t.element_size() == 4 else torch.uint8),
        lambda t: t.to(torch.int64),
    ],
    ids=["row", "column", "stacked", "scalar", "flat", "empty", "viewed", "int64"],
)
def test_a_misshapen_part_is_named(tmp_path: Path, part: str, change: Any) -> None:
    folder, _ = _checkpoint(tmp_path, _uniform(4, 64), {"group_size": 64, "bits": 4})
    state = load_file(folder / "model.safetensors")
    state[f"{C_PROJ}.{part}"] = change(state[f"{C_PROJ}.{part}"]).contiguous()
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=C_PROJ):
        load(folder)


@pytest.mark.parametrize("part", ["scales", "biases"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_not_finite(tmp_path: Path, part: str, value: float) -> None:
    folder, _ = _checkpoint(tmp_path, _uniform(4, 64), {"group_size": 64, "bits": 4})
    state = load_file(folder / "model.safetensors")
    state[f"{C_PROJ}.{part}"][3, 1] = value
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{C_PROJ}.*not finite"):
        load(folder)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("where", ["all", "one"])
def test_other_modes_are_refused_by_name(tmp_path: Path, mode: str, where: str) -> None:
    state = {n: t for n, t in STATE.items() if not n.startswith(HEAD)}
    arrays, _ = _quantized(state, _uniform(4, 64))
    for module in _modules(state) if where == "all" else [C_PROJ]:
        parts = mx.quantize(_to_mlx(STATE[f"{module}.weight"]), mode=mode)
        arrays[f"{module}.weight"], arrays[f"{module}.scales"] = parts
        del arrays[f"{module}.biases"]
    told = {"group_size": 16 if mode == "nvfp4" else 32, "bits": 4, "mode": mode}
    one = {"group_size": 64, "bits": 4, "mode": "affine", C_PROJ: told}
    folder = _write(tmp_path, arrays, RAW, told if where == "all" else one)
    _refused(folder, mode, "affine", kind=UnsupportedError)
    # Without the mode, it is a contradiction and not a wrong reading.
    told = {k: v for k, v in told.items() if k != "mode"}
    folder = _write(tmp_path, arrays, RAW, told if where == "all" else {**one, C_PROJ: told})
    _refused(folder, "c_proj")


@pytest.mark.parametrize("method", ["fp8", "bitnet", "compressed-tensors", "bitsandbytes", "x"])
def test_other_makers_are_refused_by_name(tmp_path: Path, method: str) -> None:
    raw = {**RAW, "quantization_config": {"quant_method": method, "bits": 4}}
    _refused(tiny.write_checkpoint(tmp_path, raw), method, kind=UnsupportedError)


# --- B27: embedding and head ---


@pytest.mark.parametrize("dense", ["nothing", "embedding", "all but the embedding"])
def test_b27_a_tied_embedding_is_one_tensor(tmp_path: Path, dense: str) -> None:
    """B27: "missing parameters: lm_head.scales", or a second full-size copy."""
    packings = dict(_uniform(4, 64))
    for module in packings:
        if {"nothing": False, "embedding": module == EMBEDDING}.get(dense, module != EMBEDDING):
            packings[module] = None
    folder, meant = _checkpoint(tmp_path, packings, {"group_size": 64, "bits": 4})
    loaded = load(folder)
    _assert_holds(loaded, meant)
    embedding, head = (_module_weight(loaded, name) for name in (EMBEDDING, HEAD))
    assert head is embedding
    assert head.scheme == ("float32" if dense == "embedding" else "q4-g64")
    ids = torch.tensor([5, 0, 319])
    values = meant[f"{EMBEDDING}.weight"]
    torch.testing.assert_close(embedding.rows(ids), values[ids], rtol=2**-22, atol=1e-7)
    _assert_runs_as(loaded, {**RAW, "tie_word_embeddings": True}, meant)


@pytest.mark.parametrize(("embedding", "head"), [(4, 6), (8, 2), (None, 4), (4, None), (4, 4)])
def test_b27_an_own_head_has_its_own_bits(
    tmp_path: Path, embedding: int | None, head: int | None
) -> None:
    bits = {EMBEDDING: embedding, HEAD: head}
    packings = {**_uniform(4, 64), **{n: (b, 64) if b else None for n, b in bits.items()}}
    settings = {"group_size": 64, "bits": 4}
    settings |= {n: {"bits": b, "group_size": 64} if b else False for n, b in bits.items()}
    folder, meant = _checkpoint(tmp_path, packings, settings, head=True)
    loaded = load(folder)
    _assert_holds(loaded, meant)
    assert loaded.warnings == ()
    for name, wanted in bits.items():
        assert _module_weight(loaded, name).scheme == (f"q{wanted}-g64" if wanted else "float32")
    _assert_runs_as(loaded, {**RAW, "tie_word_embeddings": False}, meant)


# --- B31: quantized already ---


@pytest.mark.parametrize("quant", ["8", "4", "2-hqq", "mixed-4-6"])
@pytest.mark.parametrize("what", ["all", "one module"])
def test_b31_quantizing_again_is_refused(tmp_path: Path, quant: str, what: str) -> None:
    """B31: a layer half-converted, or integers rounded twice without a word."""
    packings = _uniform(4, 64) if what == "all" else {C_PROJ: (4, 64)}
    folder, _ = _checkpoint(tmp_path, packings, {"group_size": 64, "bits": 4})
    with pytest.raises(UnsupportedError, match="quantized already"):
        load(folder, quant=quant)
