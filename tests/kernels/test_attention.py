"""The native attention and GELU beside torch's, on every instruction set."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.kernels.attention import MOST_HEAD_DIM, OneToken, attend_one, attends
from starquill.kernels.elementwise import gelu_tanh, layer_norm
from starquill.kernels.native import native
from starquill.nn.attention import AttentionStep, attend_cached
from starquill.nn.cache import CacheShape, KvCache
from starquill.nn.rope import rotate

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)


@settings(max_examples=60, deadline=None)
@given(
    ring=st.one_of(st.integers(1, 9), st.integers(1, 300)),
    head_dim=st.integers(1, 70).map(lambda half: 2 * half),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 20)),
    spare=st.integers(0, 2),
    data=st.data(),
)
def test_attention_is_torchs(
    ring: int, head_dim: int, heads: tuple[int, int], spare: int, data: st.DataObject
) -> None:
    kv_heads, group = heads
    batch = data.draw(st.integers(1, 3))
    torch.manual_seed(ring * head_dim)
    order = torch.randperm(batch + spare)[:batch]
    counts = torch.tensor([data.draw(st.integers(1, ring)) for _ in range(batch)])
    places = torch.tensor([data.draw(st.integers(0, int(n) - 1)) for n in counts])
    q = torch.randn(batch, kv_heads * group, 1, head_dim) * 3
    k, v = (torch.randn(batch, kv_heads, 1, head_dim) for _ in range(2))
    cos, sin = (torch.rand(batch, 1, 1, head_dim) for _ in range(2))
    caches = tuple(torch.randn(batch + spare, kv_heads, ring, head_dim) for _ in range(2))
    keys, values = (cache.clone() for cache in caches)
    for row in range(batch):
        keys[order[row], :, places[row]] = rotate(k, cos, sin)[row, :, 0]
        values[order[row], :, places[row]] = v[row, :, 0]
    seen = torch.arange(ring) < counts[:, None]
    expected = F.scaled_dot_product_attention(
        rotate(q, cos, sin).double(),
        keys[order].double(),
        values[order].double(),
        seen[:, None, None],
        enable_gqa=True,
    ).flatten(1)
    for level in native.isa_levels():
        native.select_isa(level)
        mine = (caches[0].clone(), caches[1].clone())
        out = attend_one(q, (k, v), (cos, sin), mine, OneToken(order, places, counts))
        torch.testing.assert_close(out.flatten(1).double(), expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(mine[0], keys, rtol=0, atol=1e-6)
        assert torch.equal(mine[1], values)


def test_caches_that_torch_attends_to() -> None:
    assert attends(torch.empty(1, 1, 4, MOST_HEAD_DIM))
    assert not attends(torch.empty(1, 1, 4, MOST_HEAD_DIM + 2))
    assert not attends(torch.empty(1, 1, 4, 7))
    assert not attends(torch.empty(1, 1, 4, 8, dtype=torch.bfloat16))


@settings(max_examples=40, deadline=None)
@given(
    window=st.one_of(st.none(), st.integers(1, 200)),
    head_dim=st.one_of(st.sampled_from([64, 128, 256]), st.integers(1, 40).map(lambda n: 2 * n)),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    chunks=st.lists(st.integers(2, 150), min_size=1, max_size=4),
    batch=st.integers(1, 3),
    backwards=st.booleans(),
)
def test_many_queries_see_what_torchs_see(
    window: int | None,
    head_dim: int,
    heads: tuple[int, int],
    chunks: list[int],
    batch: int,
    backwards: bool,
) -> None:
    """Chunk after chunk through the cache, past the window and over the ring's end."""
    kv_heads, group = heads
    shape = CacheShape(1, batch + 1, kv_heads, head_dim, context=1000, window=window)
    generator = torch.Generator().manual_seed(head_dim)
    ours, theirs = KvCache(shape, torch.float32), KvCache(shape, torch.float64)
    slots = torch.arange(batch) + 1
    slots = slots.flip(0) if backwards else slots
    for chunk in chunks:
        positions = ours.lens[slots][:, None] + torch.arange(chunk)
        angles = torch.rand(batch, 1, chunk, head_dim, generator=generator)
        q = torch.randn(batch, kv_heads * group, chunk, head_dim, generator=generator) * 2
        k, v = (
            torch.randn(batch, kv_heads, chunk, head_dim, generator=generator) for _ in range(2)
        )
        plan = theirs.plan(slots, positions)
        step = AttentionStep(angles.cos().double(), angles.sin().double(), theirs, plan)
        expected = attend_cached(q.double(), k.double(), v.double(), 0, step)
        lengths = ours.lens.clone()
        for level in native.isa_levels():
            native.select_isa(level)
            ours.lens = lengths.clone()
            plan = ours.plan(slots, positions)
            assert plan.many is not None
            kept = [part.clone() for part in ours.layer(0)]
            step = AttentionStep(angles.cos(), angles.sin(), ours, plan)
            out = attend_cached(q, k, v, 0, step)
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-5)
            if level != native.isa_levels()[-1]:
                for part, before in zip(ours.layer(0), kept, strict=True):
                    part.copy_(before)
        ours.lens[slots] += chunk
        theirs.lens[slots] += chunk


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
