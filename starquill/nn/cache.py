"""Key/value cache: blocks of positions that sequences own, share and give back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from starquill.kernels.attention import BLOCK, Paged, attends
from starquill.kernels.memory import aligned
from starquill.nn.router import Routes


@dataclass(frozen=True)
class CacheShape:
    """What one position takes. `window` is None when every earlier position stays visible."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Of one block in all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * BLOCK * self.head_dim * dtype.itemsize

    def first_block(self, position: int) -> int:
        """The first block that a token at `position` can see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // BLOCK

    def most_blocks(self, span: int, chunk: int) -> int:
        """What a sequence of `span` tokens needs at once, computed at most `chunk` at a time."""
        if self.window is None:
            return blocks_for(span)
        return min(blocks_for(span), blocks_for(self.window + chunk) + 1)


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


@dataclass(eq=False)
class Place:
    """Where one sequence's keys and values lie; only a runner changes `length`.

    `table` int64 names its blocks, 0 for those that it needs no more or does not have yet. `span`
    is the length that it may reach, which must not change while it has any. `routes`
    `[layers, A]` are its experts in every layer, where its prompt has chosen them for good.
    """

    span: int
    length: int = 0
    routes: Routes | None = None
    table: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.table = np.zeros(blocks_for(self.span), dtype=np.int64)

    def check_room(self, tokens: int) -> None:
        """Native code believes tables: IndexError where `tokens` more would go past this one."""
        if self.length + tokens > BLOCK * len(self.table):
            raise IndexError(
                f"{tokens} tokens at {self.length} go past a sequence of {self.span} at most"
            )


Copy = tuple[int, int, int]  # from a block to another, so many tokens; the rest is cleared


@dataclass(eq=False)
class Follower:
    """The same blocks in another process, for layers that are there. It calls its cache `key`.

    `copies` are those that it is not told of yet; they go with the next step.
    """

    key: int
    copies: list[Copy] = field(default_factory=list)


@dataclass(frozen=True)
class CacheStep:
    """Where the new tokens of a step go, and what its queries may see.

    Where the native kernels do not serve, blocks `[first, last)` of every row are written out, and
    `mask`, additive `[B, 1, T, S]`, covers them; None stands for "everything" or, with `causal`,
    for the plain triangle.
    """

    paged: Paged
    native: bool
    first: int = 0
    mask: Tensor | None = None
    causal: bool = False

    def row(self, row: int) -> CacheStep:
        """The step of one token for one row alone: it sees all from its first visible block on."""
        tables, start = self.paged.tables[row : row + 1], self.paged.starts[row : row + 1]
        window = self.paged.window
        first = 0 if window is None else max(0, int(start) - window + 1) // BLOCK
        keys = torch.arange(first * BLOCK, int(start) + 1, device=start.device)
        mask = _visible(keys, start[:, None], window)
        return CacheStep(Paged(tables, start, window), self.native, first, mask)


class KvCache:
    """k and v `[blocks, Hk, BLOCK, Dh]` per layer.

    Which blocks are whose says the `tables` `[B, W]` of each step: position p of a row lies in
    block `tables[row, p // BLOCK]`. Block 0 stays empty: it stands for those that no query sees any
    more. Memory is taken from the system when it is first written to.
    """

    def __init__(
        self,
        shape: CacheShape,
        dtype: torch.dtype,
        blocks: int,
        *,
        shared: bool = False,
        devices: Sequence[str] | None = None,
        followers: Sequence[Follower] = (),
    ) -> None:
        """Room for `blocks` besides the empty one.

        With `shared` the memory of one layer serves whichever runs, one after the other.
        `devices` are where the layers are; None for the CPU, and `meta` for what `followers` have.
        """
        self.shape = replace(shape, layers=1) if shared else shape
        self.dtype = dtype
        self.blocks = blocks + 1
        self.followers = followers
        self._shared = shared
        self._taken = 0
        size = (self.blocks, shape.kv_heads, BLOCK, shape.head_dim)
        places = devices or ["cpu"] * self.shape.layers
        self._keys = [_zeros(size, dtype, place) for place in places]
        self._values = [_zeros(size, dtype, place) for place in places]

    def place(self, span: int) -> Place:
        """For who shares the cache with nobody: a sequence in blocks that were never used."""
        place = Place(span)
        first = self._taken + 1
        self._taken += len(place.table)
        assert self._taken < self.blocks, "more sequences than there is room for"
        place.table[:] = np.arange(first, self._taken + 1)
        return place

    @property
    def nbytes(self) -> int:
        """When every block has been written to."""
        return self.blocks * self.shape.block_bytes(self.dtype)

    def clear(self, block: int) -> None:
        """Zeros, because what is masked out must be finite: 0 times NaN would be seen."""
        for tensor in (*self._keys, *self._values):
            tensor[block] = 0
        self._tell((0, block, 0))

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The first `tokens` of a block; the rest of `target` is cleared."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :tokens] = tensor[source, :, :tokens]
            tensor[target, :, tokens:] = 0
        self._tell((source, target, tokens))

    def _tell(self, copy: Copy) -> None:
        for follower in self.followers:
            follower.copies.append(copy)

    def plan(self, tables: Tensor, positions: Tensor, layer: int = 0) -> CacheStep:
        """Plan a step of `positions` `[B, T]`, consecutive in each row, over `tables` `[B, W]`.

        Both on the CPU; the plan is for the device of `layer`.
        """
        starts, tokens = positions[:, 0].contiguous(), positions.shape[1]
        window = self.shape.window
        paged = Paged(tables, starts, window)
        keys = self.layer(layer)[0]
        if attends(keys):
            return CacheStep(paged, native=True)
        first = self.shape.first_block(int(starts.min()))
        extent = int(starts.max()) + tokens
        causal = extent == tokens and (window is None or tokens <= window)
        mask = None if causal else _visible(torch.arange(first * BLOCK, extent), positions, window)
        if not keys.is_cpu:
            paged = Paged(tables.to(keys.device), starts.to(keys.device), window)
            mask = None if mask is None else mask.to(keys.device)
        return CacheStep(paged, False, first, mask, causal)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """All of a layer's keys and values, `[blocks, Hk, BLOCK, Dh]` each."""
        index = 0 if self._shared else index
        return self._keys[index], self._values[index]

    def update(
        self, layer: int, keys: Tensor, values: Tensor, step: CacheStep
    ) -> tuple[Tensor, Tensor]:
        """Store new `keys`, `values` `[B, Hk, T, Dh]`; return all that may be attended to.

        The latter as `[B, Hk, S, Dh]`, the positions that `step.mask` is about.
        """
        ours = self.layer(layer)
        return _update_one(ours[0], keys, step), _update_one(ours[1], values, step)


