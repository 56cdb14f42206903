"""Which weight gets which scheme, and models that are quantized while they load."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from starquill.checkpoint.source import SafetensorsSource, TensorInfo
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError, NumericsError, StarquillError, UnsupportedError
from starquill.isq import RECIPES, IsqPlan, parse_override, plan_isq
from starquill.loading import load
from starquill.models import architecture
from starquill.quant.affine import AffineWeight
from starquill.quant.schemes import Scheme
from starquill.quantizing import QuantOptions, quantize_checkpoint
from starquill.types import SamplingParams
from tests import tiny

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
C_PROJ = "model.layers.1.mlp.c_proj.weight"
GGUF = tiny.SHARED / "data" / "starcoder2-tiny" / "gguf"
shared = pytest.mark.skipif(not tiny.SHARED.exists(), reason=tiny.NO_SHARED)


def _infos(raw: dict[str, Any], head: bool = False) -> dict[str, TensorInfo]:
    state = {n: t.shape for n, t in tiny.weights(raw, head).items()}
    return {n: TensorInfo("BF16", tuple(s), 2 * s.numel()) for n, s in state.items()}


def _plan(quant: str, *overrides: str, head: bool = False, **changes: Any) -> IsqPlan:
    raw = tiny.config(**changes)
    spec = architecture(raw)
    parsed = [parse_override(text) for text in overrides]
    return plan_isq(spec, spec.read_config(raw), _infos(raw, head), quant, parsed)


def _bits(plan: IsqPlan) -> dict[str, int]:
    return {name: scheme.bits for name, scheme in plan.schemes.items()}


# --- the plan ---


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_embedding_and_head_get_more_bits(bits: int) -> None:
    plan = _plan(str(bits), head=True)
    inner = {n: b for n, b in _bits(plan).items() if n not in (EMBEDDING, HEAD)}
    assert set(inner.values()) == {bits}
    assert len(inner) == 12
    for name in (EMBEDDING, HEAD):
        assert plan.schemes[name].bits > bits or bits == 8
    assert plan.skipped == {}
    assert not any("norm" in name or "bias" in name for name in plan.schemes)


@pytest.mark.parametrize("quant", ["q4-g32-hqq", "q3-g128-rtn", "8-hqq"])
def test_the_method_is_kept(quant: str) -> None:
    plan = _plan(quant, hidden_size=128, intermediate_size=256)
    assert {scheme.method for scheme in plan.schemes.values()} == {quant.split("-")[-1]}


def test_more_bits_are_said_and_can_be_taken_back() -> None:
    plan = _plan("4")
    text = plan.summary(_infos(tiny.config()))
    assert "12 x q4-g64" in text
    assert "1 x q6-g64" in text
    assert "embed" in text  # which one that is
    assert _bits(_plan("4", "embed_tokens=4"))[EMBEDDING] == 4


def test_the_mean_of_bits_is_that_of_all_weights() -> None:
    """Scales count; 13 matrices, one of them with other bits."""
    raw = tiny.config()
    infos = _infos(raw)
    plan = _plan("4")
    sizes = {n: infos[n].nbytes / 2 for n in plan.schemes}
    bits = sum(sizes[n] * (s.bits + 32 / s.group) for n, s in plan.schemes.items())
    assert f"{bits / sum(sizes.values()):.2f} bits" in plan.summary(infos)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layers", [2, 8, 12, 16, 30, 32, 40])
def test_recipes_are_mlx_lms(recipe: str, layers: int) -> None:
    """Against mlx-lm's own predicate, which wants the name that Llama gives to c_proj."""
    import importlib

    class Model:
        layers: Any = None

        def named_modules(self) -> list[tuple[str, None]]:
            return [("model.layers.0.mlp.down_proj", None)]

    model = Model()
    model.layers = range(layers)
    convert = importlib.import_module("mlx_lm.convert")
    wanted = convert.mixed_quant_predicate_builder(recipe.replace("-", "_"), model)
    plan = _plan(recipe, num_hidden_layers=layers, head=True, vocab_size=32)
    assert len(plan.schemes) == 6 * layers + 2
    wrong = []
    for name, scheme in plan.schemes.items():
        if name == EMBEDDING:  # mlx-lm keeps few bits for it; we do as for every scheme
            assert scheme.bits == RECIPES[recipe][1]
            continue
        path = name.removesuffix(".weight").replace("c_proj", "down_proj")
        if scheme.bits != wanted(path, None)["bits"]:
            wrong.append(name)
    assert wrong == []


