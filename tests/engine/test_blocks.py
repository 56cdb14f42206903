"""Blocks against a plain model of what a cache may hold: found, shared, lost, never mixed up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.engine.blocks import BlockPool
from starquill.engine.seat import Seat
from starquill.kernels.attention import BLOCK
from starquill.nn.cache import CacheShape


class Memory:
    """Stands in for a cache: what each place of each block holds, as far as it is known."""

    def __init__(self, blocks: int, window: int | None) -> None:
        self.shape = CacheShape(1, 1, 2, window)
        self.places: list[list[object]] = [[None] * BLOCK for _ in range(blocks + 1)]

    def clear(self, block: int) -> None:
        self.places[block] = [None] * BLOCK

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.places[target] = self.places[source][:tokens] + [None] * (BLOCK - tokens)


class World:
    """A pool and its memory, and sequences that write into it what identifies them."""

    def __init__(self, blocks: int, window: int | None = None) -> None:
        self.memory = Memory(blocks, window)
        self.pool = BlockPool(blocks, self.memory.shape)

    def seat(self, ids: list[int], key: object = None) -> Seat:
        """A sequence after its prompt `ids`, computed 100 tokens at a time."""
        seat = Seat(self.pool, self.memory, 10_000, key)  # type: ignore[arg-type]
        seat.reuse(ids)
        self.check(seat, ids, key)
        while seat.place.length < len(ids):
            self.write(seat, ids[seat.place.length :][:100], ids, key)
        return seat

    def write(self, seat: Seat, new: list[int], ids: list[int], key: object = None) -> None:
        """`new` tokens of the sequence `ids`: a place holds all that its values depend on."""
        seat.make_room(len(new))
        for i in range(len(new)):
            p = seat.place.length + i
            block = seat.place.table[p // BLOCK]
            assert block != 0
            self.memory.places[block][p % BLOCK] = (key, p, hash(tuple(ids[: p + 1])))
        seat.place.length += len(new)
        seat.record(new)
        self.check(seat, ids, key)

    def check(self, seat: Seat, ids: list[int], key: object = None) -> None:
        """What the next token sees is what a sequence with these ids must see."""
        window = self.memory.shape.window
        first = 0 if window is None else max(0, seat.place.length - window + 1)
        for p in range(first, seat.place.length):
            block = seat.place.table[p // BLOCK]
            assert block != 0
            assert self.memory.places[block][p % BLOCK] == (key, p, hash(tuple(ids[: p + 1])))


def ids_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 128, 200])
def test_a_finished_sequences_tokens_are_all_found(length: int) -> None:
    world = World(20)
    ids = ids_of(length)
    world.seat(ids).leave()
    assert world.pool.match(None, [*ids, 5, 6]).tokens == length
    assert world.pool.match(None, ids[: length // 2]).tokens == length // 2
    assert world.pool.in_use == 0
    assert world.pool.kept == -(-length // BLOCK)


def test_a_running_sequences_tokens_are_found_too() -> None:
    world = World(20)
    ids = ids_of(150)
    one = world.seat(ids)
    other = world.seat([*ids[:140], 7, 8])
    assert world.pool.in_use == 4  # two are shared, each has its own last
    world.write(one, [1, 2], [*ids, 1, 2])
    world.write(other, [3], [*ids[:140], 7, 8, 3])
    for seat in (one, other):
        seat.leave()
    assert world.pool.in_use == 0


def test_what_another_key_computed_is_not_found() -> None:
    world = World(20)
    ids = ids_of(150)
    world.seat(ids, "adapter").leave()
    assert world.pool.match(None, ids).tokens == 0
    assert world.pool.match("adapter", ids).tokens == 150
    world.seat(ids).leave()
    assert world.pool.match(None, ids).tokens == 150


def test_what_is_not_shared_is_not_found() -> None:
    world = World(20)
    seat = Seat(world.pool, world.memory, 200, shared=False)  # type: ignore[arg-type]
    world.write(seat, ids_of(100), ids_of(100))
    assert world.pool.match(None, ids_of(100)).tokens == 0
    seat.leave()
    assert (world.pool.in_use, world.pool.kept) == (0, 0)


def test_what_is_unsound_is_not_kept() -> None:
    world = World(20)
    world.seat(ids_of(100)).leave(keep=False)
    assert (world.pool.match(None, ids_of(100)).tokens, world.pool.kept) == (0, 0)


def test_the_same_text_twice_takes_its_blocks_once() -> None:
    """Computed at the same time, so neither found the other."""
    world = World(20)
    ids = ids_of(200)
    seats = [Seat(world.pool, world.memory, 300) for _ in range(2)]  # type: ignore[arg-type]
    for start in range(0, 200, 50):
        for seat in seats:
            world.write(seat, ids[start : start + 50], ids)
    for seat in seats:
        seat.leave()
    assert world.pool.in_use == 0
    assert world.pool.match(None, ids).tokens == 200
    assert world.pool.kept <= 5


def test_the_oldest_goes_first_and_a_beginning_last() -> None:
    world = World(6)
    first, second = ids_of(3 * BLOCK, 1), ids_of(3 * BLOCK, 2)
    world.seat(first).leave()
    world.seat(second).leave()
    world.seat(ids_of(BLOCK, 3)).leave()
    assert world.pool.match(None, first).tokens == 2 * BLOCK
    assert world.pool.match(None, second).tokens == 3 * BLOCK
    world.seat(ids_of(2 * BLOCK, 4)).leave()
    assert world.pool.match(None, first).tokens == 0
    assert world.pool.match(None, second).tokens == 3 * BLOCK


def test_a_window_needs_only_what_it_sees() -> None:
    """The beginning may be lost; a prompt that ends earlier is then not found."""
    world = World(6, window=BLOCK)
    ids = ids_of(6 * BLOCK)
    seat = world.seat(ids)
    assert world.pool.in_use <= 2
    seat.leave()
    world.seat(ids_of(3 * BLOCK, 9)).leave()
    assert world.pool.match(None, [*ids, 1]).tokens == 6 * BLOCK
    assert world.pool.match(None, ids[: 2 * BLOCK]).tokens == 0
    world.seat([*ids, 5]).leave()


@settings(deadline=None, max_examples=150)
@given(
    window=st.one_of(st.none(), st.integers(1, 3 * BLOCK)),
    blocks=st.integers(8, 30),
    seed=st.integers(0, 10**6),
)
def test_any_coming_and_going(window: int | None, blocks: int, seed: int) -> None:
    """Prompts that share beginnings, grow and end in any order: each sees only its own."""
    chance = random.Random(seed)
    world = World(blocks, window)
    running: list[tuple[Seat, list[int], object, int]] = []
    shape = world.memory.shape
    texts = [ids_of(2 * BLOCK, n) for n in range(2)]
    for _ in range(40):
        span = chance.randrange(1, 5 * BLOCK)
        need = shape.most_blocks(span, 101) + 1
        if sum(entry[3] for entry in running) + need <= blocks and chance.random() < 0.5:
            text = chance.choice(texts)[: chance.randrange(1, span + 1)]
            key = chance.choice([None, "adapter"])
            ids = [*text, *ids_of(chance.randrange(0, span - len(text) + 1), chance.randrange(3))]
            running.append((world.seat(ids, key), ids, key, need))
        elif running:
            seat, ids, key, _ = entry = chance.choice(running)
            if chance.random() < 0.4:
                seat.leave(keep=chance.random() < 0.9)
                running.remove(entry)
            elif shape.most_blocks(len(ids) + 2, 101) + 1 <= entry[3]:
                new = [chance.randrange(3) for _ in range(chance.randrange(1, 3))]
                ids += new
                world.write(seat, new, ids, key)
        for seat, ids, key, _ in running:
            world.check(seat, ids, key)
    for seat, *_ in running:
        seat.leave()
    assert world.pool.in_use == 0
    world.pool.forget()
    assert world.pool.kept == 0
    assert len({*world.pool._fresh}) == blocks
