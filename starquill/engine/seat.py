"""`Seat`: one sequence's blocks while it runs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from starquill.engine.blocks import Block, BlockPool
from starquill.kernels.attention import BLOCK
from starquill.nn.cache import KvCache, Place


class Seat:
    """Gets blocks for a sequence as it grows, and lets others find what is in them.

    `key` says whose keys and values they are: an adapter's are of no use to another. What is not
    `shared` nobody finds.
    """

    def __init__(
        self,
        pool: BlockPool,
        cache: KvCache,
        span: int,
        key: Hashable = None,
        *,
        shared: bool = True,
    ) -> None:
        self.place = Place(span)
        self._pool = pool
        self._cache = cache
        self._key = key
        self._shared = shared
        self._blocks: dict[int, Block] = {}  # by their number in the sequence
        self._behind = pool.root(key)  # what the next block comes behind

    def reuse(self, ids: Sequence[int]) -> int:
        """Take over what the cache holds of `ids`; how many tokens that is."""
        found = self._pool.match(self._key, ids)
        first = self._cache.shape.first_block(found.tokens)
        for number, block in enumerate(found.blocks):
            if number >= first:
                self._pool.take(block)
                self._hold(number, block)
            self._behind = block
        if found.partial is not None:
            # Its owner may go on writing behind the tokens that agree: a copy is made.
            self._pool.take(found.partial)
            block, _ = self._pool.new(self._behind)
            self._cache.copy(found.partial.index, block.index, found.extra)
            self._pool.leave(found.partial)
            block.ids += found.partial.ids[: found.extra]
            self._hold(len(found.blocks), block)
        self.place.length = found.tokens
        return found.tokens

    def make_room(self, tokens: int) -> None:
        """Have blocks for `tokens` more."""
        end = self.place.length + tokens
        for number in range(self.place.length // BLOCK, -(-end // BLOCK)):
            if number in self._blocks:
                continue
            block, dirty = self._pool.new(self._behind)
            if dirty:
                self._cache.clear(block.index)
            self._hold(number, block)

    def record(self, ids: Sequence[int]) -> None:
        """The last tokens, up to the place's length, were `ids`: others may use them now."""
        start = self.place.length - len(ids)
        while ids:
            block = self._blocks[start // BLOCK]
            if not block.ids:
                block.parent = self._behind
            count = BLOCK - len(block.ids)
            block.ids += ids[:count]
            following = self._pool.publish(block) if self._shared else block
            if len(block.ids) == BLOCK:
                self._behind = following
            start, ids = start + count, ids[count:]
        self._drop()

    def leave(self, *, keep: bool = True) -> None:
        """Give all blocks back, the beginning to be kept longest; not `keep` what is unsound."""
        for number in sorted(self._blocks, reverse=True):
            self._pool.leave(self._blocks.pop(number), keep=keep)

    def _hold(self, number: int, block: Block) -> None:
        self.place.table[number] = block.index
        self._blocks[number] = block

    def _drop(self) -> None:
        """Leave blocks that the window has passed."""
        first = self._cache.shape.first_block(self.place.length)
        for number in [number for number in self._blocks if number < first]:
            self._pool.leave(self._blocks.pop(number))
            self.place.table[number] = 0
