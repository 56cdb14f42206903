"""Mixtures against transformers, over what their configs can say, alone and in company."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from starquill.engine.engine import Engine
from starquill.engine.fim import fill_request
from starquill.loading import load
from starquill.nn.rope import frequencies, rope_table
from starquill.quant.weight import DenseWeight
from starquill.quantizing import QuantOptions
from starquill.types import Hole, SamplingParams
from tests import moe, tiny

FAMILIES = tuple(moe.RAW)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{family} as published": (family, {}) for family in FAMILIES},
    "mixtral with a window": ("mixtral", {"sliding_window": 8}),
    "mixtral, head_dim given": ("mixtral", {"head_dim": 32}),
    "mixtral, as many KV heads": ("mixtral", {"num_key_value_heads": 4}),
    "mixtral, one expert a token": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral, tied": ("mixtral", {"tie_word_embeddings": True}),
    "qwen3, not normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3, norm_topk_prob absent": ("qwen3_moe", {"norm_topk_prob": ...}),
    "qwen3, dense layers named": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3, every second sparse": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3, window unused": ("qwen3_moe", {"sliding_window": 8}),
    "qwen3, window used": ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}),
    "qwen3, biases": ("qwen3_moe", {"attention_bias": True}),
    "qwen3, yarn": (
        "qwen3_moe",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "olmoe, normalised": ("olmoe", {"norm_topk_prob": True}),
    "olmoe, not clipped": ("olmoe", {"clip_qkv": None}),
    "olmoe, KV heads absent": ("olmoe", {"num_key_value_heads": ...}),
    "phimoe, no biases": ("phimoe", {"attention_bias": False, "lm_head_bias": False}),
    "phimoe, jitter of its default": ("phimoe", {"router_jitter_noise": ...}),
    "phimoe with a window": ("phimoe", {"sliding_window": 8}),
    "starcoder2, gate with bias": ("starcoder2_moe", {"gate_bias": True}),
    "starcoder2, not normalised": ("starcoder2_moe", {"norm_topk_prob": False}),
    "starcoder2, no biases": ("starcoder2_moe", {"use_bias": False}),
    "starcoder2, a dense layer": ("starcoder2_moe", {"mlp_only_layers": [0]}),
    "starcoder2, SiLU": ("starcoder2_moe", {"hidden_act": "silu"}),
}


@pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, name: str, fused: bool) -> None:
    family, changes = VARIANTS[name]
    raw, ids = moe.config(family, **changes), tiny.random_ids(40)
    model = moe.reference(raw)
    loaded = load(moe.write(tmp_path, raw, model, fused))
    ours = tiny.our_logits(loaded, ids)
    torch.testing.assert_close(ours, moe.logits(model, ids), atol=1e-4, rtol=0)
    for chunk in (1, 5, 13):
        torch.testing.assert_close(tiny.our_logits(loaded, ids, chunk), ours, atol=3e-5, rtol=0)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "phimoe"])  # which chooses two
def test_all_experts_for_each_token(tmp_path: Path, family: str) -> None:
    raw = moe.config(family)
    raw["num_experts_per_tok"] = raw.get("num_experts") or raw["num_local_experts"]
    model, ids = moe.reference(raw), tiny.random_ids(20)
    ours = tiny.our_logits(load(moe.write(tmp_path, raw, model)), ids)
    torch.testing.assert_close(ours, moe.logits(model, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quant", [None, "4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_same_in_any_company(
    tmp_path: Path, family: str, quant: str | None, dtype: str
) -> None:
    """To the bit: with 1, 3 and 7 others, of which each has its own experts."""
    raw = moe.config(family)
    model = moe.reference(raw).to(getattr(torch, dtype))
    loaded = load(moe.write(tmp_path, raw, model), quant=quant)  # bfloat16 stays as it is stored
    texts = [tiny.random_ids(n + 3, seed=n) for n in range(7)]
    alone = [moe.decoded(loaded, [ids])[0] for ids in texts]
    for count in (2, 4, 7):
        for ours, theirs in zip(moe.decoded(loaded, texts[:count]), alone, strict=False):
            assert torch.equal(ours, theirs)
    backwards = moe.decoded(loaded, texts[::-1])[::-1]
    assert all(map(torch.equal, backwards, alone))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_with_favourites(tmp_path: Path, family: str) -> None:
    """A router of one direction: it takes the first experts or the last, seldom others."""
    raw, ids = moe.config(family), tiny.random_ids(20)
    model = moe.reference(raw)
    gates = [m for n, m in model.named_modules() if n.endswith((".gate", ".router"))]
    with torch.no_grad():
        for gate in gates:
            slopes = 1.37 ** -torch.arange(gate.weight.shape[0])[:, None]
            gate.weight.copy_(slopes * gate.weight[:1])
    used = load(moe.write(tmp_path / "a", raw, model))
    expected = moe.logits(model, ids)
    torch.testing.assert_close(tiny.our_logits(used, ids), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(
        moe.decoded(used, [ids[:9], ids])[1], expected[-1], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_quantized_equals_the_dequantized_model(tmp_path: Path, family: str) -> None:
    raw, ids = moe.config(family), tiny.random_ids(20)
    model = moe.reference(raw)
    loaded = load(moe.write(tmp_path, raw, model), quant="q4-g32", exact=True)
    stacks = {
        name: module.weight
        for name, module in loaded.model.named_modules()
        if ".experts." in name and hasattr(module, "weight")
    }
    assert {w.scheme for w in stacks.values()} == {"q4-g32"}
    ours = tiny.our_logits(loaded, ids)
    for module in loaded.model.modules():
        if hasattr(getattr(module, "weight", None), "packed"):
            module.weight = _dense(module.weight)
    torch.testing.assert_close(ours, tiny.our_logits(loaded, ids), atol=1e-4, rtol=0)


def _dense(weight: Any) -> Any:
    return DenseWeight(weight.dequantize())


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.9 * i for i in range(8)],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 24,
}


@pytest.mark.parametrize("length", [20, 24, 40])
@pytest.mark.parametrize("top_level", [False, True])
def test_longrope_equals_transformers(tmp_path: Path, length: int, top_level: bool) -> None:
    """Within the trained length and past it, where transformers 5 forgets the long factors."""
    scaling = dict(LONGROPE)
    raw = moe.config("phimoe", rope_scaling=scaling)
    model, ids = moe.reference(raw), tiny.random_ids(length)
    rotary = model.model.rotary_emb
    original = rotary.rope_init_fn
    if length > 24:
        rotary.rope_init_fn = lambda made, *_, **__: original(made, seq_len=length)
    written = {**scaling, "type": "longrope"}
    del written["rope_type"]
    changes: dict[str, Any] = {"rope_scaling": written}
    if top_level:  # where the published config has it too
        changes["original_max_position_embeddings"] = written.pop(
            "original_max_position_embeddings"
        )
    loaded = load(moe.write(tmp_path, raw, model, **changes))
    ours = tiny.our_logits(loaded, ids)
    torch.testing.assert_close(ours, moe.logits(model, ids), atol=1e-4, rtol=0)
    for chunk in (1, 7):
        torch.testing.assert_close(tiny.our_logits(loaded, ids, chunk), ours, atol=3e-5, rtol=0)


def test_longrope_of_rows_with_their_own_spans(tmp_path: Path) -> None:
    raw = moe.config("phimoe", rope_scaling=LONGROPE)
    rope = load(moe.write(tmp_path, raw, moe.reference(raw))).config.rope
    positions = torch.tensor([[5], [5]])
    cos, _ = rope_table(rope, positions, torch.tensor([24, 25]))
    for row, span, scale in ((0, 24, 1.1), (1, 25, 1.3)):
        expected = torch.cos(5 * frequencies(rope, span)) * scale
        torch.testing.assert_close(cos[row, 0, 0, :8], expected, atol=1e-6, rtol=0)


def test_qwen_fills_with_its_own_tokens(tmp_path: Path) -> None:
    special = ("<|endoftext|>", *(f"<|fim_{n}|>" for n in ("prefix", "middle", "suffix", "pad")))
    raw = moe.config("qwen3_moe")
    folder = moe.write(tmp_path, raw, moe.reference(raw))
    tiny.write_json(folder / "tokenizer.json", tiny.byte_tokenizer(special))
    loaded = load(folder)
    request, _ = fill_request(loaded, Hole("a", "b"), SamplingParams(max_tokens=4))
    encode = loaded.require_tokenizer().encode
    assert request.prompt_ids == (1, *encode("a"), 3, *encode("b"), 2)
    assert request.stop_ids == frozenset({1, 2, 3, 4})
    stopped = tiny.scripted(loaded, [*encode("x"), 3, *encode("y")], len(request.prompt_ids))
    assert "".join(d.text for d in Engine(stopped).generate(request)) == "x"


def test_a_mixture_is_requantized_while_it_is_loaded(tmp_path: Path) -> None:
    raw, ids = moe.config("starcoder2_moe"), tiny.random_ids(9)
    folder = moe.write(tmp_path, raw, moe.reference(raw))
    loaded = load(folder, exact=True)
    dense = tiny.our_logits(loaded, ids)
    report = loaded.requantize("q4-g32")
    assert report.kept == {}
    quantized = load(folder, quant="q4-g32", exact=True)
    assert torch.equal(tiny.our_logits(loaded, ids), tiny.our_logits(quantized, ids))
    loaded.requantize(None)
    assert torch.equal(tiny.our_logits(loaded, ids), dense)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_can_be_calibrated(tmp_path: Path, family: str) -> None:
    """Attention gains by it, and experts that saw enough tokens."""
    raw = moe.config(family)
    folder = moe.write(tmp_path / "m", raw, moe.reference(raw))
    (tmp_path / "text.py").write_text("def f(x):\n    return x\n" * 20)
    options = QuantOptions("q3-g32", calibrate=tmp_path / "text.py")
    calibrated, plain = load(folder, quant=options), load(folder, quant="q3-g32")
    same = {
        name: torch.equal(module.weight.packed, plain.model.get_submodule(name).weight.packed)
        for name, module in calibrated.model.named_modules()
        if hasattr(getattr(module, "weight", None), "packed")
    }
    assert not same["model.layers.1.self_attn.q_proj"]
    assert not all(equal for name, equal in same.items() if ".experts." in name)
