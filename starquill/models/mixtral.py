"""Mixtral (arXiv 2401.04088): every MLP a mixture, weights from a softmax over the chosen."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from starquill.models.causal import CausalLM
from starquill.models.config import ConfigReader
from starquill.models.decoder import Attention
from starquill.models.mixture import Defaults, MixtureConfig, read_mixture
from starquill.models.spec import ArchSpec, ExpertNames
from starquill.nn.experts import GatedExperts, SparseMlp
from starquill.nn.linear import Linear
from starquill.nn.norm import RMSNorm
from starquill.nn.router import top_of_softmax


def read_config(raw: Mapping[str, Any]) -> MixtureConfig:
    return read_mixture(ConfigReader(raw), Defaults(kv_heads=8))


def _mlp(config: MixtureConfig, _: int) -> SparseMlp:
    # A softmax over all that is then made to sum to 1 is one over the chosen.
    route = partial(top_of_softmax, top=config.num_experts_per_tok, normalise=True)
    gate = Linear(config.hidden_size, config.num_experts, bias=False)
    return SparseMlp(gate, GatedExperts(config.expert_shape()), route)


def model(config: MixtureConfig) -> CausalLM:
    return CausalLM(config, RMSNorm, Attention, _mlp)


# transformers 4 had the published files' names.
MODULES_4 = (
    (r"\.mlp\.", ".block_sparse_moe."),
    (r"(\.experts\.\d+)\.gate_proj$", r"\1.w1"),
    (r"(\.experts\.\d+)\.up_proj$", r"\1.w3"),
    (r"(\.experts\.\d+)\.down_proj$", r"\1.w2"),
)
# The published files have w1, w3 and w2 below block_sparse_moe; transformers 5 can write others.
NAMES = ExpertNames(
    renames=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.(switch_mlp|experts)\.(\d+\.)?w1\.", r".\1.\2gate_proj."),
        (r"\.(switch_mlp|experts)\.(\d+\.)?w3\.", r".\1.\2up_proj."),
        (r"\.(switch_mlp|experts)\.(\d+\.)?w2\.", r".\1.\2down_proj."),
        (r"\.mlp\.switch_mlp\.", ".mlp.experts."),
        (r"\.experts\.(gate_up_proj|down_proj)$", r".experts.\1.weight"),
    ),
    mlx=(
        (r"\.mlp\.experts\.", ".block_sparse_moe.switch_mlp."),
        (r"\.mlp\.gate\.", ".block_sparse_moe.gate."),
    ),
    modules=((), MODULES_4),
)

SPEC = ArchSpec(
    model_type="mixtral",
    read_config=read_config,
    Model=model,
    layer_prefix="model.layers.",
    experts=NAMES,
)
