"""The native attention and GELU beside torch's, on every instruction set."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.kernels.attention import BLOCK, MOST_HEAD_DIM, Paged, attend_one, attends
from starquill.kernels.elementwise import ACTS, gated, gelu_tanh, layer_norm
from starquill.kernels.native import native
from starquill.nn.attention import AttentionStep, attend_cached
from starquill.nn.cache import CacheShape, KvCache, blocks_for
from starquill.nn.rope import rotate

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)


windows = st.one_of(st.none(), st.integers(1, 200), st.integers(400, 1100))
# Of tokens that are there; the longer ones are worked on in several pieces.
lengths_before = st.one_of(st.integers(0, 300), st.integers(490, 1300))
head_dims = st.one_of(st.sampled_from([64, 128, 256]), st.integers(1, 40).map(lambda n: 2 * n))
head_counts = st.tuples(st.integers(1, 3), st.integers(1, 20))


@settings(max_examples=60, deadline=None)
@given(window=windows, head_dim=head_dims, heads=head_counts, data=st.data())
def test_attention_is_torchs(
    window: int | None, head_dim: int, heads: tuple[int, int], data: st.DataObject
) -> None:
    """One or more new tokens of several sequences, whose blocks lie anywhere."""
    kv_heads, group = heads
    lengths = data.draw(st.lists(lengths_before, min_size=1, max_size=3))
    new = data.draw(st.lists(st.integers(1, 10), min_size=len(lengths), max_size=len(lengths)))
    torch.manual_seed(sum(lengths) * head_dim)
    width = blocks_for(max(lengths) + 10)
    order = torch.randperm(len(lengths) * width).view(len(lengths), width)
    rows = [(table, n + i) for table, n, more in zip(order, lengths, new, strict=True)
            for i in range(more)]  # fmt: skip
    batch = len(rows)
    at = Paged(
        torch.stack([table for table, _ in rows]), torch.tensor([p for _, p in rows]), window
    )
    q = torch.randn(batch, kv_heads * group, 1, head_dim) * 3
    k, v = (torch.randn(batch, kv_heads, 1, head_dim) for _ in range(2))
    cos, sin = (torch.rand(batch, 1, 1, head_dim) for _ in range(2))
    caches = tuple(torch.randn(order.numel(), kv_heads, BLOCK, head_dim) for _ in range(2))
    keys, values = (cache.clone() for cache in caches)
    for row, (table, p) in enumerate(rows):
        keys[table[p // BLOCK], :, p % BLOCK] = rotate(k, cos, sin)[row, :, 0]
        values[table[p // BLOCK], :, p % BLOCK] = v[row, :, 0]
    expected = []
    for row, (table, p) in enumerate(rows):
        first = 0 if window is None else max(0, p - window + 1)
        own = (part[table].transpose(0, 1).flatten(1, 2)[None, :, first : p + 1].double()
               for part in (keys, values))  # fmt: skip
        query = rotate(q, cos, sin)[row : row + 1].double()
        expected.append(F.scaled_dot_product_attention(query, *own, enable_gqa=True).flatten(1))
    for level in native.isa_levels():
        native.select_isa(level)
        mine = (caches[0].clone(), caches[1].clone())
        out = attend_one(q, (k, v), (cos, sin), mine, at)
        torch.testing.assert_close(out.flatten(1).double(), torch.cat(expected), rtol=0, atol=2e-5)
        torch.testing.assert_close(mine[0], keys, rtol=0, atol=1e-6)
        assert torch.equal(mine[1], values)
        # Each row comes out the same alone, when those before it are there.
        last = Paged(at.tables[-1:], at.starts[-1:], window)
        alone = attend_one(q[-1:], (k[-1:], v[-1:]), (cos[-1:], sin[-1:]), mine, last)
        assert torch.equal(alone[0], out[-1])


@pytest.mark.parametrize("isa", native.isa_levels())
@pytest.mark.parametrize("window", [None, 5, 70, 600])
@pytest.mark.parametrize("length", [60, 507, 1030])
def test_a_row_attends_the_same_in_any_company(isa: str, window: int | None, length: int) -> None:
    """Rows of one sequence share a reading of its keys; what each gets is what it gets alone.

    On any number of threads: pieces end at the same positions.
    """
    torch.manual_seed(0)
    tables = torch.randperm(54).view(3, 18)
    starts = [(0, length + i) for i in range(11)] + [(1, 200)] + [(2, i) for i in range(3)]
    order = [table for table, _ in starts]
    q = torch.randn(len(starts), 6, 1, 20)
    new = (torch.randn(len(starts), 2, 1, 20), torch.randn(len(starts), 2, 1, 20))
    rope = (torch.rand(len(starts), 1, 1, 20), torch.rand(len(starts), 1, 1, 20))
    cache = (torch.randn(54, 2, BLOCK, 20), torch.randn(54, 2, BLOCK, 20))
    at = Paged(tables[order], torch.tensor([p for _, p in starts]), window)
    before = native.isa()
    native.select_isa(isa)
    try:
        torch.set_num_threads(3)
        together = attend_one(q, new, rope, cache, at)
        torch.set_num_threads(1)
        for row in range(len(starts)):
            one = slice(row, row + 1)
            alone = attend_one(
                q[one],
                (new[0][one], new[1][one]),
                (rope[0][one], rope[1][one]),
                cache,
                Paged(at.tables[one], at.starts[one], window),
            )
            assert torch.equal(alone, together[one])
    finally:
        native.select_isa(before)


def test_caches_that_torch_attends_to() -> None:
    assert attends(torch.empty(1, 1, 4, MOST_HEAD_DIM))
    assert not attends(torch.empty(1, 1, 4, MOST_HEAD_DIM + 2))
    assert not attends(torch.empty(1, 1, 4, 7))
    assert not attends(torch.empty(1, 1, 4, 8, dtype=torch.bfloat16))


@settings(max_examples=40, deadline=None)
@given(
    window=windows,
    head_dim=head_dims,
    heads=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    chunks=st.lists(st.integers(2, 150), min_size=1, max_size=4),
    batch=st.integers(1, 3),
)
def test_many_queries_see_what_torchs_see(
    window: int | None, head_dim: int, heads: tuple[int, int], chunks: list[int], batch: int
) -> None:
    """Chunk after chunk through the cache, past the window; equal in chunks of other sizes."""
    kv_heads, group = heads
    total = sum(chunks)
    shape, width = CacheShape(1, kv_heads, head_dim, window), blocks_for(total)
    generator = torch.Generator().manual_seed(head_dim)
    tables = torch.randperm(batch * width, generator=generator).view(batch, width) + 1
    angles = torch.rand(batch, 1, total, head_dim, generator=generator)
    q = torch.randn(batch, kv_heads * group, total, head_dim, generator=generator) * 2
    k, v = (torch.randn(batch, kv_heads, total, head_dim, generator=generator) for _ in range(2))

    def run(dtype: torch.dtype, sizes: list[int]) -> torch.Tensor:
        cache, start, parts = KvCache(shape, dtype, batch * width), 0, []
        for size in sizes:
            here = slice(start, start + size)
            plan = cache.plan(tables, torch.arange(start, start + size).expand(batch, -1))
            assert plan.native == (dtype == torch.float32)
            turned = (f(angles[:, :, here]).to(dtype) for f in (torch.cos, torch.sin))
            new = (part[:, :, here].to(dtype) for part in (q, k, v))
            parts.append(attend_cached(*new, 0, AttentionStep(*turned, cache, plan)))
            start += size
        return torch.cat(parts, dim=1)

    expected = run(torch.float64, chunks)
    for level in native.isa_levels():
        native.select_isa(level)
        out = run(torch.float32, chunks)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-5)
        assert torch.equal(out, run(torch.float32, [total]))


def test_gelu_is_torchs() -> None:
    x = torch.cat((torch.linspace(-30, 30, 20001), torch.tensor([1e30, -1e30, 0.0, -0.0, 1e-40])))
    expected = F.gelu(x.double(), approximate="tanh")
    for level in native.isa_levels():
        native.select_isa(level)
        torch.testing.assert_close(gelu_tanh(x).double(), expected, rtol=1e-6, atol=1e-7)
        bad = gelu_tanh(torch.tensor([float("nan"), float("inf"), float("-inf")]))
        assert bad[0].isnan()
        assert bad[1] == float("inf")
        assert not bad[2] > 0


@pytest.mark.parametrize("act", list(ACTS))
def test_gated_activations_are_torchs(act: str) -> None:
    x = torch.cat((torch.linspace(-90, 90, 20001), torch.tensor([1e30, -1e30, 0.0, 1e-40])))
    up = torch.linspace(-2, 2, len(x))
    torchs = {"silu": F.silu, "relu": F.relu}.get(act, partial(F.gelu, approximate="tanh"))
    for level in native.isa_levels():
        native.select_isa(level)
        for other in (None, up):
            expected = torchs(x.double()) * (1 if other is None else other.double())
            found = gated(x, other, act).double()
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        assert gated(torch.tensor([float("nan"), 1.0]), torch.ones(2), act)[0].isnan()


@pytest.mark.parametrize("width", [1, 7, 16, 100, 3072])
def test_layer_norm_is_torchs(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(2, 9, width, generator=generator) * 5 + 100
    weight, bias = (torch.randn(width, generator=generator) for _ in range(2))
    expected = F.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-5)
    for level in native.isa_levels():
        native.select_isa(level)
        ours = layer_norm(x, weight, bias, 1e-5)
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
    x[0, 3, 0] = float("nan")
    ours = layer_norm(x, weight, bias, 1e-5)
    assert ours[0, 3].isnan().all()
    assert ours[1].isfinite().all()


def test_rotation_is_torchs_for_strided_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(2, 7, 3 * 20, generator=generator)
    x = flat.view(2, 7, 3, 20).transpose(1, 2)
    cos, sin = (torch.rand(2, 1, 7, 20, generator=generator) for _ in range(2))
    expected = rotate(x.double(), cos.double(), sin.double())
    for level in native.isa_levels():
        native.select_isa(level)
        turned = rotate(x, cos, sin)
        assert turned.is_contiguous()
        torch.testing.assert_close(turned.double(), expected, rtol=0, atol=1e-6)
