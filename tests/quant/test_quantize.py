"""What quantizing promises, for every scheme: bounds, exactness, odd values, importance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starquill.errors import NumericsError
from starquill.quant.affine import BITS, GROUPS, AffineWeight
from starquill.quant.quantize import quantize
from starquill.quant.schemes import Scheme

METHODS = ("rtn", "hqq")
# The power of the error that each keeps small.
NORMS = {"rtn": 2.0, "hqq": 2.5}
SCHEMES = [Scheme(b, g, m) for b in BITS for g in GROUPS for m in METHODS]
FEW = [Scheme(b, g, m) for b, g in ((2, 32), (3, 16), (4, 64), (8, 128)) for m in METHODS]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s}-{s.method}")
few_schemes = pytest.mark.parametrize("scheme", FEW, ids=lambda s: f"{s}-{s.method}")


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _groups(weight: Tensor, group: int) -> Tensor:
    return weight.double().unflatten(-1, (-1, group))


def _plain(weight: Tensor, scheme: Scheme) -> Tensor:
    """Rounding to levels spread over each group's minimum to maximum, in float64."""
    grouped = _groups(weight, scheme.group)
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    step = (high - low) / (2**scheme.bits - 1)
    step = torch.where(step == 0, 1.0, step)
    return (((grouped - low) / step).round() * step + low).flatten(-2)


def _power(error: Tensor, group: int, norm: float, importance: Tensor | None = None) -> Tensor:
    """Sum of |error|^norm of each group, each input weighted."""
    weighted = error.double().abs().pow(norm)
    if importance is not None:
        weighted = weighted * importance.double()
    return _groups(weighted, group).sum(-1)


def _storage_error(weight: Tensor, made: AffineWeight) -> Tensor:
    """The most that rounding scale and bias to their dtype can move a value, for each group.

    Half a unit in the last place of each; the scale's is multiplied by the highest level.
    """
    half = made.scales.dtype == torch.float16
    relative, least = (2.0**-11, 2.0**-25) if half else (2.0**-24, 2.0**-150)
    grouped = _groups(weight, made.group)
    span = grouped.amax(-1) - grouped.amin(-1)
    reach = grouped.abs().amax(-1)
    return relative * (2 * reach + 2 * span) + least * (2**made.bits)


@every_scheme
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**31), scale=st.sampled_from([0.02, 1.0, 300.0]), shift=st.floats(-2, 2)
)
def test_error_is_within_the_groups_range_by_levels(
    scheme: Scheme, seed: int, scale: float, shift: float
) -> None:
    """Clipping may cost one value more, never the group: its squares stay below plain rounding's
    bound of half a step each."""
    weight = (_normal(4, 2 * scheme.group, seed=seed) + shift) * scale
    made = quantize(weight, scheme)
    grouped = _groups(weight, scheme.group)
    span = grouped.amax(-1) - grouped.amin(-1)
    step = span / (2**scheme.bits - 1)
    slack = _storage_error(weight, made)
    error = _power(made.dequantize() - weight, scheme.group, 2).sqrt()
    bound = scheme.group**0.5 * (step / 2 + slack)
    if scheme.method == "hqq":  # bounds other powers than the squares
        norm = NORMS["hqq"]
        error = _power(made.dequantize() - weight, scheme.group, norm)
        bound = scheme.group * (step / 2 + slack).pow(norm)
    assert bool((error <= bound * (1 + 1e-5)).all())


