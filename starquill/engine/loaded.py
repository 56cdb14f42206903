"""`LoadedModel`: a model ready to run, with all that a request needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import torch

from starquill.adapters.adapter import AwayLayers
from starquill.adapters.store import AdapterStore
from starquill.adapters.xlora import XLora
from starquill.checkpoint.tokenizer import FimTokens, Tokenizer
from starquill.engine.chat import ChatTemplate
from starquill.engine.grammar import GrammarVocabulary
from starquill.engine.healing import HealingVocabulary
from starquill.errors import UnsupportedError
from starquill.models.spec import ArchSpec, ModelConfig
from starquill.nn.stages import ForwardStage
from starquill.placement.plan import Placement
from starquill.placement.sizes import host
from starquill.types import RequantizeReport


class Watcher(Protocol):
    def forget(self) -> None:
        """Let go of all weights; from any thread."""
        ...


class Requantizing(Protocol):
    """Quantizes a model's matrices anew.

    `times` counts when weights began or ended to change: they do while it is odd. `watchers` are
    told when they begin to.
    """

    times: int
    watchers: WeakSet[Watcher]

    def __call__(self, quant: Any) -> RequantizeReport: ...


class Stage(ForwardStage, AwayLayers, Protocol):
    """Layers of a model that another process has: their weights, adapters and caches."""

    @property
    def is_alive(self) -> bool:
        """Whether it can still answer; it never waits."""
        ...

    def most_blocks(self) -> int | None:
        """Blocks of a cache that its memory has room for; None if it is not known."""
        ...

    def open(self, blocks: int) -> int:
        """Make a cache of so many blocks in place of the one before; what steps call it."""
        ...


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """What `starquill.load` returns.

    `model` is the architecture's module with every weight in place, computing in `dtype`.
    `end_ids` are the tokens that end any text. `tokenizer` is None for a checkpoint without
    one; such a model runs on token ids alone. `xlora` acts on every request. `placement` is the
    plan that it was loaded by, None where all is in the CPU's memory; `room` is how long a sequence
    may get and how many there may be at once, where that was planned for. `here` are the layers
    that were loaded, None for all; `stages` have those that come behind them.
    """

    name: str
    folder: Path
    spec: ArchSpec
    config: ModelConfig
    model: Any
    dtype: torch.dtype
    end_ids: frozenset[int]
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    warnings: tuple[str, ...] = ()
    requantizer: Requantizing | None = None
    xlora: XLora | None = None
    placement: Placement | None = None
    room: tuple[int | None, int | None] = (None, None)
    here: range | None = None
    stages: tuple[Stage, ...] = ()

    @property
    def layers(self) -> range:
        """The layers whose weights this process has."""
        return range(self.config.num_hidden_layers) if self.here is None else self.here

    @property
    def cache_devices(self) -> tuple[str, ...] | None:
        """Where the caches of the layers belong; None for the CPU."""
        if self.here is not None:
            count = self.config.num_hidden_layers
            return tuple("cpu" if number in self.here else "meta" for number in range(count))
        if self.placement is None:
            return None
        return tuple(host(layer.device) for layer in self.placement.layers)

    def requantize(self, quant: Any) -> RequantizeReport:
        """Quantize anew from the checkpoint: a scheme, recipe or `QuantOptions`; None undoes it.

        Works matrix by matrix while requests run; one that fails keeps its old weight and is in
        the report. Raises BadRequestError for a scheme that makes no sense, and UnsupportedError
        for a checkpoint that is itself quantized.
        """
        if self.requantizer is None:
            raise UnsupportedError(f"{self.name} was not loaded from a checkpoint")
        return self.requantizer(quant)

    @property
    def weights_version(self) -> int:
        """Another one while `requantize` changes weights, and after: keys and values are of one."""
        return 0 if self.requantizer is None else self.requantizer.times

    @cached_property
    def adapters(self) -> AdapterStore:
        """Adapters by alias: `load`, `unload`, `list`."""
        return AdapterStore(self, away=self.stages)

    @cached_property
    def healing(self) -> HealingVocabulary:
        """The tokens by their bytes; made at first use."""
        return HealingVocabulary(self.require_tokenizer())

    @cached_property
    def grammars(self) -> GrammarVocabulary:
        """The tokens as grammars restrict them; made at first use."""
        return GrammarVocabulary(self.require_tokenizer())

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, or UnsupportedError for a checkpoint that came without one."""
        if self.tokenizer is None:
            raise UnsupportedError(
                f"{self.folder} has no tokenizer.json, so it takes token ids only; put the "
                "model's tokenizer.json beside its weights"
            )
        return self.tokenizer

    def require_fim(self) -> FimTokens:
        """The fill-in-the-middle tokens, or UnsupportedError for a model without them."""
        fim = self.require_tokenizer().fim
        if fim is None:
            raise UnsupportedError(
                f"{self.name} has no fill-in-the-middle tokens (<fim_prefix>, <fim_suffix>, "
                "<fim_middle>); it can only complete at the end"
            )
        return fim
