"""The native products, on every instruction set that this machine has, against float64."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starquill.kernels.native import native
from starquill.quant.affine import BITS, GROUPS, AffineWeight, pack

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

LEVELS = native.isa_levels()
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture(params=LEVELS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    native.select_isa(request.param)
    yield request.param
    native.select_isa(before)


def _weight(
    rows: int, groups: int, bits: int, group: int, seed: int = 0, dtype: torch.dtype = DTYPES[0]
) -> AffineWeight:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 2**bits, (rows, groups * group), generator=generator, dtype=torch.uint8)
    scales = torch.randn(rows, groups, generator=generator) * 0.1
    biases = torch.randn(rows, groups, generator=generator)
    return AffineWeight(pack(q, bits), scales.to(dtype), biases.to(dtype), bits, group)


def _values(weight: AffineWeight) -> Tensor:
    """What the weight stands for, in float64, by plain torch."""
    q = weight.integers().unflatten(-1, (-1, weight.group)).double()
    return (q * weight.scales.double()[..., None] + weight.biases.double()[..., None]).flatten(-2)


def _bound(x: Tensor, weight: AffineWeight) -> Tensor:
    """The most by which rounding activations may move a product, with float32's own rounding."""
    reach = x.double().unflatten(-1, (-1, weight.group)).abs().amax(-1) / 254
    magnitude = _values(weight).abs()
    rounding = reach @ magnitude.unflatten(-1, (-1, weight.group)).sum(-1).T
    # Scale and bias may cancel in a value: float32 rounds them before that.
    parts = 2**weight.bits * weight.scales.double().abs() + weight.biases.double().abs()
    sums = x.double().unflatten(-1, (-1, weight.group)).abs().sum(-1) + reach * weight.group
    return rounding * 1.01 + 2.0**-19 * (sums @ parts.T) + 1e-30


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_products_are_within_the_stated_bound(bits: int, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from(GROUPS))
    rows = data.draw(st.integers(1, 70))
    groups = data.draw(st.integers(1, 40))
    tokens = data.draw(st.one_of(st.integers(1, 9), st.integers(1, 70)))
    weight = _weight(rows, groups, bits, group, rows, data.draw(st.sampled_from(DTYPES)))
    generator = torch.Generator().manual_seed(tokens)
    size = data.draw(st.sampled_from([1.0, 1e-30, 1e-20, 1e20]))
    x = torch.randn(tokens, groups * group, generator=generator) * size
    x[data.draw(st.integers(0, tokens - 1))] = 0
    bias = torch.randn(rows, generator=generator) if data.draw(st.booleans()) else None
    expected = x.double() @ _values(weight).T + (0 if bias is None else bias)
    before = native.isa()
    for level in LEVELS:
        native.select_isa(level)
        off = (weight.matmul(x, bias) - expected).abs()
        exact = (weight.computing(torch.float32, exact=True).matmul(x, bias) - expected).abs()
        slack = 0 if bias is None else 2.0**-22 * bias.abs().double()
        tight = (
            2.0**-19 * (x.double().abs() @ _values(weight).abs().T)
            + slack
            + _bound(x, weight) * 2.0**-12
        )
        native.select_isa(before)
        assert bool((off <= _bound(x, weight) + slack + 2.0**-20 * expected.abs()).all()), level
        assert bool((exact <= tight + 1e-37).all()), level


@pytest.mark.parametrize("bits", BITS)
def test_every_level_sums_the_same_integers(bits: int) -> None:
    """With scales of one and integer activations the result has no rounding: all bits agree."""
    for group in GROUPS:
        for tokens in (1, 5, 14):
            weight = _weight(35, 5, bits, group)
            weight.scales.fill_(1)
            weight.biases.zero_()
            generator = torch.Generator().manual_seed(bits)
            x = torch.randint(-127, 128, (tokens, 5 * group), generator=generator).float()
            x[:, ::group] = 127  # so that a level is one
            expected = x.double() @ weight.integers().double().T
            for level in LEVELS:
                native.select_isa(level)
                assert torch.equal(weight.matmul(x).double(), expected), (level, group, tokens)
            native.select_isa(LEVELS[-1])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(isa: str, bits: int, tokens: int, bad: float) -> None:
    weight = _weight(20, 4, bits, 32)
    x = torch.ones(tokens, 128)
    x[0, 77] = bad
    for exact in (False, True):
        y = weight.computing(torch.float32, exact=exact).matmul(x)
        assert not bool(y[0].isfinite().any())
        assert bool(y[1:].isfinite().all())


def test_huge_and_denormal_scales(isa: str) -> None:
    for size in (1e-44, 1e-38, 1e30):
        weight = _weight(9, 2, 4, 64, dtype=torch.float32)
        weight = AffineWeight(weight.packed, weight.scales * size, weight.biases * size, 4, 64)
        x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
        expected = x.double() @ _values(weight).T
        off = (weight.matmul(x) - expected).abs()
        assert bool((off <= _bound(x, weight) + 1e-42).all()), size


def test_dequantized_values_are_those_of_the_formula(isa: str) -> None:
    for bits in BITS:
        for group in GROUPS:
            for dtype in DTYPES:
                weight = _weight(7, 3, bits, group, dtype=dtype)
                q = weight.integers().float().unflatten(-1, (-1, group))
                values = q * weight.scales.float()[..., None] + weight.biases.float()[..., None]
                assert torch.equal(weight.dequantize(), values.flatten(-2))


