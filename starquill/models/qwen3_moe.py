"""Qwen3's mixture (arXiv 2505.09388), of which Qwen3-Coder-30B-A3B is one: norms on each head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from starquill.errors import CheckpointError
from starquill.models.causal import CausalLM
from starquill.models.config import MOST_LAYERS, ConfigReader
from starquill.models.decoder import Attention, GatedMlp
from starquill.models.mixture import Defaults, MixtureConfig, read_mixture
from starquill.models.spec import ArchSpec, ExpertNames, GgufConfig, GgufNames
from starquill.nn.experts import GatedExperts, SparseMlp
from starquill.nn.linear import Linear
from starquill.nn.norm import RMSNorm
from starquill.nn.router import top_of_softmax

DEFAULTS = Defaults("moe_intermediate_size", ("rms_norm_eps", 1e-6), kv_heads=4, top=8)


def read_config(raw: Mapping[str, Any]) -> MixtureConfig:
    reader = ConfigReader(raw)

    def more() -> dict[str, Any]:
        values: dict[str, Any] = {
            "normalise": reader.boolean("norm_topk_prob", False),
            "dense": _dense_layers(reader),
        }
        # The published configs have a window that is not used.
        return values if reader.boolean("use_sliding_window", False) else values | _NO_WINDOW

    return read_mixture(reader, DEFAULTS, more)


_NO_WINDOW = {"sliding_window": None}


def _dense_layers(reader: ConfigReader) -> frozenset[int]:
    """Those that are named, and all but every `decoder_sparse_step`th."""
    layers = reader.positive_int("num_hidden_layers", most=MOST_LAYERS)
    step = reader.positive_int("decoder_sparse_step", 1)
    named = reader.whole_numbers("mlp_only_layers", MOST_LAYERS)
    return frozenset({*named, *(n for n in range(layers) if (n + 1) % step)})


def _attention(config: MixtureConfig, layer: int) -> Attention:
    width = config.heads.head_dim
    return Attention(config, layer).normed(width, width, config.norm_epsilon)


def _mlp(config: MixtureConfig, layer: int) -> nn.Module:
    if layer in config.dense:
        return GatedMlp(config)
    route = partial(top_of_softmax, top=config.num_experts_per_tok, normalise=config.normalise)
    gate = Linear(config.hidden_size, config.num_experts, bias=False)
    return SparseMlp(gate, GatedExperts(config.expert_shape()), route)


def model(config: MixtureConfig) -> CausalLM:
    return CausalLM(config, RMSNorm, _attention, _mlp)


NAMES = ExpertNames(
    renames=(
        (r"\.mlp\.switch_mlp\.", ".mlp.experts."),
        (r"\.experts\.(gate_up_proj|down_proj)$", r".experts.\1.weight"),
    ),
    mlx=((r"\.mlp\.experts\.", ".mlp.switch_mlp."),),
)

_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def _gguf_config(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> GgufConfig:
    def field(key: str) -> Any:
        return fields.get(f"qwen3moe.{key}")

    raw: dict[str, Any] = {key: field(theirs) for key, theirs in _GGUF_KEYS.items()}
    if absent := [f"qwen3moe.{_GGUF_KEYS[key]}" for key in _GGUF_KEYS if raw[key] is None]:
        raise CheckpointError(f"the file's fields lack {', '.join(absent)}")
    raw |= {"model_type": "qwen3_moe", "norm_topk_prob": True}  # as llama.cpp computes it
    raw["vocab_size"] = shapes.get("token_embd.weight", (0,))[0]
    raw["tie_word_embeddings"] = "output.weight" not in shapes
    # GGUF has no key for layers without experts; their tensors tell.
    layers = raw["num_hidden_layers"] if isinstance(raw["num_hidden_layers"], int) else 0
    dense = [n for n in range(min(layers, MOST_LAYERS)) if f"blk.{n}.ffn_gate.weight" in shapes]
    raw["mlp_only_layers"] = dense
    if field("rope.scaling.type") not in (None, "none"):
        raw["rope_scaling"] = {
            "rope_type": field("rope.scaling.type"),
            "factor": field("rope.scaling.factor"),
            "original_max_position_embeddings": field("rope.scaling.original_context_length"),
        }
    return GgufConfig(raw)


GGUF = GgufNames(
    architecture="qwen3moe",
    modules={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
        "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
        "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
        "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
        "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
        "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
        "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
        "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate",
        "blk.{}.ffn_gate_exps": "model.layers.{}.mlp.experts.gate_proj",
        "blk.{}.ffn_up_exps": "model.layers.{}.mlp.experts.up_proj",
        "blk.{}.ffn_down_exps": "model.layers.{}.mlp.experts.down_proj",
        "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
        "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
        "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
    },
    config=_gguf_config,
)

SPEC = ArchSpec(
    model_type="qwen3_moe",
    read_config=read_config,
    Model=model,
    layer_prefix="model.layers.",
    gguf=GGUF,
    experts=NAMES,
)
