"""A model whose layers are in several processes: one of those, and the whole that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from starquill.adapters.adapter import (
    Adapter,
    AdapterPart,
    BaseModules,
    Problems,
    check_base_weight,
)
from starquill.adapters.banks import put, take_out
from starquill.adapters.fitting import fit
from starquill.checkpoint.memory import available_memory
from starquill.engine.loaded import LoadedModel, Stage
from starquill.errors import StarquillError
from starquill.models.spec import StepBatch
from starquill.nn.cache import KvCache
from starquill.nn.lora import AdapterMix
from starquill.nn.stages import StagedRoute, StageStep, as_array, as_tensor

SHARE_OF_FREE = 4  # caches take at most one part in this many of the free memory


def blocks_with_room(loaded: LoadedModel) -> int | None:
    """Blocks of a cache for the layers here that memory has room for; None if it is not known."""
    free = available_memory()
    if free is None:
        return None
    shape = replace(loaded.config.cache_shape(), layers=len(loaded.layers))
    return free // SHARE_OF_FREE // shape.block_bytes(loaded.dtype)


class LayerStage:
    """The layers of `loaded` that this process has, as a `Stage` of the one that has the others."""

    is_alive = True

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.layers = loaded.layers
        self._cache: KvCache | None = None
        self._key = 0
        self._mix: AdapterMix | None = None

    def most_blocks(self) -> int | None:
        return blocks_with_room(self._loaded)

    def open(self, blocks: int) -> int:
        loaded = self._loaded
        self._cache = None  # two at once may be more than there is room for
        self._cache = KvCache(
            loaded.config.cache_shape(), loaded.dtype, blocks, devices=loaded.cache_devices
        )
        self._key += 1
        return self._key

    @torch.inference_mode()
    def forward(self, step: StageStep) -> np.ndarray:
        cache = self._cache_of(step)
        for copy in step.copies:
            cache.copy(*copy)
        model, prefix = self._loaded.model, self._loaded.spec.layer_prefix
        positions = torch.from_numpy(step.positions.copy())
        batch = StepBatch(
            positions,  # layers see no ids
            positions,
            torch.from_numpy(step.tables.copy()),
            torch.from_numpy(step.spans.copy()),
            cache,
            self._same_mix(step.mix()),
        )
        x, shared = as_tensor(step.x, self._loaded.dtype), model.step(batch, self.layers.start)
        for number in self.layers:
            x = model.get_submodule(f"{prefix}{number}")(x, shared)
        return as_array(x)

    def _cache_of(self, step: StageStep) -> KvCache:
        """The cache that a step is for, if its tables can be believed: native code does."""
        if self._cache is None or step.key != self._key:
            raise StarquillError(
                "these layers serve another engine now; give it a stage of its own"
            )
        tables = step.tables
        if tables.size and not 0 <= tables.min() <= tables.max() < self._cache.blocks:
            raise IndexError(f"a table names block {tables.max()} of {self._cache.blocks}")
        return self._cache

    def _same_mix(self, mix: AdapterMix | None) -> AdapterMix | None:
        """The last one, if it says the same: what modules prepared for it is in it."""
        last = self._mix  # another thread may empty a slot meanwhile
        if mix is not None and last is not None and mix.slots == last.slots:
            mix = last if torch.equal(mix.scales, last.scales) else mix
        self._mix = mix
        return mix

    def fill(self, slot: int, parts: Mapping[str, AdapterPart]) -> None:
        base = BaseModules.of(self._loaded)
        problems = Problems(self._loaded.folder)
        for path, part in parts.items():
            check_base_weight(path, part, base, problems)
        problems.finish()
        put(base, slot, fit(Adapter("", "", parts), base))

    def empty(self, slot: int) -> None:
        take_out(self._loaded.model, slot)
        self._mix = None


def joined(loaded: LoadedModel, stages: Sequence[Stage]) -> LoadedModel:
    """`loaded`, a model's first layers and its ends, with the `stages` that have the rest."""
    ranges = [loaded.layers, *(stage.layers for stage in stages)]
    found = [number for part in ranges for number in part]
    assert found == list(range(loaded.config.num_hidden_layers)), f"layers {ranges}"
    loaded.model.route = StagedRoute(loaded.layers.stop, tuple(stages))
    return replace(loaded, stages=tuple(stages))
