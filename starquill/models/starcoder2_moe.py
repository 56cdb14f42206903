"""StarCoder2 whose MLPs are mixtures: what AnyMoE saves, and what is trained small.

The config is StarCoder2's, with `num_local_experts`, `num_experts_per_tok`, `norm_topk_prob` (true
if it is missing), `gate_bias` (false if it is missing) and `mlp_only_layers`, whose MLPs are plain.
An expert is an MLP: `model.layers.N.mlp.experts.E.c_fc.weight`, chosen by `mlp.gate`. With
`expert_rank` all experts share one, `mlp.experts.c_fc.base`, of which expert 0 is nothing else;
to what it computes each other adds its LoRA, `mlp.experts.c_fc.a.weight` and `b.weight`.
`gate_type` is `token` (if it is missing), or `mean` for gates that choose once for a sequence, by
the mean over its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from starquill.models.causal import CausalLM, PlainMlp
from starquill.models.config import MOST_LAYERS, ConfigReader
from starquill.models.decoder import Attention
from starquill.models.mixture import Defaults, MixtureConfig, read_mixture
from starquill.models.spec import ArchSpec, ExpertNames
from starquill.nn.experts import DeltaExperts, PlainExperts, PooledMlp, SparseMlp
from starquill.nn.linear import Linear
from starquill.nn.norm import LayerNorm
from starquill.nn.router import top_of_softmax

DEFAULTS = Defaults(norm_epsilon=("norm_epsilon", 1e-5), hidden_act="gelu_pytorch_tanh")


def read_config(raw: Mapping[str, Any]) -> MixtureConfig:
    reader = ConfigReader(raw)

    def more() -> dict[str, Any]:
        reader.choice("norm_type", ("layer_norm",), "layer_norm")
        reader.choice("mlp_type", ("default",), "default")
        return {
            "use_bias": reader.boolean("use_bias", True),
            "normalise": reader.boolean("norm_topk_prob", True),
            "gate_bias": reader.boolean("gate_bias", False),
            "dense": frozenset(reader.whole_numbers("mlp_only_layers", MOST_LAYERS)),
            "expert_rank": reader.positive_int("expert_rank", None),
            "pools": reader.choice("gate_type", ("token", "mean"), "token") == "mean",
        }

    return read_mixture(reader, DEFAULTS, more)


def _mlp(config: MixtureConfig, layer: int) -> nn.Module:
    if layer in config.dense:
        return PlainMlp(config)
    route = partial(top_of_softmax, top=config.num_experts_per_tok, normalise=config.normalise)
    gate = Linear(config.hidden_size, config.num_experts, config.gate_bias)
    shape, rank = config.expert_shape(config.use_bias), config.expert_rank
    experts = PlainExperts(shape) if rank is None else DeltaExperts(shape, rank)
    mlp = SparseMlp(gate, experts, route)
    return PooledMlp(mlp, layer) if config.pools else mlp


def model(config: MixtureConfig) -> CausalLM:
    return CausalLM(config, LayerNorm, Attention, _mlp)


SPEC = ArchSpec(
    model_type="starcoder2_moe",
    read_config=read_config,
    Model=model,
    layer_prefix="model.layers.",
    experts=ExpertNames(
        renames=((r"\.mlp\.switch_mlp\.", ".mlp.experts."),),
        mlx=((r"\.mlp\.experts\.", ".mlp.switch_mlp."),),
    ),
)
