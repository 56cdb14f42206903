"""The decoder that the mixtures share: pre-norm, grouped-query attention, rotary.

Attribute names and order are those of transformers' models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from starquill.models.mixture import MixtureConfig
from starquill.models.spec import StepBatch
from starquill.nn.activation import ACTIVATIONS
from starquill.nn.attention import AttentionStep, attend_cached
from starquill.nn.linear import Embedding, Linear
from starquill.nn.lora import AdapterMix
from starquill.nn.norm import LayerNorm, RMSNorm
from starquill.nn.residual import residual
from starquill.nn.rope import rope_table
from starquill.nn.route import ONE_DEVICE, OneDevice, Route

Norm = type[LayerNorm] | type[RMSNorm]
MakeAttention = Callable[[MixtureConfig, int], nn.Module]
MakeMlp = Callable[[MixtureConfig, int], nn.Module]


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
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        seen = attend_cached(self._heads(q), self._heads(k), self._heads(v), self.layer, step)
        return self.o_proj(seen, step.mix)


class GatedMlp(nn.Module):
    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, mix: AdapterMix | None) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x, mix)) * self.up_proj(x, mix), mix)


class DecoderLayer(nn.Module):
    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norms: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        x = residual(x, self.self_attn(self.input_layernorm(x), step))
        return residual(x, self.mlp(self.post_attention_layernorm(x), step.mix))


class Decoder(nn.Module):
    def __init__(
        self, config: MixtureConfig, norm: Norm, attention: MakeAttention, mlp: MakeMlp
    ) -> None:
        super().__init__()

        def new_norm() -> nn.Module:
            return norm(config.hidden_size, config.norm_epsilon)

        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(attention(config, n), mlp(config, n), (new_norm(), new_norm()))
            for n in range(config.num_hidden_layers)
        )
        self.norm = new_norm()


class CausalLM(nn.Module):
    """A decoder and its head. `attention` and `mlp` make those of a layer by its number."""

    route: Route | OneDevice = ONE_DEVICE

    def __init__(
        self, config: MixtureConfig, norm: Norm, attention: MakeAttention, mlp: MakeMlp
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, norm, attention, mlp)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.head_bias)

    def embed(self, ids: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """`[B, T] -> [B, T, D]`: what enters the first layer."""
        return self.model.embed_tokens(self.route.to_embedding(ids), mix)

    def step(self, batch: StepBatch, layer: int = 0) -> AttentionStep:
        """What all layers on the device of `layer` share; plans the cache."""
        cos, sin = rope_table(self.config.rope, batch.positions, batch.spans)
        plan = batch.cache.plan(batch.tables, batch.positions, layer)
        return AttentionStep(cos, sin, batch.cache, plan, batch.mix)

    def finish(self, x: Tensor) -> Tensor:
        """`[B, T, D]` from the last layer to what `logits` takes."""
        return self.model.norm(x)

    def hidden(self, batch: StepBatch) -> Tensor:
        """Final hidden states `[B, T, D]`; writes the cache, does not advance its lengths."""
        x = self.embed(batch.ids, batch.mix)
        x = self.route.through(self.model.layers, x, partial(self.step, batch))
        return self.finish(x)

    def logits(self, hidden: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """`[..., D] -> [..., V]` float32."""
        self.route.at_head()
        return self.lm_head(hidden, mix).float()
