"""Phi-3.5-MoE (arXiv 2404.14219): LayerNorm, two experts chosen by SparseMixer, LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starquill.models.causal import CausalLM
from starquill.models.config import ROPE_TYPES, ConfigReader
from starquill.models.decoder import Attention
from starquill.models.mixtral import MODULES_4
from starquill.models.mixtral import NAMES as MIXTRAL_NAMES
from starquill.models.mixture import Defaults, MixtureConfig, read_mixture
from starquill.models.spec import ArchSpec
from starquill.nn.experts import GatedExperts, SparseMlp
from starquill.nn.linear import Linear
from starquill.nn.norm import LayerNorm
from starquill.nn.router import sparsemixer

DEFAULTS = Defaults(kv_heads=8, rope_types=(ROPE_TYPES[0], "longrope"))


def read_config(raw: Mapping[str, Any]) -> MixtureConfig:
    reader = ConfigReader(raw)
    top, noise = reader.positive_int("num_experts_per_tok", 2), raw.get("router_jitter_noise")
    if top != 2 and "num_experts_per_tok" not in reader.wrong:
        reader.unsupported.append(f"num_experts_per_tok {top} (phimoe's router chooses 2)")

    def more() -> dict[str, Any]:
        return {
            # The name is of training; without noise it says which scores count as close.
            "jitter": 0.0 if noise == 0 else reader.positive_float("router_jitter_noise", 0.01),
            "head_bias": reader.boolean("lm_head_bias", False),
        }

    return read_mixture(reader, DEFAULTS, more)


def _mlp(config: MixtureConfig, _: int) -> SparseMlp:
    gate = Linear(config.hidden_size, config.num_experts, bias=False)
    route = partial(sparsemixer, jitter=config.jitter)
    return SparseMlp(gate, GatedExperts(config.expert_shape()), route)


def model(config: MixtureConfig) -> CausalLM:
    return CausalLM(config, LayerNorm, Attention, _mlp, head_bias=config.head_bias)


# transformers 5 calls the gate a router.
NAMES = replace(
    MIXTRAL_NAMES,
    renames=(*MIXTRAL_NAMES.renames, (r"\.mlp\.router\.", ".mlp.gate.")),
    modules=(((r"\.mlp\.gate$", ".mlp.router"),), MODULES_4),
)

SPEC = ArchSpec(
    model_type="phimoe",
    read_config=read_config,
    Model=model,
    layer_prefix="model.layers.",
    experts=NAMES,
)
