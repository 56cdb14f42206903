"""The config that the mixtures of experts share, read key by key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starquill.models.config import (
    MOST_LAYERS,
    MOST_POSITIONS,
    ROPE_TYPES,
    ConfigReader,
    Heads,
    read_heads,
    read_rope,
)
from starquill.nn.activation import ACTIVATIONS
from starquill.nn.cache import CacheShape
from starquill.nn.experts import ExpertShape
from starquill.nn.rope import RopeConfig, reach, turning

MOST_EXPERTS = 2**14


@dataclass(frozen=True)
class MixtureConfig:
    """A decoder whose MLPs are mixtures, but for those of layers in `dense`.

    Of `num_experts` each token goes to `num_experts_per_tok`. `intermediate_size` is a dense
    MLP's, `expert_size` an expert's.
    """

    vocab_size: int
    heads: Heads
    intermediate_size: int
    num_hidden_layers: int
    hidden_act: str
    norm_epsilon: float
    max_position_embeddings: int
    sliding_window: int | None
    tie_word_embeddings: bool | None
    rope: RopeConfig
    num_experts: int
    num_experts_per_tok: int
    expert_size: int
    use_bias: bool = False
    normalise: bool = True
    dense: frozenset[int] = frozenset()
    gate_bias: bool = False
    head_bias: bool = False
    clip_qkv: float | None = None
    jitter: float = 0.0
    expert_rank: int | None = None
    pools: bool = False

    @property
    def hidden_size(self) -> int:
        return self.heads.hidden_size

    @property
    def context_length(self) -> int:
        return reach(self.rope, self.max_position_embeddings)

    def turning(self, span: int) -> int:
        return turning(self.rope, span)

    def cache_shape(self) -> CacheShape:
        return CacheShape(
            layers=self.num_hidden_layers,
            kv_heads=self.heads.kv_heads,
            head_dim=self.heads.head_dim,
            window=self.sliding_window,
        )

    def expert_shape(self, bias: bool = False) -> ExpertShape:
        return ExpertShape(
            self.num_experts, self.hidden_size, self.expert_size, self.hidden_act, bias
        )


@dataclass(frozen=True)
class Defaults:
    """What a family's config need not say, and the keys that families name differently."""

    expert_size: str = "intermediate_size"
    norm_epsilon: tuple[str, float] = ("rms_norm_eps", 1e-5)
    kv_heads: int | None = None
    top: int = 2
    hidden_act: str = "silu"
    rope_types: tuple[str, ...] = ROPE_TYPES


def read_mixture(
    reader: ConfigReader, defaults: Defaults, more: Callable[[], dict[str, Any]] = dict
) -> MixtureConfig:
    """Read what all mixtures have, and `more`; raises with all problems at once."""
    heads = read_heads(reader, defaults.kv_heads)
    context = reader.positive_int("max_position_embeddings", most=MOST_POSITIONS)
    # transformers 5 writes the one name where the published configs have the other.
    count = "num_experts" if reader.raw.get("num_experts") is not None else "num_local_experts"
    experts = reader.positive_int(count, most=MOST_EXPERTS)
    top = reader.positive_int("num_experts_per_tok", defaults.top, MOST_EXPERTS)
    reader.require(
        top <= experts,
        f"num_experts_per_tok {top} is more than the {experts} of {count}",
        "num_experts_per_tok",
        count,
    )
    values = {
        "use_bias": reader.boolean("attention_bias", False),
        "sliding_window": reader.positive_int("sliding_window", None, MOST_POSITIONS),
        **more(),
    }
    config = MixtureConfig(
        vocab_size=reader.positive_int("vocab_size"),
        heads=heads,
        intermediate_size=reader.positive_int("intermediate_size"),
        num_hidden_layers=reader.positive_int("num_hidden_layers", most=MOST_LAYERS),
        hidden_act=reader.choice("hidden_act", tuple(ACTIVATIONS), defaults.hidden_act),
        norm_epsilon=reader.positive_float(*defaults.norm_epsilon),
        max_position_embeddings=context,
        tie_word_embeddings=reader.optional_boolean("tie_word_embeddings"),
        rope=read_rope(reader, heads.head_dim, context, defaults.rope_types),
        num_experts=experts,
        num_experts_per_tok=top,
        expert_size=reader.positive_int(defaults.expert_size),
        **values,
    )
    reader.finish()
    return config
