"""The frame of every model: pre-norm layers between an embedding and a head.

Attribute names and order are those of transformers' models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor, nn

from starquill.models.spec import ModelConfig, StepBatch
from starquill.nn.activation import ACTIVATIONS
from starquill.nn.attention import AttentionStep
from starquill.nn.experts import PooledMlp
from starquill.nn.linear import Embedding, Linear
from starquill.nn.lora import AdapterMix
from starquill.nn.norm import LayerNorm, RMSNorm
from starquill.nn.residual import residual
from starquill.nn.rope import RopeConfig, rope_table
from starquill.nn.route import ONE_DEVICE, Half, OneDevice, Route
from starquill.nn.stages import StagedRoute

Norm = type[LayerNorm] | type[RMSNorm]


class CausalConfig(ModelConfig, Protocol):
    """The part of every architecture's config that its frame needs."""

    @property
    def norm_epsilon(self) -> float: ...

    @property
    def rope(self) -> RopeConfig: ...


class MlpConfig(Protocol):
    @property
    def hidden_size(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def use_bias(self) -> bool: ...

    @property
    def hidden_act(self) -> str: ...


C = TypeVar("C", bound=CausalConfig)
T = TypeVar("T")
Make = Callable[[C, int], nn.Module]  # a layer's attention or MLP, by its number


class PlainMlp(nn.Module):
    """StarCoder2's."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.hidden_size, config.intermediate_size, config.use_bias)
        self.c_proj = Linear(config.intermediate_size, config.hidden_size, config.use_bias)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, mix: AdapterMix | None) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x, mix)), mix)


class DecoderLayer(nn.Module):
    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norms: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        return self.feed(self.attend(x, step), step)

    def attend(self, x: Tensor, step: AttentionStep) -> Tensor:
        """The first half: past attention."""
        return residual(x, self.self_attn(self.input_layernorm(x, step.mix), step))

    def feed(self, x: Tensor, step: AttentionStep) -> Tensor:
        """The second half: past the MLP."""
        given = self.post_attention_layernorm(x, step.mix)
        if isinstance(self.mlp, PooledMlp):
            return residual(x, self.mlp(given, step.mix, step.routes))
        return residual(x, self.mlp(given, step.mix))


class Decoder(nn.Module):
    def __init__(self, config: C, norm: Norm, attention: Make[C], mlp: Make[C]) -> None:
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

    route: Route | OneDevice | StagedRoute = ONE_DEVICE

    def __init__(
        self, config: C, norm: Norm, attention: Make[C], mlp: Make[C], *, head_bias: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, norm, attention, mlp)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, head_bias)

    def embed(self, ids: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """`[B, T] -> [B, T, D]`: what enters the first layer."""
        return self.model.embed_tokens(self.route.to_embedding(ids), mix)

    def step(self, batch: StepBatch, layer: int = 0) -> AttentionStep:
        """What all layers on the device of `layer` share; plans the cache."""
        cos, sin = rope_table(self.config.rope, batch.positions, batch.spans)
        plan = batch.cache.plan(batch.tables, batch.positions, layer)
        return AttentionStep(cos, sin, batch.cache, plan, batch.mix, batch.routes)

    def layer(self, number: int, half: Half[T], x: Tensor, batch: StepBatch) -> T:
        """A part of one layer alone, on that layer's device, as `DecoderLayer.attend`."""
        assert not isinstance(self.route, StagedRoute), "loading refuses stages of such a model"
        return self.route.one(number, half, x, partial(self.step, batch))

    def finish(self, x: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """`[B, T, D]` from the last layer to what `logits` takes."""
        return self.model.norm(x, mix)

    def hidden(self, batch: StepBatch) -> Tensor:
        """Final hidden states `[B, T, D]`; writes the cache, does not advance its lengths."""
        x = self.embed(batch.ids, batch.mix)
        x = self.route.through(self.model.layers, x, partial(self.step, batch))
        return self.finish(self.route.beyond(x, batch), batch.mix)

    def logits(self, hidden: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """`[..., D] -> [..., V]` float32."""
        self.route.at_head()
        return self.lm_head(hidden, mix).float()
