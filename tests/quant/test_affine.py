"""The bit stream against one bit at a time, and what an `AffineWeight` says of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starquill.quant.affine import BITS, GROUPS, AffineWeight, pack, unpack
from starquill.quant.bands import ROWS_AT_ONCE

SCHEMES = [(bits, group) for bits in BITS for group in GROUPS]


def _bit_by_bit(values: list[int], bits: int) -> list[int]:
    """The bytes of a stream in which value k takes bits k·b to k·b+b, least significant first."""
    data = [0] * (len(values) * bits // 8)
    for index, value in enumerate(values):
        for bit in range(bits):
            at = index * bits + bit
            data[at // 8] |= (value >> bit & 1) << at % 8
    return data


def _random(
    lead: tuple[int, ...], bits: int, group: int, groups: int = 2, seed: int = 0
) -> tuple[AffineWeight, Tensor]:
    """A random weight of `groups` groups a row, and what it stands for in float64."""
    generator = np.random.default_rng(seed)
    q = generator.integers(0, 2**bits, (*lead, groups * group), dtype=np.uint8)
    scales = generator.normal(0, 0.1, (*lead, groups)).astype(np.float16)
    biases = generator.normal(0, 1, (*lead, groups)).astype(np.float16)
    rows = [_bit_by_bit(row.tolist(), bits) for row in q.reshape(-1, q.shape[-1])]
    packed = np.array(rows, dtype=np.uint8).reshape(*lead, -1)
    weight = AffineWeight(*map(torch.from_numpy, (packed, scales, biases)), bits, group)
    parts = (np.repeat(part.astype(np.float64), group, axis=-1) for part in (scales, biases))
    scale, bias = parts
    return weight, torch.from_numpy(q * scale + bias)


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_packing_is_one_stream_of_bits(bits: int, data: Any) -> None:
    count = 8 * data.draw(st.integers(1, 6))
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    q = torch.tensor(values, dtype=torch.uint8)
    packed = pack(q, bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == _bit_by_bit(values, bits)
    assert torch.equal(unpack(packed, bits), q)


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_bytes_are_a_stream(bits: int, data: Any) -> None:
    """Unpacking and packing again gives the same bytes: no value has bits of another."""
    raw = data.draw(st.binary(min_size=bits * 4, max_size=bits * 4))
    packed = torch.tensor(list(raw), dtype=torch.uint8)
    q = unpack(packed, bits)
    assert q.dtype == torch.uint8
    assert q.shape == (32,)
    assert int(q.max()) < 2**bits
    assert torch.equal(pack(q, bits), packed)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_leading_axes_are_kept(bits: int, lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(bits)
    q = torch.randint(0, 2**bits, (*lead, 48), dtype=torch.uint8, generator=generator)
    packed = pack(q, bits)
    assert packed.shape == (*lead, 48 * bits // 8)
    assert torch.equal(unpack(packed, bits), q)
    for row, data in zip(q.reshape(-1, 48), packed.reshape(-1, packed.shape[-1]), strict=True):
        assert data.tolist() == _bit_by_bit(row.tolist(), bits)


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
def test_a_weight_is_scale_times_integer_plus_bias(bits: int, group: int) -> None:
    weight, expected = _random((5,), bits, group)
    assert weight.shape == (5, 2 * group)
    assert weight.scheme == f"q{bits}-g{group}"
    assert weight.nbytes == 5 * 2 * group * bits // 8 + 2 * 2 * 5 * 2
    found = weight.dequantize()
    assert found.dtype == torch.float32
    # float16 times 8 bits is exact in float32; the sum rounds once.
    torch.testing.assert_close(found.double(), expected, rtol=2**-23, atol=2**-24)


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
def test_rows_are_those_of_the_whole(bits: int, group: int) -> None:
    weight, _ = _random((7,), bits, group)
    ids = torch.tensor([[6, 0, 6], [3, 2, 1]])
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids])
    assert weight.rows(torch.empty(0, 2, dtype=torch.long)).shape == (0, 2, 2 * group)


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
@pytest.mark.parametrize("lead", [(), (1,), (2, 3)], ids=str)
def test_matmul_is_that_of_the_dequantized(bits: int, group: int, lead: tuple[int, ...]) -> None:
    weight, expected = _random((9,), bits, group)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*lead, 2 * group, generator=generator)
    bias = torch.randn(9, generator=generator)
    product = F.linear(x.double(), expected)
    for matmul in (weight.computing(torch.float32, exact=True).matmul, weight._in_bands):
        assert matmul(x, None).shape == (*lead, 9)
        torch.testing.assert_close(matmul(x, None).double(), product, rtol=0, atol=1e-3)
        torch.testing.assert_close(matmul(x, bias).double(), product + bias, rtol=0, atol=1e-3)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_matmul_over_a_bands_edge(extra: int) -> None:
    out = 2 * ROWS_AT_ONCE + extra
    weight, expected = _random((1,), 4, 32)
    tall = AffineWeight(
        weight.packed.expand(out, -1).contiguous(),
        weight.scales * torch.linspace(0, 1, out).half()[:, None],
        weight.biases.expand(out, -1),
        4,
        32,
    )
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for matmul in (tall.computing(torch.float32, exact=True).matmul, tall._in_bands):
        y = matmul(x, None)
        assert y.shape == (out,)
        torch.testing.assert_close(y, F.linear(x, tall.dequantize()), rtol=0, atol=1e-4)
        torch.testing.assert_close(y[-1].double(), expected[0] @ x.double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("bits", "group"), SCHEMES)
def test_a_stack_holds_experts(bits: int, group: int) -> None:
    stack, expected = _random((3, 4), bits, group)
    assert stack.shape == (3, 4, 2 * group)
    assert stack.dequantize().shape == stack.shape
    x = torch.ones(2 * group)
    for expert in range(3):
        view = stack[expert]
        assert view.shape == (4, 2 * group)
        assert view.scheme == stack.scheme
        assert view.nbytes * 3 == stack.nbytes
        assert torch.equal(view.dequantize(), stack.dequantize()[expert])
        torch.testing.assert_close(
            view.matmul(x).double(), expected[expert].sum(-1), rtol=0, atol=1e-2
        )


def test_a_view_shares_memory() -> None:
    stack, _ = _random((3, 4), 5, 16)
    for part in ("packed", "scales", "biases"):
        whole, view = getattr(stack, part), getattr(stack[1], part)
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        band = getattr(stack[1:3], part)
        assert band.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    stack.biases[1] += 1
    assert torch.equal(stack[1].dequantize(), stack.dequantize()[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_scales_and_of_values_are_two_things(
    dtype: torch.dtype, stored: torch.dtype
) -> None:
    weight, _ = _random((4,), 6, 64)
    parts = (weight.packed, weight.scales.to(stored), weight.biases.to(stored))
    kept = AffineWeight(*parts, 6, 64, dtype)
    q = kept.integers().unflatten(-1, (-1, 64)).double()
    exact = q * parts[1].double()[..., None] + parts[2].double()[..., None]
    found = kept.dequantize()
    assert found.dtype == kept.rows(torch.tensor([1])).dtype == dtype
    # Rounded once, from float32: never computed in the narrow type.
    once = exact.float().flatten(-2).to(dtype)
    assert torch.equal(found, once)
    assert kept[0:2].dtype == dtype
    assert kept.matmul(torch.ones(1, 128, dtype=dtype)).dtype == dtype
