"""The ring against a plain list: what a query may see, whatever came before and in what pieces."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.nn.cache import CacheShape, KvCache

pieces = st.lists(st.integers(1, 12), min_size=1, max_size=8)
windows = st.one_of(st.none(), st.integers(1, 14))


def _step(cache: KvCache, slots: list[int], tokens: int) -> list[list[set[int]]]:
    """Run one step whose keys are their positions; the positions each query sees, by row."""
    rows = torch.tensor(slots)
    positions = cache.lens[rows][:, None] + torch.arange(tokens)
    step = cache.plan(rows, positions)
    keys = positions[:, None, :, None].double().expand(-1, 1, -1, 2).contiguous()
    seen, _ = cache.update(0, keys, keys, step)
    cache.lens[rows] += tokens
    result = []
    for row in range(len(slots)):
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
    return result


def _expected(start: int, tokens: int, window: int | None) -> list[set[int]]:
    return [
        set(range(0 if window is None else max(0, position - window + 1), position + 1))
        for position in range(start, start + tokens)
    ]


@given(pieces, windows)
@settings(deadline=None, max_examples=200)
def test_each_query_sees_its_window(lengths: list[int], window: int | None) -> None:
    cache = KvCache(CacheShape(1, 1, 1, 2, 100, window), torch.float64)
    for tokens in lengths:
        start = int(cache.lens[0])
        if start + tokens > 100:
            break
        assert _step(cache, [0], tokens) == [_expected(start, tokens, window)]


@given(
    st.lists(pieces, min_size=2, max_size=4), windows, st.integers(1, 4), st.permutations(range(5))
)
@settings(deadline=None, max_examples=100)
def test_rows_of_any_lengths_in_any_slots(
    lengths: list[list[int]], window: int | None, tokens: int, slots: list[int]
) -> None:
    """Rows that begin at different lengths, then step together, each see their own."""
    cache = KvCache(CacheShape(1, 5, 1, 2, 110, window), torch.float64)
    rows = slots[: len(lengths)]
    for slot, row in zip(rows, lengths, strict=True):
        for piece in row:
            _step(cache, [slot], piece)
    starts = cache.lens[torch.tensor(rows)].tolist()
    assert _step(cache, rows, tokens) == [_expected(start, tokens, window) for start in starts]


@given(pieces, st.integers(1, 14))
@settings(deadline=None, max_examples=50)
def test_memory_stops_at_the_window(lengths: list[int], window: int) -> None:
    cache = KvCache(CacheShape(3, 2, 2, 4, 100, window), torch.float32)
    for tokens in lengths:
        if int(cache.lens[0]) + tokens > 100:
            break
        _step_sizes(cache, tokens)
        assert cache.nbytes == 2 * 3 * 2 * 2 * 4 * 4 * window


def _step_sizes(cache: KvCache, tokens: int) -> None:
    row = torch.tensor([0])
    positions = cache.lens[row][:, None] + torch.arange(tokens)
    step = cache.plan(row, positions)
    new = torch.zeros(1, 2, tokens, 4)
    for layer in range(3):
        cache.update(layer, new, new, step)
    cache.lens[row] += tokens