@every_scheme
@pytest.mark.parametrize("kind", ["normal", "offset", "heavy tails", "sparse", "one sign"])
def test_never_worse_than_plain_rounding(scheme: Scheme, kind: str) -> None:
    weight = _normal(16, 2 * scheme.group)
    weight = {
        "normal": weight,
        "offset": weight + 3,
        "heavy tails": weight**3,
        "sparse": weight * (weight.abs() > 1),
        "one sign": weight.abs(),
    }[kind]
    made = quantize(weight, scheme)
    norm = NORMS[scheme.method]
    ours = _power(made.dequantize() - weight, scheme.group, norm)
    plain = _power(_plain(weight, scheme) - weight, scheme.group, norm)
    slack = scheme.group * _storage_error(weight, made).pow(norm)
    assert bool((ours <= plain * 1.01 + slack).all())
    # Scale and bias in float16 cost next to nothing on the whole.
    assert float(ours.sum()) <= float(plain.sum()) * (1.001 if scheme.bits < 8 else 1.05)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_search_finds_what_plain_rounding_does_not(bits: int) -> None:
    """At few bits, clipping and refitting are worth a good part of the error."""
    weight = _normal(64, 128)
    scheme = Scheme(bits, 64, "rtn")
    ours = float((quantize(weight, scheme).dequantize() - weight).square().sum())
    plain = float((_plain(weight, scheme) - weight).square().sum())
    assert ours < plain * {2: 0.7, 3: 0.85, 4: 0.97}[bits]


