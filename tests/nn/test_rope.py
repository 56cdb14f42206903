"""Rotation and frequencies, by hand: which dimensions pair, and what dynamic rope depends on."""

from __future__ import annotations

import math

import pytest
import torch

from starquill.nn.rope import RopeConfig, frequencies, rope_table, rotate


def _rotated(positions: list[int], head_dim: int = 8, theta: float = 100.0) -> torch.Tensor:
    """All unit vectors of one head at each position, `[T, Dh, Dh]`."""
    rope = RopeConfig(theta=theta, head_dim=head_dim)
    rows = torch.tensor(positions)[None].repeat(head_dim, 1)  # one row a unit vector
    cos, sin = rope_table(rope, rows, torch.full((head_dim,), 64))
    x = torch.eye(head_dim)[:, None, None].repeat(1, 1, len(positions), 1)
    return rotate(x, cos, sin)[:, 0].transpose(0, 1)


@pytest.mark.parametrize("position", [0, 1, 7, 1000])
def test_b06_dimension_i_pairs_with_i_plus_half(position: int) -> None:
    """B06: the interleaved pairing (i, i + 1) loads fine and speaks nonsense."""
    turned = _rotated([position])[0]
    for i in range(4):
        angle = position * 100.0 ** (-2 * i / 8)
        expected = torch.zeros(8)
        expected[i], expected[i + 4] = math.cos(angle), math.sin(angle)
        torch.testing.assert_close(turned[i], expected, atol=1e-4, rtol=0)
        expected[i], expected[i + 4] = -math.sin(angle), math.cos(angle)
        torch.testing.assert_close(turned[i + 4], expected, atol=1e-4, rtol=0)


def test_b06_products_depend_on_distance_alone() -> None:
    """B06: what rotary positions are for: q·k is the same wherever the two stand."""
    q, k = torch.randn(8), torch.randn(8)
    turned = _rotated([3, 10, 103, 110])  # [T, Dh, Dh]: row i is where unit vector i went
    at = [turned[t].T for t in range(4)]
    near, far = (at[0] @ q) @ (at[1] @ k), (at[2] @ q) @ (at[3] @ k)
    torch.testing.assert_close(near, far, atol=1e-3, rtol=0)


def test_dynamic_frequencies_grow_with_the_span_alone() -> None:
    rope = RopeConfig(theta=1e4, head_dim=16, type="dynamic", factor=2.0, original_context=32)
    plain = frequencies(RopeConfig(theta=1e4, head_dim=16), 0)
    assert torch.equal(frequencies(rope, 5), plain)
    assert torch.equal(frequencies(rope, 32), plain)
    longer = frequencies(rope, 33)
    assert bool((longer[1:] < plain[1:]).all())
    assert bool((frequencies(rope, 64)[1:] < longer[1:]).all())
