"""Low-rank products of many adapters beside float64, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starquill.kernels.lora import LoraTerm, add_packed, pack
from starquill.kernels.native import native
from starquill.nn import lora
from starquill.nn.lora import AdapterMix, LoraBank, LoraPart

if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
sizes = st.tuples(st.integers(1, 300), st.integers(1, 300))


def _draw_part(data: st.DataObject, sizes: tuple[int, int], generator: torch.Generator) -> LoraPart:
    """Any adapter's part; a rank of 0 is one that has no A and B."""
    inputs, outputs = sizes
    rank = data.draw(st.integers(0, 20))
    a, b = (
        torch.randn(rank, size, generator=generator).to(data.draw(st.sampled_from(DTYPES)))
        for size in (inputs, outputs)
    )
    gain, shift = (
        torch.randn(outputs, generator=generator) if data.draw(st.booleans()) else None
        for _ in range(2)
    )
    return LoraPart(*((a, b) if rank else (None, None)), 0.75, gain, shift)


def _expected(y: Tensor, x: Tensor, bias: Tensor | None, term: LoraTerm) -> Tensor:
    """What a term adds, float64 `[rows, out]`."""
    here = slice(term.first, term.first + term.rows)
    base = y[here].double()
    added = torch.zeros_like(base)
    if term.a is not None and term.b is not None:
        added += term.scale * (x[here].double() @ term.a.double().T @ term.b.double())
    if term.gain is not None:
        added += term.gain.double() * (base if bias is None else base - bias.double())
    if term.shift is not None:
        added += term.shift.double()
    return term.row_weights().double()[:, None] * added


@settings(max_examples=60, deadline=None)
@given(sizes, st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=4), st.data())
def test_terms_are_those_of_float64(
    sizes: tuple[int, int], groups: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Groups of rows, each with its adapters; a row alone has the same result to the bit."""
    inputs, outputs = sizes
    generator = torch.Generator().manual_seed(inputs * outputs)
    rows = sum(count for count, _ in groups) + 1  # and one that no adapter acts on
    x, y = (torch.randn(rows, size, generator=generator) for size in (inputs, outputs))
    bias = torch.randn(outputs, generator=generator) if data.draw(st.booleans()) else None
    terms, first = [], 0
    for count, adapters in groups:
        for _ in range(adapters):
            part = _draw_part(data, sizes, generator)
            stride = data.draw(st.sampled_from([0, 1, 3]))
            weights = torch.rand(1 + stride * count, generator=generator)
            terms.append(
                LoraTerm(
                    first, count, part.a, part.b, part.scale, part.gain, part.shift, weights, 0,
                    stride,
                )
            )  # fmt: skip
        first += count
    expected, reach = y.double().clone(), torch.ones(rows, outputs, dtype=torch.float64)
    for term in terms:
        here = slice(term.first, term.first + term.rows)
        expected[here] += _expected(y, x, bias, term)
        if term.a is not None and term.b is not None:
            reach[here] += x[here].double().abs() @ term.a.double().abs().T @ term.b.double().abs()
    packed = pack(terms)
    for level in native.isa_levels():
        native.select_isa(level)
        ours = y.clone()
        add_packed(ours, x, bias, packed)
        assert bool(((ours - expected).abs() <= 2.0**-18 * (reach + y.abs())).all()), level
        assert torch.equal(ours[first:], y[first:])
        for row in {0, first // 2} if first else set():
            own = [
                LoraTerm(0, 1, t.a, t.b, t.scale, t.gain, t.shift, t.weights,
                         t.stride * (row - t.first), t.stride)
                for t in terms if t.first <= row < t.first + t.rows
            ]  # fmt: skip
            alone = y[row : row + 1].clone()
            add_packed(alone, x[row : row + 1], bias, pack(own))
            assert torch.equal(alone[0], ours[row]), level


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 12), st.integers(1, 5), st.booleans(), st.data())
def test_a_banks_rows_do_not_depend_on_company(
    sizes: tuple[int, int], rows: int, adapters: int, by_token: bool, data: st.DataObject
) -> None:
    """One-hot and mixed rows, per request or per token, and rows of the base among them."""
    inputs, outputs = sizes
    generator = torch.Generator().manual_seed(rows)
    parts = {2 * n: _draw_part(data, sizes, generator) for n in range(adapters)}
    slots = (*parts, 99)  # one that this product has nothing of
    scales = torch.rand(rows, len(slots), generator=generator)
    scales *= torch.rand(scales.shape, generator=generator) < 0.5
    x, y = (torch.randn(rows, 1, size, generator=generator) for size in (inputs, outputs))
    bias = torch.randn(outputs, generator=generator)
    bank = LoraBank(0, parts)

    def run(where: slice) -> Tensor:
        own = scales[where]
        mix = AdapterMix(slots, own[:, None, None] if by_token else own)
        return bank.add_to(y[where].clone(), x[where], mix, bias)

    for level in native.isa_levels():
        native.select_isa(level)
        together = run(slice(None))
        for row in range(rows):
            assert torch.equal(run(slice(row, row + 1))[0], together[row]), level
            if not scales[row, : len(parts)].any():
                assert torch.equal(together[row], y[row])


@settings(max_examples=30, deadline=None)
@given(sizes, st.integers(1, 30), st.data())
def test_native_is_plain_torch(sizes: tuple[int, int], tokens: int, data: st.DataObject) -> None:
    inputs, outputs = sizes
    generator = torch.Generator().manual_seed(tokens)
    parts = {0: _draw_part(data, sizes, generator), 1: _draw_part(data, sizes, generator)}
    x, y = (torch.randn(1, tokens, size, generator=generator) for size in (inputs, outputs))
    bank, mix = LoraBank(0, parts), AdapterMix((0, 1), torch.tensor([[0.7, -0.3]]))
    ours = bank.add_to(y.clone(), x, mix, None)
    plain = y.clone()
    (plan,) = mix.plans.values()
    lora.add_plainly(plain, x, None, plan.terms)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-3)


def test_what_is_not_finite_shows_in_its_row_alone() -> None:
    part = LoraPart(torch.ones(4, 40), torch.ones(4, 50))
    x, y = torch.ones(3, 1, 40), torch.zeros(3, 1, 50)
    x[1, 0, 39] = float("inf")
    mix = AdapterMix((0,), torch.tensor([[1.0], [1.0], [0.0]]))
    LoraBank(0, {0: part}).add_to(y, x, mix, None)
    assert bool((y[0] == 160).all())
    assert not bool(y[1].isfinite().any())
    assert not bool(y[2].any())


def test_entries_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="LoraEntry"):
        native.lora_at([0, 0, 0], [1, 1], b"123", 1)
