"""OLMoE (arXiv 2409.02060): queries and keys are normalised over the whole width and clipped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from starquill.models.causal import CausalLM
from starquill.models.config import ConfigReader
from starquill.models.decoder import Attention
from starquill.models.mixture import Defaults, MixtureConfig, read_mixture
from starquill.models.qwen3_moe import NAMES
from starquill.models.spec import ArchSpec
from starquill.nn.experts import GatedExperts, SparseMlp
from starquill.nn.linear import Linear
from starquill.nn.norm import RMSNorm
from starquill.nn.router import top_of_softmax


def read_config(raw: Mapping[str, Any]) -> MixtureConfig:
    reader = ConfigReader(raw)

    def more() -> dict[str, Any]:
        return {
            "normalise": reader.boolean("norm_topk_prob", False),
            "clip_qkv": reader.positive_float("clip_qkv", None),
            "sliding_window": None,
        }

    return read_mixture(reader, Defaults(kv_heads=0, top=8), more)


def _attention(config: MixtureConfig, layer: int) -> Attention:
    heads = config.heads
    q_width, k_width = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    return Attention(config, layer).normed(q_width, k_width, config.norm_epsilon)


def _mlp(config: MixtureConfig, _: int) -> SparseMlp:
    route = partial(top_of_softmax, top=config.num_experts_per_tok, normalise=config.normalise)
    gate = Linear(config.hidden_size, config.num_experts, bias=False)
    return SparseMlp(gate, GatedExperts(config.expert_shape()), route)


def model(config: MixtureConfig) -> CausalLM:
    return CausalLM(config, RMSNorm, _attention, _mlp)


SPEC = ArchSpec(
    model_type="olmoe",
    read_config=read_config,
    Model=model,
    layer_prefix="model.layers.",
    experts=NAMES,
)
