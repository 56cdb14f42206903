"""What a model file offers to the rest: `ArchSpec`, and the `StepBatch` it runs on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from starquill.nn.cache import CacheShape, KvCache, Place
from starquill.nn.lora import AdapterMix
from starquill.nn.route import OneDevice, Route
from starquill.nn.router import Routes
from starquill.nn.stages import StagedRoute


class ModelConfig(Protocol):
    """The part of every architecture's config that the engine needs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_hidden_layers(self) -> int: ...

    @property
    def sliding_window(self) -> int | None: ...

    @property
    def tie_word_embeddings(self) -> bool | None:
        """None when the config does not say."""
        ...

    @property
    def context_length(self) -> int: ...

    @property
    def pools(self) -> bool:
        """Whether experts are chosen once for a sequence, by the mean over its prompt."""
        ...

    def cache_shape(self) -> CacheShape: ...

    def turning(self, span: int) -> int:
        """Sequences of which this is equal may share keys; `span` is how long one may get."""
        ...


@dataclass(frozen=True)
class StepBatch:
    """B rows of T new tokens.

    `ids`, `positions` `[B, T]`; `tables` `[B, W]` names the blocks of each row's sequence in
    `cache`; `spans` `[B]` is the length that it may reach (only dynamic rope reads it). `mix` says
    which adapters act on which row; None for the base model. `routes` `[B, layers, A]` are the
    experts of each row's sequence, where its prompt has chosen them for good.
    """

    ids: Tensor
    positions: Tensor
    tables: Tensor
    spans: Tensor
    cache: KvCache
    mix: AdapterMix | None = None
    routes: Routes | None = None

    @classmethod
    def after(
        cls, place: Place, ids: Tensor, cache: KvCache, mix: AdapterMix | None = None
    ) -> StepBatch:
        """`ids` `[1, T]`, the next of the sequence at `place`."""
        place.check_room(ids.shape[1])
        positions = torch.arange(place.length, place.length + ids.shape[1])[None]
        spans = torch.tensor([place.span])
        routes = None if place.routes is None else Routes.of_rows([place.routes])
        return cls(ids, positions, torch.from_numpy(place.table)[None], spans, cache, mix, routes)


class ModelParts(Protocol):
    """A model to be run whole (`hidden`), or a layer at a time where it does not fit at once.

    `hidden` is `embed`, then `layer(x, step(batch))` for every layer, then `finish`. A layer
    touches no layer of the cache but its own. `route` says where `hidden` finds its parts, some of
    them perhaps in another process.
    """

    route: Route | OneDevice | StagedRoute

    def embed(self, ids: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """`[B, T] -> [B, T, D]`: what enters the first layer."""
        ...

    def step(self, batch: StepBatch, layer: int = 0) -> Any:
        """What all layers on the device of `layer` share."""
        ...

    def finish(self, x: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """`[B, T, D]` from the last layer to what `logits` takes."""
        ...

    def hidden(self, batch: StepBatch) -> Tensor:
        """Final hidden states `[B, T, D]`."""
        ...

    def logits(self, hidden: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """`[..., D] -> [..., V]` float32."""
        ...


@dataclass(frozen=True)
class GgufNames:
    """How llama.cpp writes this architecture into a GGUF file.

    `modules` maps its module names to Hugging Face's, `{}` standing for the layer's number.
    `config` makes the keys of `config.json` from the file's fields and its tensors' shapes, and
    says what it had to assume.
    """

    architecture: str
    modules: Mapping[str, str]
    config: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], GgufConfig]

    def rename(self, name: str) -> str:
        """Hugging Face's name of a tensor; an unknown name stays, and is then unexpected."""
        module, _, part = name.rpartition(".")
        if match := re.fullmatch(r"blk\.(\d+)\.(.+)", module):
            ours = self.modules.get(f"blk.{{}}.{match[2]}", module).format(match[1])
        else:
            ours = self.modules.get(module, module)
        return f"{ours}.{part}"


@dataclass(frozen=True)
class GgufConfig:
    """A `config.json` made from a GGUF file's fields, and what the user should know of it."""

    raw: dict[str, Any]
    warnings: tuple[str, ...] = ()


# From a name as a regular expression to another, one after the other.
Renames = tuple[tuple[str, str], ...]


def rewritten(name: str, renames: Renames) -> str:
    for pattern, new in renames:
        name = re.sub(pattern, new, name)
    return name


@dataclass(frozen=True)
class ExpertNames:
    """How checkpoints name the parts of a mixture.

    Our name of a stack is `PATH.experts.NAME.weight`. A checkpoint may have that, or
    `PATH.experts.3.NAME.weight` for each expert, or `gate_up_proj`, which is two stacks in one:
    whatever it calls them, after `renames`. `mlx` turns our names into mlx-lm's. `modules` turns
    our paths into those that transformers' models have or had, which adapters are made for, each a
    way of its own. `count` tells how many experts a config has.
    """

    renames: Renames
    mlx: Renames
    modules: tuple[Renames, ...] = ((),)
    router: str = ".mlp.gate."
    count: Callable[[Any], int] = attrgetter("num_experts")


@dataclass(frozen=True)
class ArchSpec:
    """One architecture: how to read its config, build it and find its tensors.

    `Model` makes an `nn.Module` that is a `ModelParts`, its layers at `layer_prefix`. `rename`
    maps a checkpoint's tensor name to ours, or to None for one to ignore; `saved` maps ours to the
    name that a written folder has.
    """

    model_type: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    Model: Callable[[Any], Any]
    layer_prefix: str
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    gguf: GgufNames | None = None
    experts: ExpertNames | None = None

    def rename(self, name: str) -> str | None:
        # Buffers that old versions of transformers saved; they hold no weights.
        if name.endswith("rotary_emb.inv_freq"):
            return None
        return name if self.experts is None else rewritten(name, self.experts.renames)

    def saved(self, name: str) -> str:
        return name if self.experts is None else rewritten(name, self.experts.mlx)

    def part(self, name: str) -> str:
        """Which part of the model a tensor, by our name, belongs to."""
        if name.startswith(self.embedding):
            return "embedding"
        if name.startswith(self.head):
            return "head"
        if ".self_attn." in name:
            return "attention"
        if self.experts is not None and self.experts.router in name:
            return "router"
        if self.experts is not None and ".experts." in name:
            return "experts"
        if ".mlp." in name:
            return "mlp"
        return "norms" if "norm." in name else "other"