def _update_one(cache: Tensor, new: Tensor, step: CacheStep) -> Tensor:
    tables, tokens = step.paged.tables, new.shape[2]
    new_tokens = torch.arange(tokens, device=new.device)
    positions = step.paged.starts[:, None] + new_tokens  # [B, T]
    blocks = tables.gather(1, positions // BLOCK)
    cache[blocks, :, positions % BLOCK] = new.transpose(1, 2)
    extent = int(step.paged.starts.max()) + tokens
    pages = cache[tables[:, step.first : blocks_for(extent)]]  # [B, n, Hk, BLOCK, Dh]
    return pages.transpose(1, 2).flatten(2, 3)[:, :, : extent - step.first * BLOCK]


def _visible(key_positions: Tensor, positions: Tensor, window: int | None) -> Tensor | None:
    """Additive mask `[B, 1, T, S]` float32, or None when every key is visible to every query."""
    queries = positions[:, :, None]
    allowed = key_positions <= queries
    if window is not None:
        allowed &= key_positions > queries - window
    if bool(allowed.all()):
        return None
    mask = torch.zeros(allowed.shape, dtype=torch.float32, device=allowed.device)
    return mask.masked_fill_(~allowed, float("-inf"))[:, None]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros that on the CPU take no memory until they are written to, as torch's own would."""
    if device != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    count = int(np.prod(size)) * dtype.itemsize
    return torch.from_numpy(aligned(count)).view(dtype).view(size)
