"""The native attention of one token beside torch's, on every instruction set."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.kernels.attention import MOST_HEAD_DIM, OneToken, attend_one, attends
from starquill.kernels.native import native
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