def test_the_last_override_wins() -> None:
    plan = _plan("4", "mlp=8", r"c_proj=q3-g32-hqq", r"layers\.0\..*c_proj=dense")
    assert plan.schemes["model.layers.0.mlp.c_fc.weight"].bits == 8
    assert plan.schemes[C_PROJ] == Scheme(3, 32, "hqq")
    assert "model.layers.0.mlp.c_proj.weight" not in plan.schemes
    assert "model.layers.0.mlp.c_proj.weight" in plan.skipped
    assert plan.schemes["model.layers.0.self_attn.q_proj.weight"].bits == 4
    assert _plan("4", "mlp=dense", "mlp=5").schemes[C_PROJ].bits == 5


@pytest.mark.parametrize("name", ["nothing", "layers.7", "norm", "bias", "^embed"])
def test_an_override_that_finds_nothing_is_an_error(name: str) -> None:
    with pytest.raises(BadRequestError, match=re.escape(name)):
        _plan("4", f"{name}=8")


@pytest.mark.parametrize("text", ["", "x", "=4", "x=", "x=7", "(=4", "[=4", "x=q4-g48", "x=Dense!"])
def test_overrides_that_cannot_be_read(text: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_override(text)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("quant", ["7", "mixed-5-6", "mixed_4_6", "", "Q4_K", "q4-g48", "dense"])
def test_an_unknown_scheme_is_refused_with_every_valid_one(quant: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        _plan(quant)
    for valid in ("2, 3, 4, 5, 6, 8", "16, 32, 64, 128", "rtn", "hqq", *RECIPES):
        assert valid in str(caught.value)


def test_a_stored_quantized_tensor_is_refused() -> None:
    raw = tiny.config()
    spec = architecture(raw)
    infos = {**_infos(raw), C_PROJ: TensorInfo("q4-g64", (64, 256), 1)}
    with pytest.raises(UnsupportedError, match="quantized already") as caught:
        plan_isq(spec, spec.read_config(raw), infos, "8")
    assert C_PROJ in str(caught.value)


# --- B26: widths that groups do not divide ---


@pytest.mark.parametrize(
    ("width", "group"), [(96, 32), (48, 16), (80, 16), (200, None), (72, None), (192, 64)]
)
def test_b26_a_smaller_group_or_none(width: int, group: int | None) -> None:
    """B26: a guard with the wrong group left most of a model in BF16 without a word."""
    raw = {"intermediate_size": width}
    plan = _plan("q4-g64", **raw)
    names = [f"model.layers.{i}.mlp.c_proj.weight" for i in range(2)]
    text = plan.summary(_infos(tiny.config(**raw)))
    for name in names:
        assert (plan.schemes[name].group if name in plan.schemes else None) == group
        assert (name in plan.skipped) == (group is None)
        if group is None:
            assert f"{name} (no group divides its width of {width})" in text
        else:
            assert f"q4-g{group}" in text
    assert len(plan.schemes) + len(plan.skipped) == 13


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize(("hidden", "inner"), [(72, 200), (96, 100), (48, 80)])
def test_b26_odd_models_load_and_run(tmp_path: Path, bits: int, hidden: int, inner: int) -> None:
    raw = tiny.config(hidden_size=hidden, intermediate_size=inner, num_attention_heads=4)
    loaded = load(tiny.write_checkpoint(tmp_path, raw), quant=f"q{bits}-g64")
    assert bool(tiny.our_logits(loaded, tiny.random_ids(12)).isfinite().all())
    fits = hidden % 16 == 0
    assert isinstance(_weights(loaded)[EMBEDDING], AffineWeight) == fits


def test_b26_no_matrix_fits(tmp_path: Path) -> None:
    """Nothing can be quantized: that is said, and is no division by zero."""
    raw = tiny.config(hidden_size=72, intermediate_size=200)
    folder = tiny.write_checkpoint(tmp_path, raw)
    plain, held = load(folder), load(folder, quant="4")
    ids = tiny.random_ids(9)
    assert torch.equal(tiny.our_logits(plain, ids), tiny.our_logits(held, ids))


ODD = {"hidden_size": 96, "intermediate_size": 200}


@pytest.mark.parametrize(
    ("quant", "overrides", "changes", "named"),
    [
        ("q4-g64", (), {}, []),
        ("8", (), {"intermediate_size": 128}, []),
        ("q4-g64", (), ODD, ["q_proj", "c_fc", "c_proj", "embed_tokens", "q4-g32", "width of 200"]),
        ("q4-g32", ("embed=4-g32", "c_proj=dense"), ODD, []),
        ("q4-g32", ("embed=dense",), ODD, ["c_proj", "width of 200"]),
        ("q4-g128", (), {}, ["q_proj", "q4-g64", "width of 64"]),
        ("mixed-2-6", (), {"intermediate_size": 72}, ["c_proj", "width of 72"]),
        ("q4-g16", ("c_proj=q4-g128",), {"intermediate_size": 192}, ["c_proj", "q4-g64"]),
    ],
)
def test_b26_strict_refuses_what_falls_back(
    tmp_path: Path,
    quant: str,
    overrides: tuple[str, ...],
    changes: dict[str, Any],
    named: list[str],
) -> None:
    """B26: all that cannot have its scheme is named at once, before anything is computed."""
    folder = tiny.write_checkpoint(tmp_path / "m", tiny.config(**changes))
    options = QuantOptions(quant, overrides, calibrate=Path("not read"), strict=True)
    if not named:
        with pytest.raises(BadRequestError, match="not read cannot be read"):
            load(folder, quant=options)
        return
    for attempt in (load, lambda f, quant: quantize_checkpoint(f, tmp_path / "out", quant)):
        with pytest.raises(BadRequestError, match="cannot have their scheme") as caught:
            attempt(folder, quant=options)  # type: ignore[operator]
        for part in named:
            assert part in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("quant", "told"), [("q4-g64", True), ("q4-g32", True), ("dense=", False)])
def test_b26_a_load_tells_what_fell_back_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quant: str, told: bool
) -> None:
    """With the mean bits; what the user wants dense is no news."""
    folder = tiny.write_checkpoint(tmp_path / "m", tiny.config(**ODD))
    overrides = (".=dense",) if quant == "dense=" else ("embed=4-g32",)
    options = QuantOptions("4" if quant == "dense=" else quant, overrides)
    warnings = [w for w in load(folder, quant=options).warnings if "quantized as" in w]
    assert len(warnings) == told
    assert len([r for r in caplog.records if "quantized as" in r.getMessage()]) == told
    for warning in warnings:
        assert "c_proj.weight (no group divides its width of 200)" in warning
        assert "bits a weight" in warning
        assert ("q4-g32 for q4-g64" in warning) == (quant == "q4-g64")