@every_scheme
def test_values_on_a_grid_stay(scheme: Scheme) -> None:
    """Every level used, scale and bias short enough for float16: nothing is lost."""
    top = 2**scheme.bits - 1
    generator = torch.Generator().manual_seed(scheme.bits)
    q = torch.randint(0, top + 1, (6, 3 * scheme.group), generator=generator)
    q[:, :: scheme.group], q[:, 1 :: scheme.group] = 0, top
    scale = torch.tensor([0.5, 2.0**-9, 0.125])[None].repeat_interleave(scheme.group, 1)
    weight = (q - top // 2) * scale
    made = quantize(weight, scheme)
    torch.testing.assert_close(made.dequantize(), weight, rtol=2**-11, atol=0)


@every_scheme
@pytest.mark.parametrize("value", [0.0, 1.0, -0.75, 2.0**-6, 1000.0, -60000.0])
def test_an_all_equal_group_is_its_value(scheme: Scheme, value: float) -> None:
    weight = torch.full((3, 2 * scheme.group), value)
    assert torch.equal(quantize(weight, scheme).dequantize(), weight)
    weight[1, : scheme.group] = _normal(scheme.group)
    held = quantize(weight, scheme).dequantize()
    flat = torch.tensor([[True, True], [False, True], [True, True]])
    flat = flat.repeat_interleave(scheme.group, 1)
    assert torch.equal(held[flat], weight[flat])
    assert bool(held.isfinite().all())


@few_schemes
@pytest.mark.parametrize("value", [0.1, 1 / 3, -2e-5, 70000.0, -1e30, 3e38, 1e-38, 1e-42, -1.4e-45])
def test_an_all_equal_group_of_any_value(scheme: Scheme, value: float) -> None:
    weight = torch.full((2, scheme.group), value)
    made = quantize(weight, scheme)
    bound = 2**-11 if made.biases.dtype == torch.float16 else 2**-20
    torch.testing.assert_close(made.dequantize(), weight, rtol=bound, atol=3e-45)


@every_scheme
@pytest.mark.parametrize("size", [1e-40, 1e-37, 1e-20, 1e-7, 1e-3, 7e4, 1e6, 1e30, 1e37])
def test_any_size_of_weights_is_quantized_alike(scheme: Scheme, size: float) -> None:
    """Denormals, and scales that float16 cannot hold: the error follows the weights' size."""
    weight = _normal(4, scheme.group) * size
    made = quantize(weight, scheme)
    assert bool(made.scales.isfinite().all())
    assert bool(made.biases.isfinite().all())
    held = made.dequantize()
    assert bool(held.isfinite().all())
    step = (weight.amax(-1) - weight.amin(-1)).double() / (2**scheme.bits - 1)
    norm = NORMS[scheme.method]
    error = _power(held - weight, scheme.group, norm)[:, 0]
    # 1.4e-45 is float32's least: a scale can be off by half of that, times the levels.
    rounding = 2.0**-10 * weight.double().abs().amax(-1) + 1.5e-45 * 2**scheme.bits
    assert bool((error <= scheme.group * (step / 2 + rounding).pow(norm) * 1.0001).all())


@few_schemes
def test_groups_of_very_different_sizes(scheme: Scheme) -> None:
    """A large group beside a small one must not take its precision away."""
    sizes = torch.tensor([1e-3, 50000.0, 1.0, 0.02]).repeat_interleave(scheme.group)
    weight = _normal(8, len(sizes)).clamp(-1, 1) * sizes
    made = quantize(weight, scheme)
    norm = NORMS[scheme.method]
    ours = _power(made.dequantize() - weight, scheme.group, norm)
    plain = _power(_plain(weight, scheme) - weight, scheme.group, norm)
    slack = scheme.group * _storage_error(weight, made).pow(norm)
    assert bool((ours <= plain * 1.01 + slack).all())


@few_schemes
@pytest.mark.parametrize("outlier", [100.0, 5e4, -1e7])
def test_one_huge_value_costs_its_own_group_alone(scheme: Scheme, outlier: float) -> None:
    weight = _normal(4, 2 * scheme.group)
    norm = NORMS[scheme.method]
    calm = _power(quantize(weight, scheme).dequantize() - weight, scheme.group, norm)
    weight[1, 3] = outlier
    held = quantize(weight, scheme).dequantize()
    assert bool(held.isfinite().all())
    hit = torch.zeros_like(weight, dtype=torch.bool)
    hit[1, : scheme.group] = True
    others = _power(held - weight, scheme.group, norm)
    others[1, 0] = 0
    assert bool((others <= calm * 1.05).all())
    if scheme.method == "rtn":
        step = abs(outlier) / (2**scheme.bits - 1)
        error = float((held - weight)[hit].square().sum().sqrt())
        assert error <= 1.1 * step / 2 * scheme.group**0.5


@few_schemes
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite_are_an_error(scheme: Scheme, value: float, dtype: Any) -> None:
    weight = _normal(5, 2 * scheme.group).to(dtype)
    weight[4, -1] = value
    with pytest.raises(NumericsError, match="not finite"):
        quantize(weight, scheme)


@few_schemes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_sources_are_read_as_what_they_are(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = _normal(6, 2 * scheme.group).to(dtype)
    ours, wide = quantize(weight, scheme), quantize(weight.float(), scheme)
    assert torch.equal(ours.packed, wide.packed)
    assert torch.equal(ours.scales, wide.scales)
    assert torch.equal(ours.biases, wide.biases)


def _assert_alike(scheme: Scheme, weight: Tensor, one: Tensor, other: Tensor) -> None:
    """Equal; or equally good, where how long hqq refines depends on its neighbours."""
    if scheme.method == "rtn":
        assert torch.equal(one, other)
        return
    errors = [float(_power(x - weight, scheme.group, NORMS["hqq"]).sum()) for x in (one, other)]
    assert max(errors) <= 1.1 * min(errors)


@few_schemes
@pytest.mark.parametrize("lead", [(), (1,), (3, 2), (2, 2, 3)], ids=str)
def test_leading_axes_are_quantized_row_by_row(scheme: Scheme, lead: tuple[int, ...]) -> None:
    weight = _normal(*lead, 5, 2 * scheme.group)
    made = quantize(weight, scheme)
    assert made.shape == tuple(weight.shape)
    assert (made.bits, made.group) == (scheme.bits, scheme.group)
    rows = weight.flatten(0, -2)
    alone = torch.cat([quantize(row[None], scheme).dequantize() for row in rows])
    _assert_alike(scheme, rows, made.dequantize().flatten(0, -2), alone)


@pytest.mark.parametrize("rows", [1, 2047, 2049, 4099])
def test_any_number_of_rows(rows: int) -> None:
    """Rows are worked on in bands; the last may be short."""
    weight = _normal(rows, 128, seed=rows)
    made = quantize(weight, Scheme(4, 64, "rtn"))
    assert made.shape == (rows, 128)
    tail = quantize(weight[-3:], Scheme(4, 64, "rtn"))
    assert torch.equal(made[-3:].dequantize(), tail.dequantize())


@pytest.mark.parametrize(
    "scheme", [Scheme(b, g, m) for b in BITS for g in (16, 32) for m in METHODS]
)
@pytest.mark.parametrize("groups", [1, 3, 5, 7])
def test_odd_numbers_of_groups(scheme: Scheme, groups: int) -> None:
    """Rows of 16, 48 or 96 values end within a 32-bit word at odd bits."""
    weight = _normal(3, groups * scheme.group, seed=groups)
    made = quantize(weight, scheme)
    assert made.shape == tuple(weight.shape)
    head = weight[:, : scheme.group]
    first = made.dequantize()[:, : scheme.group]
    _assert_alike(scheme, head, first, quantize(head, scheme).dequantize())


def test_a_view_is_quantized_like_a_copy() -> None:
    weight = _normal(128, 8).t()
    assert not weight.is_contiguous()
    scheme = Scheme(4, 64)
    copy = quantize(weight.contiguous(), scheme)
    assert torch.equal(quantize(weight, scheme).dequantize(), copy.dequantize())


@every_scheme
def test_importance_lowers_the_error_that_it_weights(scheme: Scheme) -> None:
    weight = _normal(32, 2 * scheme.group)
    importance = _normal(2 * scheme.group, seed=5).exp().square()
    norm = NORMS[scheme.method]
    plain, told = quantize(weight, scheme), quantize(weight, scheme, importance)
    before, after = (
        float(_power(made.dequantize() - weight, scheme.group, norm, importance).sum())
        for made in (plain, told)
    )
    assert after < before
    if scheme.bits <= 4 and scheme.method == "rtn":
        assert after < 0.97 * before


@few_schemes
@pytest.mark.parametrize("factor", [2.0**-26, 1.0, 2.0**26])
def test_only_the_proportions_of_importance_count(scheme: Scheme, factor: float) -> None:
    weight = _normal(8, scheme.group)
    told = quantize(weight, scheme, torch.full((scheme.group,), factor))
    assert torch.equal(told.dequantize(), quantize(weight, scheme).dequantize())


@few_schemes
def test_inputs_that_never_occur(scheme: Scheme) -> None:
    """No importance at all, or in a whole group: as good as no calibration, and finite."""
    weight = _normal(8, 2 * scheme.group)
    plain = quantize(weight, scheme).dequantize()
    for absent in (slice(None), slice(scheme.group)):
        importance = torch.ones(2 * scheme.group)
        importance[absent] = 0
        held = quantize(weight, scheme, importance).dequantize()
        torch.testing.assert_close(held, plain, rtol=0, atol=1e-3)


@every_scheme
def test_the_same_weights_give_the_same_bytes(scheme: Scheme) -> None:
    weight = _normal(9, 2 * scheme.group)
    before = weight.clone()
    first, second = quantize(weight, scheme), quantize(weight.clone(), scheme)
    assert torch.equal(weight, before)
    for part in ("packed", "scales", "biases"):
        assert torch.equal(getattr(first, part), getattr(second, part))
    auto = quantize(weight, replace(scheme, method="auto"))
    if replace(scheme, method="auto").resolved_method == scheme.method:
        assert torch.equal(auto.packed, first.packed)


@few_schemes
def test_quantizing_again_changes_nothing(scheme: Scheme) -> None:
    """What is quantized already is on a grid; twice is no worse than once."""
    weight = _normal(8, scheme.group)
    once = quantize(weight, scheme).dequantize()
    twice = quantize(once, scheme).dequantize()
    step = (once.amax(-1) - once.amin(-1)) / (2**scheme.bits - 1)
    assert bool(((twice - once).abs().amax(-1) <= step * 0.02 + 2**-10).all())
