"""Configs of mixtures: every key is checked, and all that is wrong is told at once."""

from __future__ import annotations

from typing import Any

import pytest

from starquill.checkpoint.build import expected_tensors
from starquill.errors import CheckpointError, UnsupportedError
from starquill.models import architecture
from tests import moe

LONG: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2] * 8,
    "short_mscale": 1.1,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 16,
}


def _read(family: str, **changes: Any) -> Any:
    raw = moe.config(family, **changes)
    return architecture(raw).read_config(raw)


@pytest.mark.parametrize("family", moe.RAW)
def test_all_problems_are_told_at_once(family: str) -> None:
    count = "num_experts" if "num_experts" in moe.RAW[family] else "num_local_experts"
    with pytest.raises(CheckpointError) as caught:
        _read(family, hidden_size="a", vocab_size=..., **{count: 0}, num_attention_heads=3.5)
    for key in ("hidden_size is 'a'", "vocab_size is missing", f"{count} is 0", "heads is 3.5"):
        assert str(caught.value).count(key) == 1


@pytest.mark.parametrize(
    ("family", "changes", "facts"),
    [
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok 6 is more than the 5 of"),
        ("mixtral", {"num_local_experts": ...}, "num_local_experts is missing"),
        ("mixtral", {"num_local_experts": True}, "num_local_experts is True"),
        ("mixtral", {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ("qwen3_moe", {"num_hidden_layers": ...}, "num_hidden_layers is missing"),
        ("qwen3_moe", {"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, r"mlp_only_layers is \[-1\]"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
        ("olmoe", {"clip_qkv": -8}, "clip_qkv is -8"),
        ("phimoe", {"router_jitter_noise": "x"}, "router_jitter_noise is 'x'"),
        ("phimoe", {"lm_head_bias": "yes"}, "lm_head_bias is 'yes'"),
        ("phimoe", {"rope_scaling": {**LONG, "long_factor": [1] * 7}}, "long_factor is"),
        ("phimoe", {"rope_scaling": {**LONG, "short_factor": None}}, "short_factor is None"),
        ("phimoe", {"rope_scaling": {**LONG, "long_factor": [0] * 8}}, "8 positive numbers"),
        ("phimoe", {"rope_scaling": {**LONG, "long_factor": [10**400] * 8}}, "long_factor is"),
        ("phimoe", {"rope_scaling": {**LONG, "long_mscale": None}}, "long_mscale is missing"),
        ("starcoder2_moe", {"gate_bias": "x"}, "gate_bias is 'x'"),
    ],
)
def test_what_is_wrong_is_named(family: str, changes: dict[str, Any], facts: str) -> None:
    with pytest.raises(CheckpointError, match=facts):
        _read(family, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "facts"),
    [
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok 3"),
        ("phimoe", {"rope_scaling": {"type": "yarn", "factor": 2}}, "'yarn'.*longrope"),
        ("mixtral", {"rope_scaling": LONG}, "'longrope'"),
        ("olmoe", {"hidden_act": "swish2"}, "hidden_act 'swish2'"),
        ("starcoder2_moe", {"mlp_type": "gated"}, "mlp_type 'gated'"),
    ],
)
def test_what_is_not_implemented_is_named(family: str, changes: dict[str, Any], facts: str) -> None:
    with pytest.raises(UnsupportedError, match=facts):
        _read(family, **changes)


def test_published_configs() -> None:
    """The keys that count of Qwen3-Coder-30B-A3B and Phi-3.5-MoE, as their files have them."""
    coder = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "head_dim": 128,
        "intermediate_size": 5472,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 262144,
        "rope_theta": 10000000,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
    config: Any = architecture(coder).read_config(coder)
    assert config.dense == frozenset()
    assert (config.context_length, config.sliding_window) == (262144, None)
    shapes = expected_tensors(architecture(coder).Model(config))
    experts = {n: s for n, s in shapes.items() if ".experts." in n}
    assert len(experts) == 3 * 48
    assert sum(a * b * c for a, b, c in experts.values()) == 48 * 3 * 128 * 768 * 2048
    phi = _read("phimoe", rope_scaling={**LONG}, sliding_window=131072)
    assert phi.rope.type == "longrope"
    assert (phi.rope.short.scale, phi.rope.long.factors) == (1.1, (2.0,) * 8)
