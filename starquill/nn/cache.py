"""Key/value cache: per layer a ring of the last positions that attention may still see."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from starquill.kernels.attention import ManyTokens, OneToken, attends, store

_FIRST_CAPACITY = 256


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache. `window` is None when every earlier position stays visible."""

    layers: int
    slots: int
    kv_heads: int
    head_dim: int
    context: int
    window: int | None = None

    @property
    def ring(self) -> int:
        """Positions kept at most: a query sees itself and the `window` - 1 before it."""
        return self.context if self.window is None else min(self.context, self.window)


@dataclass(frozen=True)
class CacheStep:
    """Where the T new tokens of a step go in the ring, and what its queries may see.

    `mask` is additive, `[B, 1, T, S]`; None stands for "everything" or, with `causal`, for the
    plain triangle. When the ring would overwrite positions that the step's first queries still
    need, `read_first` has the old ring read before the new tokens are stored.
    """

    rows: Tensor | slice
    targets: Tensor  # [B, kept]: ring index of each token that stays
    kept: int
    extent: int
    read_first: bool
    mask: Tensor | None
    causal: bool
    one: OneToken | None = None  # set where the native kernel can do a step of one token
    many: ManyTokens | None = None  # the same for more


class KvCache:
    """k and v `[slots, Hk, S, Dh]` per layer. Position p lives at ring index p % ring.

    Memory grows by doubling up to the ring's size and no further, so with a sliding window it
    stops growing at the window. `lens[slot]` counts the tokens seen; only the runner changes it.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, *, shared: bool = False) -> None:
        """With `shared` the memory of one layer serves whichever runs, one after the other."""
        self.shape = replace(shape, layers=1) if shared else shape
        self._shared = shared
        self.dtype = dtype
        self.lens = torch.zeros(shape.slots, dtype=torch.int64)
        self.capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._reserve(1)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values))

    def clear(self, slot: int) -> None:
        """Empty a slot; zeros, because a masked NaN would still poison the weighted sum."""
        self.lens[slot] = 0
        for tensor in (*self._keys, *self._values):
            tensor[slot] = 0

    def _reserve(self, positions: int) -> None:
        if positions <= self.capacity:
            return
        grown = max(_FIRST_CAPACITY, 2 * self.capacity)
        while grown < positions:
            grown *= 2
        grown = min(grown, self.shape.ring)
        size = (self.shape.slots, self.shape.kv_heads, grown, self.shape.head_dim)
        for tensors in (self._keys, self._values):
            for layer in range(self.shape.layers):
                # Zeros, not empty: see `clear`.
                new = torch.zeros(size, dtype=self.dtype)
                if tensors and layer < len(tensors):
                    new[:, :, : self.capacity] = tensors[layer]
                    tensors[layer] = new
                else:
                    tensors.append(new)
        self.capacity = grown

    def plan(self, slots: Tensor, positions: Tensor) -> CacheStep:
        """Plan a step of `positions` `[B, T]` on `slots` `[B]`, growing the ring if it must.

        Positions of a row are consecutive and begin at the slot's length.
        """
        ring, new_tokens = self.shape.ring, positions.shape[1]
        ends = positions[:, -1] + 1  # [B]
        furthest = int(ends.max())
        self._reserve(min(furthest, ring))
        extent = min(furthest, ring)
        read_first = furthest > ring and new_tokens > 1
        kept = min(new_tokens, ring)
        targets = positions[:, -kept:] % ring
        rows = _rows(slots)
        native = attends(self._keys[0])
        if native and new_tokens == 1:
            one = OneToken(slots, targets[:, 0].contiguous(), ends.clamp(max=ring))
            return CacheStep(rows, targets, kept, extent, read_first, None, False, one)
        causal = furthest == new_tokens and not read_first
        seen_before = positions[:, 0] if read_first else ends
        key_positions = _ring_positions(seen_before, extent, ring)  # [B, S]
        if read_first:
            key_positions = torch.cat((key_positions, positions), dim=1)
        if native:
            many = ManyTokens(slots, targets, positions, key_positions)
            return CacheStep(rows, targets, kept, extent, read_first, None, causal, None, many)
        mask = None if causal else _visible(key_positions, positions, self.shape.window)
        return CacheStep(rows, targets, kept, extent, read_first, mask, causal)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """All of a layer's keys and values, `[slots, Hk, S, Dh]` each."""
        index = 0 if self._shared else index
        return self._keys[index], self._values[index]

    def update(
        self, layer: int, keys: Tensor, values: Tensor, step: CacheStep
    ) -> tuple[Tensor, Tensor]:
        """Store new `keys`, `values` `[B, Hk, T, Dh]`; return all that may be attended to."""
        old_keys, old_values = self.layer(layer)
        return self._update_one(old_keys, keys, step), self._update_one(old_values, values, step)

    @staticmethod
    def _update_one(cache: Tensor, new: Tensor, step: CacheStep) -> Tensor:
        ring = cache[step.rows]  # a view of [B, Hk, S, Dh], or a copy when rows are scattered
        if step.read_first:
            visible = torch.cat((ring[:, :, : step.extent], new), dim=2)
        if step.many is not None:
            store(new, cache, step.many.slots, step.many.places)
            ring = cache[step.rows]
        else:
            index = step.targets[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3])
            ring.scatter_(2, index, new[:, :, -step.kept :])
            if not isinstance(step.rows, slice):
                cache[step.rows] = ring
        return visible if step.read_first else ring[:, :, : step.extent]


def _rows(slots: Tensor) -> Tensor | slice:
    """A slice when slots are neighbours in order, so that reading the cache copies nothing."""
    first, count = int(slots[0]), slots.numel()
    if torch.equal(slots, torch.arange(first, first + count)):
        return slice(first, first + count)
    return slots


def _ring_positions(seen: Tensor, extent: int, ring: int) -> Tensor:
    """The position that each of `extent` ring entries holds after `seen` `[B]` tokens.

    The newest position p < seen with p % ring == index; negative where nothing was written.
    """
    index = torch.arange(extent)
    newest = seen[:, None] - 1
    return newest - (newest - index) % ring  # [B, S]


def _visible(key_positions: Tensor, positions: Tensor, window: int | None) -> Tensor | None:
    """Additive mask `[B, 1, T, S]` float32, or None when every key is visible to every query."""
    keys, queries = key_positions[:, None, :], positions[:, :, None]
    allowed = (keys >= 0) & (keys <= queries)
    if window is not None:
        allowed &= keys > queries - window
    if bool(allowed.all()):
        return None
    mask = torch.zeros(allowed.shape, dtype=torch.float32)
    return mask.masked_fill_(~allowed, float("-inf"))[:, None]
