"""What the mixtures share inside a layer: grouped-query attention, and a gated MLP.

Attribute names and order are those of transformers' models.
"""

from __future__ import annotations

from torch import Tensor, nn

from starquill.models.mixture import MixtureConfig
from starquill.nn.activation import gated
from starquill.nn.attention import AttentionStep, attend_cached
from starquill.nn.linear import Linear
from starquill.nn.lora import AdapterMix
from starquill.nn.norm import RMSNorm


class Attention(nn.Module):
    """With `q_norm` and `k_norm` where a family has them, over a head or the whole width."""

    def __init__(self, config: MixtureConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.clip = config.clip_qkv
        heads = config.heads
        self.head_dim = heads.head_dim
        q_size, kv_size = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        self.q_proj = Linear(heads.hidden_size, q_size, config.use_bias)
        self.k_proj = Linear(heads.hidden_size, kv_size, config.use_bias)
        self.v_proj = Linear(heads.hidden_size, kv_size, config.use_bias)
        self.o_proj = Linear(q_size, heads.hidden_size, config.use_bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None

    def normed(self, q_width: int, k_width: int, eps: float) -> Attention:
        """This, with norms of queries and keys."""
        self.q_norm, self.k_norm = RMSNorm(q_width, eps), RMSNorm(k_width, eps)
        return self

    def _heads(self, x: Tensor) -> Tensor:
        if self.clip is not None:
            x = x.clamp(-self.clip, self.clip)
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)  # [B, H, T, Dh]

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x, step.mix) for project in projections)
        q = q if self.q_norm is None else self.q_norm(q, step.mix)
        k = k if self.k_norm is None else self.k_norm(k, step.mix)
        seen = attend_cached(self._heads(q), self._heads(k), self._heads(v), self.layer, step)
        return self.o_proj(seen, step.mix)


class GatedMlp(nn.Module):
    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_name = config.hidden_act

    def forward(self, x: Tensor, mix: AdapterMix | None) -> Tensor:
        gate, up = self.gate_proj(x, mix), self.up_proj(x, mix)
        return self.down_proj(gated(gate, up, self.act_name), mix)