# --- loading ---


def _weights(loaded: LoadedModel) -> dict[str, Any]:
    return {
        f"{path}.weight": module.weight
        for path, module in loaded.model.named_modules()
        if hasattr(module, "weight")
        and hasattr(module.weight, "dequantize")
        and not isinstance(module.weight, Tensor)
    }


@pytest.mark.parametrize("quant", ["2", "3-rtn", "4", "q5-g32", "q6-g16-hqq", "8", "mixed-3-6"])
@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
def test_logits_are_those_of_the_dequantized(tmp_path: Path, quant: str, head: bool) -> None:
    """Against transformers with the weights written out, and near the model itself."""
    raw = tiny.config(tie_word_embeddings=not head)
    state = tiny.weights(raw, head)
    loaded = load(tiny.write_checkpoint(tmp_path, raw, state), quant=quant, exact=True)
    held = {n: w.dequantize() for n, w in _weights(loaded).items() if n in state}
    assert all(isinstance(w, AffineWeight) for w in _weights(loaded).values())
    ids = tiny.random_ids(30)
    ours = tiny.our_logits(loaded, ids)
    expected = tiny.reference_logits(raw, {**state, **held}, ids)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)
    if quant == "8":
        plain = tiny.reference_logits(raw, state, ids)
        assert float((ours - plain).square().mean().sqrt()) < 0.05 * float(plain.std())


def test_a_tied_head_stays_one_tensor(tmp_path: Path) -> None:
    """B27: no second copy, and embedding rows are those that the head multiplies with."""
    loaded = load(tiny.write_checkpoint(tmp_path), quant="4")
    weights = _weights(loaded)
    assert weights[HEAD] is weights[EMBEDDING]
    assert weights[HEAD].scheme == "q6-g64"


