"""The cache against a plain list: what a query may see, whatever came before and in what pieces."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.kernels.attention import BLOCK
from starquill.nn.cache import CacheShape, KvCache, Place, blocks_for

pieces = st.lists(st.integers(1, 90), min_size=1, max_size=5)
windows = st.one_of(st.none(), st.integers(1, 14), st.integers(50, 200))


def _places(cache: KvCache, count: int, span: int) -> list[Place]:
    """Sequences whose blocks lie anywhere."""
    places = [Place(span) for _ in range(count)]
    blocks = list(range(1, cache.blocks))
    random.Random(count).shuffle(blocks)
    for place in places:
        for number in range(len(place.table)):
            place.table[number] = blocks.pop()
    return places


def _step(cache: KvCache, places: list[Place], tokens: int) -> list[list[set[int]]]:
    """Run one step whose keys are their positions; the positions each query sees, by row."""
    starts = torch.tensor([place.length for place in places])
    positions = starts[:, None] + torch.arange(tokens)
    tables = torch.stack([torch.from_numpy(place.table) for place in places])
    step = cache.plan(tables, positions)
    keys = positions[:, None, :, None].double().expand(-1, 1, -1, 2).contiguous()
    seen, _ = cache.update(0, keys, keys, step)
    result = []
    for row, place in enumerate(places):
        held = seen[row, 0, :, 0].tolist()
        visible = []
        for query in range(tokens):
            if step.causal:
                allowed = [True] * (query + 1) + [False] * (len(held) - query - 1)
            elif step.mask is None:
                allowed = [True] * len(held)
            else:
                allowed = (step.mask[row, 0, query] == 0).tolist()
            chosen = [p for p, ok in zip(held, allowed, strict=True) if ok]
            assert len(chosen) == len(set(chosen)), "a position is seen twice"
            visible.append({int(p) for p in chosen})
        result.append(visible)
        place.length += tokens
    return result


def _expected(start: int, tokens: int, window: int | None) -> list[set[int]]:
    return [
        set(range(0 if window is None else max(0, position - window + 1), position + 1))
        for position in range(start, start + tokens)
    ]


@given(st.lists(pieces, min_size=1, max_size=3), windows, st.integers(1, 4))
@settings(deadline=None, max_examples=100)
def test_each_query_sees_its_window(
    lengths: list[list[int]], window: int | None, tokens: int
) -> None:
    """Rows that came piece by piece to any length, then step together, each see their own."""
    span = 5 * 90 + 4
    shape = CacheShape(1, 1, 2, window)
    cache = KvCache(shape, torch.float64, len(lengths) * blocks_for(span))
    places = _places(cache, len(lengths), span)
    for place, row in zip(places, lengths, strict=True):
        for piece in row:
            start = place.length
            assert _step(cache, [place], piece) == [_expected(start, piece, window)]
            # What the window has passed may be another's by now.
            place.table[: shape.first_block(place.length)] = 0
    starts = [place.length for place in places]
    assert _step(cache, places, tokens) == [_expected(start, tokens, window) for start in starts]


@given(windows, st.integers(1, 2000), st.integers(1, 600))
def test_a_sequence_never_holds_more_blocks_than_it_was_said_to_need(
    window: int | None, span: int, chunk: int
) -> None:
    shape = CacheShape(1, 1, 2, window)
    for start in range(0, span, chunk):
        held = blocks_for(min(start + chunk, span)) - shape.first_block(start)
        assert held <= shape.most_blocks(span, chunk)


def test_memory_is_taken_when_it_is_written_to() -> None:
    """A cache for many sequences costs nothing before they come."""
    from starquill.engine.running import peak_memory_bytes

    before = peak_memory_bytes()
    cache = KvCache(CacheShape(4, 2, 128), torch.float32, 20_000)
    assert cache.nbytes > 10e9
    cache.layer(3)[0][17] = 1.0
    after = peak_memory_bytes()
    if before is None or after is None:
        pytest.skip("the system counts no memory")
    assert after - before < 100e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_copied_and_cleared_in_every_layer(dtype: torch.dtype) -> None:
    cache = KvCache(CacheShape(3, 2, 4), dtype, 3)
    for layer in range(3):
        for tensor in cache.layer(layer):
            assert tensor.dtype == dtype
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.any()
            tensor[1] = layer + 1
    cache.layer(0)[0][3] = 7
    cache.copy(1, 3, 5)
    cache.clear(1)
    for layer in range(3):
        for tensor in cache.layer(layer):
            assert not tensor[:3].any()
            assert bool((tensor[3, :, :5] == layer + 1).all())
            assert not tensor[3, :, 5:].any()
    assert cache.nbytes == 4 * 2 * 3 * 2 * BLOCK * 4 * dtype.itemsize