def test_a_bias_of_another_dtype_and_strided_activations(isa: str) -> None:
    weight = _weight(6, 2, 4, 32)
    wide = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    bias = torch.ones(6, dtype=torch.float16)
    for x in (wide[:, :64], wide[:, ::2], wide[:, 64:].half().float()):
        assert torch.equal(weight.matmul(x, bias), weight.matmul(x.contiguous(), bias.float()))
    assert weight.matmul(wide[:, :64].bfloat16()).dtype == torch.bfloat16
    assert weight.matmul(torch.empty(0, 64)).shape == (0, 6)
    assert weight.matmul(torch.empty(2, 0, 64)).shape == (2, 0, 6)


def test_a_row_does_not_depend_on_its_neighbours(isa: str) -> None:
    """Rows computed together by one kernel equal the same rows in another order."""
    weight = _weight(37, 6, 4, 64)
    x = torch.randn(40, 384, generator=torch.Generator().manual_seed(3))
    for few in (1, 2, 3, 4, 7):
        alone = torch.cat([weight.matmul(x[i : i + 1]) for i in range(few)])
        assert torch.equal(weight.matmul(x[:few]), alone)
    assert torch.equal(weight.matmul(x)[5:30], weight.matmul(x.flip(0)).flip(0)[5:30])


@pytest.mark.parametrize("bits", BITS)
def test_rows_too_wide_for_the_first_cache_are_the_same(isa: str, bits: int) -> None:
    """Several rows of activations go over a wide matrix in parts; one does not."""
    weight = _weight(11, 197, bits, 64, dtype=torch.float32)
    x = torch.randn(7, 1, 197 * 64)
    together = weight.matmul(x)
    for row in range(7):
        assert torch.equal(weight.matmul(x[row : row + 1]), together[row : row + 1])
    assert (
        (together[:, 0] - x[:, 0].double() @ _values(weight).T).abs() <= _bound(x[:, 0], weight)
    ).all()


def test_wrong_buffers_are_refused() -> None:
    packed, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 1).half()
    for bad in (
        (packed, scales, scales, 7, 64),
        (packed, scales, scales, 4, 48),
        (packed.int(), scales, scales, 4, 64),
        (packed[:3], scales, scales, 4, 64),
        (packed[:, :31].contiguous(), scales, scales, 4, 64),
        (packed, scales, scales.float(), 4, 64),
        (packed, scales.double(), scales.double(), 4, 64),
        (packed, scales, scales[:3].contiguous(), 4, 64),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            native.Affine(*bad)
    good = native.Affine(packed, scales, scales, 4, 64)
    for x, bias, out in (
        (torch.zeros(2, 63), None, torch.zeros(2, 4)),
        (torch.zeros(2, 64), None, torch.zeros(3, 4)),
        (torch.zeros(2, 64), torch.zeros(3), torch.zeros(2, 4)),
        (torch.zeros(2, 64), None, torch.zeros(4, 2).T),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            good.matmul(x, bias, out, False, 1)
    packed_twice = packed.repeat(1, 2)[:, ::2]
    with pytest.raises(TypeError):
        native.Affine(packed_twice, scales, scales, 4, 64)
    with pytest.raises(ValueError, match=r"\(portable"):
        native.select_isa("mmx")


def test_many_threads_may_multiply_at_once(isa: str) -> None:
    weight = _weight(300, 8, 4, 64)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(3))
    expected = weight.matmul(x)
    wrong: list[Tensor] = []

    def work() -> None:
        found = [weight.matmul(x) for _ in range(50)]
        wrong.extend(y for y in found if not torch.equal(y, expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_computes() -> None:
    weight = _weight(300, 8, 4, 64)
    x = torch.ones(1, 512)
    expected = weight.matmul(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(weight.matmul(x), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("bits", BITS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_experts_multiply_their_own_rows(bits: int, data: st.DataObject) -> None:
    """Many tokens of one expert, none of another, in any order; also in plain torch."""
    experts, rows = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    group, tokens = data.draw(st.sampled_from(GROUPS)), data.draw(st.integers(0, 60))
    flat = _weight(experts * rows, 3, bits, group, tokens)
    parts = (part.unflatten(0, (experts, rows)) for part in (flat.packed, flat.scales, flat.biases))
    stack = AffineWeight(*parts, bits, group)
    chosen = torch.tensor(
        data.draw(st.lists(st.integers(0, experts - 1), min_size=tokens, max_size=tokens)),
        dtype=torch.int64,
    )
    x = torch.randn(tokens, 3 * group, generator=torch.Generator().manual_seed(tokens))
    for level in LEVELS:
        native.select_isa(level)
        for exact in (False, True):
            weight = stack.computing(torch.float32, exact=exact)
            alone = [weight[e].matmul(x) for e in range(experts)]
            expected = [alone[int(e)][i] for i, e in enumerate(chosen)]
            found = weight.matmul_experts(x, chosen)
            assert found.shape == (tokens, rows)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_rows_are_looked_up(isa: str) -> None:
    for bits in BITS:
        weight = _weight(9, 3, bits, 32)
        ids = torch.tensor([[3, 0, 8], [3, 3, 1]])
        assert torch.equal(weight.rows(ids), weight.dequantize()[ids])
    for bad in (-1, 9):
        with pytest.raises(IndexError, match="row"):
            weight.rows(torch.tensor([0, bad]))
