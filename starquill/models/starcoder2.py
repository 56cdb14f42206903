"""StarCoder2 (arXiv 2402.19173): pre-norm, grouped-query attention, rotary, plain MLP.

Attribute names and order are those of transformers' `modeling_starcoder2`, which this file is
checked against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from starquill.errors import CheckpointError
from starquill.models.causal import CausalLM, PlainMlp
from starquill.models.config import (
    MOST_LAYERS,
    MOST_POSITIONS,
    ConfigReader,
    read_heads,
    read_rope,
)
from starquill.models.spec import ArchSpec, GgufConfig, GgufNames
from starquill.nn.activation import ACTIVATIONS
from starquill.nn.attention import AttentionStep, attend_cached
from starquill.nn.cache import CacheShape
from starquill.nn.linear import Linear
from starquill.nn.norm import LayerNorm
from starquill.nn.rope import RopeConfig, reach, turning


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
    def pools(self) -> bool:
        return False

    @property
    def context_length(self) -> int:
        return reach(self.rope, self.max_position_embeddings)

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


def _mlp(config: Starcoder2Config, _: int) -> PlainMlp:
    return PlainMlp(config)


def model(config: Starcoder2Config) -> CausalLM:
    return CausalLM(config, LayerNorm, Starcoder2Attention, _mlp)


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
    Model=model,
    layer_prefix="model.layers.",
)
