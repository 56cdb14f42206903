"""`BlockPool`: who has which block of the cache, and what finished sequences left there.

Blocks form trees by the tokens they hold: a path from a root spells a sequence. A new sequence
walks down as far as its prompt agrees and takes those blocks as they are, so that nothing in them
is computed twice. Blocks that nobody uses stay until their memory is needed; the one left longest
ago goes first. (The idea is that of vLLM's prefix cache and SGLang's radix tree, arXiv 2312.07104.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from starquill.kernels.attention import BLOCK
from starquill.nn.cache import CacheShape

_LOST = 0  # the index of a block whose memory went to another


@dataclass(eq=False)
class Block:
    """Up to BLOCK consecutive tokens of a sequence, behind those of `parent`."""

    parent: Block | None
    index: int = _LOST
    ids: list[int] = field(default_factory=list)
    children: dict[int, list[Block]] = field(default_factory=dict)  # by their first token
    users: int = 0
    listed: bool = False  # whether a walk from the root finds it


@dataclass(frozen=True)
class Match:
    """What the cache holds of a prompt: whole blocks, then `extra` tokens of `partial`."""

    blocks: tuple[Block, ...] = ()
    partial: Block | None = None
    extra: int = 0

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK + self.extra


class BlockPool:
    """Blocks 1 to `count` of a cache. `window` as in `CacheShape`: it decides what is needed."""

    def __init__(self, count: int, shape: CacheShape) -> None:
        self.count = count
        self._shape = shape
        self._roots: dict[Hashable, Block] = {}
        self._fresh = list(range(count, 0, -1))
        self._used_before: set[int] = set()
        self._idle: OrderedDict[Block, None] = OrderedDict()  # nobody uses them; oldest first

    @property
    def in_use(self) -> int:
        """Blocks that sequences have now."""
        return self.count - len(self._fresh) - len(self._idle)

    @property
    def kept(self) -> int:
        """Blocks that finished sequences left."""
        return len(self._idle)

    def root(self, key: Hashable) -> Block:
        """The empty sequence; each `key` (an adapter) has its own tree."""
        return self._roots.setdefault(key, Block(None, listed=True))

    def match(self, key: Hashable, ids: Sequence[int]) -> Match:
        """The longest beginning of `ids` whose needed blocks are all there."""
        path: list[Block] = []
        node = self.root(key)
        while child := _whole_child(node, ids, len(path) * BLOCK):
            path.append(child)
            node = child
        partial, extra = _best_partial(node, ids, len(path) * BLOCK)
        if extra and self._is_there(path, len(path) * BLOCK + extra):
            return Match(tuple(path), partial, extra)
        for whole in range(len(path), 0, -1):
            if self._is_there(path[:whole], whole * BLOCK):
                return Match(tuple(path[:whole]))
        return Match()

    def _is_there(self, path: Sequence[Block], length: int) -> bool:
        first = self._shape.first_block(length)
        return all(block.index != _LOST for block in path[first:])

    def take(self, block: Block) -> None:
        """Use a block that is there."""
        assert block.index != _LOST
        self._idle.pop(block, None)
        block.users += 1

    def new(self, parent: Block) -> tuple[Block, bool]:
        """A block behind `parent`, and whether its memory holds another's values.

        There must be one: who admits sequences sees to it.
        """
        if self._fresh:
            index = self._fresh.pop()
        else:
            oldest, _ = self._idle.popitem(last=False)
            index = self._lose(oldest)
        dirty = index in self._used_before
        self._used_before.add(index)
        return Block(parent, index, users=1), dirty

    def publish(self, block: Block) -> Block:
        """Let others find `block`, which has its first tokens or is full now.

        Returns the block that its successor belongs behind: another of the same tokens, where one
        is there already.
        """
        parent = block.parent
        assert parent is not None
        siblings = parent.children.setdefault(block.ids[0], [])
        if not block.listed and parent.listed:
            block.listed = True
            siblings.append(block)
        if len(block.ids) < BLOCK or not block.listed:
            return block
        for twin in siblings:
            if twin is block or twin.ids != block.ids:
                continue
            if twin.index == _LOST:
                self._replace(twin, block)
                return block
            siblings.remove(block)
            block.listed = False
            return twin
        return block

    def _replace(self, lost: Block, block: Block) -> None:
        """`block` takes the place of one without memory, and what hangs on it."""
        assert block.parent is not None
        block.parent.children[block.ids[0]].remove(lost)
        for children in lost.children.values():
            for child in children:
                child.parent = block
                block.children.setdefault(child.ids[0], []).append(child)
        lost.listed = False

    def leave(self, block: Block, *, keep: bool = True) -> None:
        """A sequence needs `block` no more; with `keep` what is in it may serve another."""
        block.users -= 1
        if block.users:
            return
        if keep and block.listed and block.ids:
            self._idle[block] = None
        else:
            self._fresh.append(self._lose(block))

    def forget(self) -> None:
        """Drop everything that nobody uses."""
        while self._idle:
            block, _ = self._idle.popitem()
            self._fresh.append(self._lose(block))

    def _lose(self, block: Block) -> int:
        """Its memory goes elsewhere; it stays in the tree only to hold up others."""
        index, block.index = block.index, _LOST
        node: Block | None = block
        while node and node.index == _LOST and node.listed and node.parent and not _holds(node):
            node.parent.children[node.ids[0]].remove(node)
            node.listed = False
            node = node.parent
        return index


def _holds(block: Block) -> bool:
    return any(block.children.values())


def _whole_child(node: Block, ids: Sequence[int], at: int) -> Block | None:
    """The child whose BLOCK tokens are the next of `ids`."""
    if at + BLOCK > len(ids):
        return None
    wanted = list(ids[at : at + BLOCK])
    return next((c for c in node.children.get(wanted[0], ()) if c.ids == wanted), None)


def _best_partial(node: Block, ids: Sequence[int], at: int) -> tuple[Block | None, int]:
    """The child that agrees longest with the next of `ids`, and for how many tokens."""
    best, extra = None, 0
    if at < len(ids):
        for child in node.children.get(ids[at], ()):
            if child.index == _LOST:
                continue
            length = _common(child.ids, ids, at)
            if length > extra:
                best, extra = child, length
    return best, extra


def _common(ids: Sequence[int], others: Sequence[int], at: int) -> int:
    """How many of `ids` are those of `others` from `at` on."""
    most = min(len(ids), len(others) - at)
    return next((i for i in range(most) if ids[i] != others[at + i]), most)
