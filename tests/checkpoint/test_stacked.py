"""Experts on disk: one by one, fused, in MLX's stacks, quantized; and what can be wrong with it."""

from __future__ import annotations

import functools
import re
import weakref
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
from starquill.checkpoint.source import TensorInfo
from starquill.checkpoint.stacked import StackedSource
from starquill.engine.loaded import LoadedModel
from starquill.errors import CheckpointError
from starquill.models import ARCHITECTURES
from starquill.nn.experts import ExpertLinear
from starquill.quant.affine import AffineWeight
from starquill.quantizing import QuantOptions, quantize_checkpoint
from tests import moe, tiny

load = functools.partial(loading.load, exact=True)  # to compare closely
mx.set_default_device(mx.cpu)
FAMILIES = tuple(moe.RAW)
# The keys that mlx-lm wants, and nothing that it does not know.
MLX: dict[str, dict[str, Any]] = {
    "mixtral": {"rms_norm_eps": 1e-5},
    "qwen3_moe": {"rms_norm_eps": 1e-6, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "olmoe": {"rms_norm_eps": 1e-5, "clip_qkv": None},
    "phimoe": {"rms_norm_eps": 1e-5, "rope_scaling": None},
}
FILE = "model.safetensors"


def _folder(tmp_path: Path, family: str, fused: bool = False, **changes: Any) -> Path:
    raw = moe.config(family, **changes)
    return moe.write(tmp_path / "source", raw, moe.reference(raw), fused)


def _edited(folder: Path, edit: Any) -> Path:
    state = load_file(folder / FILE)
    edit(state)
    save_file(state, folder / FILE)
    return folder


def _stacks(loaded: LoadedModel) -> dict[str, Any]:
    named = loaded.model.named_modules()
    return {name: m.weight for name, m in named if isinstance(m, ExpertLinear)}


# --- forms ---


@pytest.mark.parametrize("family", moe.PUBLISHED)
def test_fused_and_single_experts_are_the_same(tmp_path: Path, family: str) -> None:
    one, other = (_folder(tmp_path / str(f), family, f) for f in (False, True))
    ours, theirs = load(one), load(other)
    assert _stacks(ours).keys() == _stacks(theirs).keys() != set()
    for name, weight in _stacks(ours).items():
        assert torch.equal(weight.data, _stacks(theirs)[name].data), name
    assert describe(one).parameters == describe(other).parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_inspect_counts_experts_and_routers(tmp_path: Path, family: str) -> None:
    folder = _folder(tmp_path, family)
    facts, state = describe(folder), load_file(folder / FILE)
    assert facts.warnings == ()
    assert facts.parameters == sum(t.numel() for t in state.values())
    experts = sum(t.nbytes for n, t in state.items() if ".experts." in n)
    routers = sum(t.nbytes for n, t in state.items() if ".gate.weight" in n)
    assert facts.bytes["experts"] == experts
    assert facts.bytes["router"] == routers
    assert sum(facts.bytes.values()) == sum(t.nbytes for t in state.values())


class _OneAtATime:
    """A source that notes how many of its tensors are in use at once."""

    warnings = ()

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.infos = {n: TensorInfo("F32", tuple(t.shape), t.nbytes) for n, t in tensors.items()}
        self.alive = self.most = 0

    def read(self, name: str) -> Tensor:
        value = self._tensors[name].clone()
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(value, self._freed)
        return value

    def _freed(self) -> None:
        self.alive -= 1


def test_a_stack_is_filled_expert_by_expert(tmp_path: Path) -> None:
    """Beside the stack the first expert and one more are in memory, of however many there are."""
    state = load_file(_folder(tmp_path, "mixtral", num_local_experts=9) / FILE)
    source = _OneAtATime(state)
    stacked = StackedSource(source, ARCHITECTURES["mixtral"], 9)
    name = "model.layers.1.mlp.experts.down_proj.weight"
    value = stacked.read(name)
    assert isinstance(value, Tensor)
    assert (source.most, source.alive) == (2, 0)
    assert value.shape == stacked.infos[name].shape == (9, 64, 96)
    for e in range(9):
        single = f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"
        assert torch.equal(value[e], state[single])
        assert single not in stacked.infos


@pytest.mark.parametrize("form", ["BF16", "F16"])
@pytest.mark.parametrize("fused", [False, True])
def test_two_byte_experts_stay_so(tmp_path: Path, fused: bool, form: str) -> None:
    dtype = {"BF16": torch.bfloat16, "F16": torch.float16}[form]
    raw, ids = moe.config("qwen3_moe"), tiny.random_ids(20)
    model = moe.reference(raw)
    loaded = load(moe.write(tmp_path, raw, moe.reference(raw).to(dtype), fused))
    with torch.no_grad():
        for parameter in model.parameters():  # not its frequencies
            parameter.copy_(parameter.to(dtype))
    assert {w.data.dtype for w in _stacks(loaded).values()} == {dtype}
    ours = tiny.our_logits(loaded, ids)
    torch.testing.assert_close(ours, moe.logits(model, ids), atol=1e-4, rtol=0)


# --- faults ---


def _refused(folder: Path, *facts: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    (told,) = describe(folder).warnings
    for fact in facts:
        assert fact in str(caught.value)
        assert fact in told
    return str(caught.value)


def test_every_missing_part_of_every_expert_is_told_at_once(tmp_path: Path) -> None:
    gone = [
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.5.up_proj.weight",  # the last
        "model.layers.1.mlp.experts.2.down_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.norm.weight",
    ]
    folder = _edited(_folder(tmp_path, "qwen3_moe"), lambda s: [s.pop(n) for n in gone])
    message = _refused(folder, *gone)
    assert "unexpected" not in message
    assert "experts.1." not in message  # it is all there


def test_a_missing_stack_is_told(tmp_path: Path) -> None:
    def edit(state: dict[str, Tensor]) -> None:
        for name in [n for n in state if re.search(r"layers\.1.*w3", n)]:
            del state[name]

    folder = _edited(_folder(tmp_path, "mixtral"), edit)
    _refused(folder, "missing tensors: model.layers.1.mlp.experts.up_proj.weight")
    folder = _edited(
        _folder(tmp_path / "f", "mixtral", fused=True),
        lambda s: s.pop("model.layers.0.mlp.experts.gate_up_proj"),
    )
    _refused(folder, "layers.0.mlp.experts.gate_proj.weight", "layers.0.mlp.experts.up_proj.weight")


def test_another_number_of_experts(tmp_path: Path) -> None:
    """More or fewer than the config says, in either form."""
    for fused in (False, True):
        for count in (4, 6):
            raw = moe.config("mixtral")
            model = moe.reference({**raw, "num_local_experts": count})
            at = tmp_path / f"{fused}{count}"
            folder = moe.write(at, raw, model, fused, num_local_experts=5)
            gate = f"layers.0.mlp.gate.weight [{count}, 64] (expected [5, 64])"
            if fused:
                stack = f"gate_proj.weight [{count}, 96, 64] (expected [5, 96, 64])"
                _refused(folder, gate, stack)
            elif count == 4:
                _refused(folder, gate, "missing tensors: model.layers.0.mlp.experts.4.down_proj")
            else:
                _refused(folder, gate, "unexpected tensors: ", "block_sparse_moe.experts.5.w1")


def test_an_expert_of_another_shape_or_type(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    folder = _folder(tmp_path, "olmoe")
    _edited(folder, lambda s: s.update({name: torch.zeros(96, 65)}))
    _refused(folder, f"wrong shapes: {name} [96, 65] (expected [96, 64])")
    _edited(folder, lambda s: s.update({name: torch.zeros(96, 64, dtype=torch.bfloat16)}))
    _refused(folder, "different types: model.layers.1.mlp.experts.up_proj.weight BF16 and F32")
    _edited(folder, lambda s: s.update({name: torch.full((96, 64), torch.nan)}))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.up_proj.*not finite"):
        load(folder)


def test_a_stack_and_its_experts_cannot_both_be(tmp_path: Path) -> None:
    stack = torch.zeros(6, 96, 64)
    folder = _edited(
        _folder(tmp_path, "olmoe"),
        lambda s: s.update({"model.layers.0.mlp.switch_mlp.up_proj.weight": stack}),
    )
    _refused(folder, "unexpected tensors: model.layers.0.mlp.experts.0.up_proj.weight")


# --- quantized ---


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_loads_to_the_same_bits(tmp_path: Path, family: str, fused: bool) -> None:
    folder, out = _folder(tmp_path, family, fused), tmp_path / "out"
    result = quantize_checkpoint(folder, out, QuantOptions("q4-g32"))
    here, back = load(folder, quant="q4-g32"), load(out)
    assert result.bytes_written == sum(describe(out).bytes.values())
    assert "experts 6" in result.summary or "experts 4" in result.summary
    for name, weight in _stacks(here).items():
        stored = _stacks(back)[name]
        assert isinstance(stored, AffineWeight)
        for part in ("packed", "scales", "biases"):
            assert torch.equal(getattr(weight, part), getattr(stored, part)), name
    ids = tiny.random_ids(12)
    assert torch.equal(tiny.our_logits(here, ids), tiny.our_logits(back, ids))


def test_each_expert_is_quantized_as_if_alone(tmp_path: Path) -> None:
    from starquill.quant.quantize import quantize
    from starquill.quant.schemes import parse_scheme

    folder = _folder(tmp_path, "qwen3_moe")
    state = load_file(folder / FILE)
    for name, weight in _stacks(load(folder, quant="q3-g32-hqq")).items():
        layer, part = re.findall(r"layers\.(\d)\.mlp\.experts\.(\w+)", name)[0]
        for e in range(6):
            single = state[f"model.layers.{layer}.mlp.experts.{e}.{part}.weight"]
            alone = quantize(single, parse_scheme("q3-g32-hqq"))
            assert torch.equal(weight[e].packed, alone.packed)
            assert torch.equal(weight[e].scales, alone.scales)


@pytest.mark.parametrize("quant", ["q4-g32", "q2-g32", "8"])
@pytest.mark.parametrize("family", MLX)
def test_mlx_lm_reads_what_is_written(tmp_path: Path, family: str, quant: str) -> None:
    from mlx_lm.utils import load_model

    more = {"hidden_size": 128, "intermediate_size": 192} if quant == "8" else {}
    if quant == "8" and family == "qwen3_moe":
        more["moe_intermediate_size"] = 64
    folder, out = _folder(tmp_path, family, **MLX[family], **more), tmp_path / "out"
    quantize_checkpoint(folder, out, QuantOptions(quant))
    model, _ = load_model(out)
    model.set_dtype(mx.float32)
    ids = tiny.random_ids(20)
    theirs = torch.from_numpy(np.array(model(mx.array([ids])).astype(mx.float32)))[0]
    torch.testing.assert_close(tiny.our_logits(load(out), ids), theirs, atol=5e-4, rtol=0)


@pytest.mark.parametrize("family", MLX)
def test_what_mlx_lm_writes_is_read(tmp_path: Path, family: str) -> None:
    """Its own conversion quantizes routers too, which is how its files are."""
    from mlx_lm.utils import load_model, quantize_model, save_model

    folder, out = _folder(tmp_path, family, **MLX[family]), tmp_path / "out"
    model, config = load_model(folder)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(out, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((folder / name).read_bytes())
    tiny.write_json(out / "config.json", config)
    model.set_dtype(mx.float32)
    ids = tiny.random_ids(20)
    theirs = torch.from_numpy(np.array(model(mx.array([ids])).astype(mx.float32)))[0]
    loaded = load(out)
    assert {w.scheme for w in _stacks(loaded).values()} == {"q4-g32"}
    torch.testing.assert_close(tiny.our_logits(loaded, ids), theirs, atol=5e-4, rtol=0)


def test_experts_quantized_one_by_one_are_stacked(tmp_path: Path) -> None:
    """As older conversions have them: MLX's triplet for every expert."""
    folder, out = _folder(tmp_path, "mixtral"), tmp_path / "out"
    quantize_checkpoint(folder, out, QuantOptions("q4-g32"))
    state = load_file(out / FILE)
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name in [n for n in state if "switch_mlp" in n]:
        whole = state.pop(name)
        for part, short in names.items():
            name = name.replace(f"switch_mlp.{part}", f"experts.N.{short}")
        state |= {name.replace(".N.", f".{e}."): whole[e].clone() for e in range(5)}
    expected = tiny.our_logits(load(out), tiny.random_ids(9))
    save_file(state, out / FILE)
    assert torch.equal(tiny.our_logits(load(out), tiny.random_ids(9)), expected)
    state["model.layers.0.block_sparse_moe.experts.2.w1.scales"] *= torch.inf
    save_file(state, out / FILE)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight has values that are not finite"):
        load(out)


def test_importance_of_each_expert_weighs_its_own_error(tmp_path: Path) -> None:
    """As an importance matrix has it, `[E, in]`; each expert comes out as it would alone."""
    from starquill.isq import IsqPlan, apply_isq
    from starquill.quant.quantize import quantize
    from starquill.quant.schemes import parse_scheme

    scheme, generator = parse_scheme("q3-g32"), torch.Generator().manual_seed(0)
    value = torch.randn(3, 8, 64, generator=generator)
    importance = torch.rand(3, 64, generator=generator) ** 4
    plan = IsqPlan({"x.weight": scheme}, importances={"x.weight": importance})
    found = apply_isq(plan, "x.weight", value)
    assert isinstance(found, AffineWeight)
    for e in range(3):
        alone = quantize(value[e], scheme, importance[e])
        assert torch.equal(found[e].packed, alone.packed)
        assert torch.equal(found[e].scales, alone.scales)
    assert not torch.equal(found.packed, quantize(value, scheme).packed)