def test_every_tensor_is_read_once_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bounds memory: one tensor at a time, none of the dense ones kept."""
    import weakref

    folder = tiny.write_checkpoint(tmp_path)
    seen: Counter[str] = Counter()
    alive: list[Any] = []
    read = SafetensorsSource.read

    def counting(self: SafetensorsSource, name: str) -> Tensor:
        assert sum(ref() is not None for ref in alive) <= 1
        seen[name] += 1
        tensor = read(self, name)
        if tensor.ndim == 2:
            alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(SafetensorsSource, "read", counting)
    loaded = load(folder, quant="4")
    assert seen == Counter(dict.fromkeys(tiny.weights(tiny.config()), 1))
    assert not any(ref() is not None for ref in alive)
    stored = sum(w.nbytes for n, w in _weights(loaded).items() if n != HEAD)
    dense = sum(t.nbytes for t in tiny.weights(tiny.config()).values() if t.ndim == 2)
    assert stored < dense * 5.2 / 32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compute", ["auto", "bfloat16", "float16"])
def test_any_stored_and_computed_dtype(tmp_path: Path, dtype: torch.dtype, compute: Any) -> None:
    state = {n: t.to(dtype) for n, t in tiny.weights(tiny.config()).items()}
    folder = tiny.write_checkpoint(tmp_path, state=state)
    loaded, exact = load(folder, quant="8", dtype=compute), load(folder, quant="8")
    ids = tiny.random_ids(12)
    ours, expected = tiny.our_logits(loaded, ids), tiny.our_logits(exact, ids)
    assert float((ours - expected).square().mean().sqrt()) < 0.05 * float(expected.std())


# --- B31, B61 ---


@shared
@pytest.mark.parametrize("quant", ["4", "mixed-2-6"])
@pytest.mark.parametrize("name", ["q8_0", "q4_k_m"])
def test_b31_quantizing_a_quantized_file_is_refused(quant: str, name: str) -> None:
    """B31: integers rounded twice without a word; a dense file is what it is for."""
    with pytest.raises(UnsupportedError, match="quantized already"):
        load(GGUF / f"{name}.gguf", quant=quant)
    assert "q6-g64" in {w.scheme for w in _weights(load(GGUF / "f16.gguf", quant=quant)).values()}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [C_PROJ, EMBEDDING])
def test_b61_a_tensor_that_fails_fails_the_load(tmp_path: Path, name: str, value: float) -> None:
    """B61: "ready", and then every request failed in a layer that was half converted."""
    state = tiny.weights(tiny.config())
    good = state[name].clone()
    state[name][1, 1] = value
    folder = tiny.write_checkpoint(tmp_path, state=state)
    with pytest.raises(NumericsError, match=re.escape(name)):
        load(folder, quant="4")
    state[name] = good
    loaded = load(tiny.write_checkpoint(tmp_path, state=state), quant="4")
    assert all(isinstance(weight, AffineWeight) for weight in _weights(loaded).values())


@pytest.mark.parametrize("quant", ["2", "4", "8"])
def test_b61_the_first_request_is_answered(tmp_path: Path, quant: str) -> None:
    """At once, and again after one that failed."""
    loaded = load(tiny.write_checkpoint(tmp_path), quant=quant)
    params = SamplingParams(max_tokens=6, logit_bias={0: -100.0})
    engine = Engine(loaded)
    first = engine.complete("def f", params)
    with pytest.raises(StarquillError):
        engine.complete("x" * 1000, params)
    assert engine.complete("def f", params) == first == Engine(loaded).complete("def f", params)


def test_overrides_reach_the_model(tmp_path: Path) -> None:
    options = QuantOptions("4", ("self_attn=dense", r"c_proj=q2-g16"))
    weights = _weights(load(tiny.write_checkpoint(tmp_path), quant=options))
    schemes = {name: weight.scheme for name, weight in weights.items()}
    assert schemes[C_PROJ] == "q2-g16"
    assert schemes["model.layers.0.self_attn.q_proj.weight"] == "float32"
    assert schemes["model.layers.0.mlp.c_fc.weight"] == "q4-g64"
