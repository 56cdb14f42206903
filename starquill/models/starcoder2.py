"""StarCoder2 (arXiv 2402.19173): pre-norm, grouped-query attention, rotary, plain MLP.

Attribute names and order are those of transformers' `modeling_starcoder2`, which this file is
checked against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from starquill.errors import CheckpointError
from starquill.models.config import (
    MOST_LAYERS,
    MOST_POSITIONS,
    ConfigReader,
    read_heads,
    read_rope,
)
from starquill.models.spec import ArchSpec, GgufConfig, GgufNames, StepBatch
from starquill.nn.activation import ACTIVATIONS
from starquill.nn.attention import AttentionStep, attend_cached
from starquill.nn.cache import CacheShape
from starquill.nn.linear import Embedding, Linear
from starquill.nn.lora import AdapterMix
from starquill.nn.norm import LayerNorm
from starquill.nn.residual import residual
from starquill.nn.rope import RopeConfig, rope_table, turning
from starquill.nn.route import ONE_DEVICE, OneDevice, Route


@dataclass(frozen=True)
class Starcoder2Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    norm_epsilon: float
    use_bias: bool
    max_position_embeddings: int
    sliding_window: int | None
    tie_word_embeddings: bool | None
    rope: RopeConfig

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Starcoder2Config:
        """Read `config.json`; what it does not say is what the published models have."""
        reader = ConfigReader(raw)
        shape = read_heads(reader)
        reader.choice("norm_type", ("layer_norm",), "layer_norm")
        reader.choice("mlp_type", ("default",), "default")
        context = reader.positive_int("max_position_embeddings", most=MOST_POSITIONS)
        config = cls(
            vocab_size=reader.positive_int("vocab_size"),
            hidden_size=shape.hidden_size,
            intermediate_size=reader.positive_int("intermediate_size"),
            num_hidden_layers=reader.positive_int("num_hidden_layers", most=MOST_LAYERS),
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            hidden_act=reader.choice("hidden_act", tuple(ACTIVATIONS)),
            norm_epsilon=reader.positive_float("norm_epsilon", 1e-5),
            use_bias=reader.boolean("use_bias", True),
            max_position_embeddings=context,
            sliding_window=reader.positive_int("sliding_window", None, MOST_POSITIONS),
            tie_word_embeddings=reader.optional_boolean("tie_word_embeddings"),
            rope=read_rope(reader, shape.head_dim, context),
        )
        reader.finish()
        return config

    @property
    def context_length(self) -> int:
        """Dynamic rope goes past the trained length by its factor; other types include it."""
        if self.rope.type == "dynamic":
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    def turning(self, span: int) -> int:
        return turning(self.rope, span)

    def cache_shape(self) -> CacheShape:
        return CacheShape(
            layers=self.num_hidden_layers,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            window=self.sliding_window,
        )


class Starcoder2Attention(nn.Module):
    def __init__(self, config: Starcoder2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, config.use_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, config.use_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, config.use_bias)
        self.o_proj = Linear(q_size, config.hidden_size, config.use_bias)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)  # [B, H, T, Dh]

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self._heads(project(x, step.mix)) for project in projections)
        return self.o_proj(attend_cached(q, k, v, self.layer, step), step.mix)


class Starcoder2MLP(nn.Module):
    def __init__(self, config: Starcoder2Config) -> None:
        super().__init__()
        self.c_fc = Linear(config.hidden_size, config.intermediate_size, config.use_bias)
        self.c_proj = Linear(config.intermediate_size, config.hidden_size, config.use_bias)
        self.act = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor, mix: AdapterMix | None) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x, mix)), mix)


class Starcoder2DecoderLayer(nn.Module):
    def __init__(self, config: Starcoder2Config, layer: int) -> None:
        super().__init__()
        self.self_attn = Starcoder2Attention(config, layer)
        self.mlp = Starcoder2MLP(config)
        self.input_layernorm = LayerNorm(config.hidden_size, config.norm_epsilon)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.norm_epsilon)

    def forward(self, x: Tensor, step: AttentionStep) -> Tensor:
        x = residual(x, self.self_attn(self.input_layernorm(x), step))
        return residual(x, self.mlp(self.post_attention_layernorm(x), step.mix))


class Starcoder2Model(nn.Module):
    def __init__(self, config: Starcoder2Config) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Starcoder2DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = LayerNorm(config.hidden_size, config.norm_epsilon)


class Starcoder2ForCausalLM(nn.Module):
    route: Route | OneDevice = ONE_DEVICE

    def __init__(self, config: Starcoder2Config) -> None:
        super().__init__()
        self.config = config
        self.model = Starcoder2Model(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

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


# hidden_size of the three published models, which all have this window. GGUF has no key for it.
_PUBLISHED_WIDTHS, _PUBLISHED_WINDOW = (3072, 4608, 6144), 4096
_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
}


def _gguf_config(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> GgufConfig:
    raw: dict[str, Any] = {
        key: fields.get(f"starcoder2.{theirs}") for key, theirs in _GGUF_KEYS.items()
    }
    if absent := [f"starcoder2.{_GGUF_KEYS[key]}" for key in _GGUF_KEYS if raw[key] is None]:
        raise CheckpointError(f"the file's fields lack {', '.join(absent)}")
    raw["model_type"] = "starcoder2"
    raw["hidden_act"] = "gelu_pytorch_tanh"
    raw["use_bias"] = "blk.0.attn_q.bias" in shapes
    raw["vocab_size"] = shapes.get("token_embd.weight", (0,))[0]
    if "output.weight" in shapes:
        raw["tie_word_embeddings"] = False
    if raw["hidden_size"] in _PUBLISHED_WIDTHS:
        raw["sliding_window"] = _PUBLISHED_WINDOW
        assumed = f"the published model's sliding window of {_PUBLISHED_WINDOW} is used"
    else:
        assumed = "none of the published models has this width, so no sliding window is used"
    return GgufConfig(raw, (f"GGUF has no key for StarCoder2's sliding window: {assumed}",))


GGUF = GgufNames(
    architecture="starcoder2",
    modules={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
        "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
        "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
        "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
        "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
        "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
        "blk.{}.ffn_up": "model.layers.{}.mlp.c_fc",
        "blk.{}.ffn_down": "model.layers.{}.mlp.c_proj",
    },
    config=_gguf_config,
)

SPEC = ArchSpec(
    model_type="starcoder2",
    gguf=GGUF,
    read_config=Starcoder2Config.read,
    Model=Starcoder2ForCausalLM,
    layer_prefix="model.layers.",
)
