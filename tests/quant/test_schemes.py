"""Names of schemes: which are read, which are refused and with what, and what fits a width."""

from __future__ import annotations

import pytest

from starquill.errors import BadRequestError
from starquill.quant.affine import BITS, GROUPS
from starquill.quant.schemes import DEFAULT_GROUP, Scheme, parse_scheme

PUBLISHED_WIDTHS = (3072, 4608, 6144, 12288, 18432, 24576)


@pytest.mark.parametrize("bits", BITS)
def test_bits_alone_get_a_sensible_group(bits: int) -> None:
    scheme = parse_scheme(str(bits))
    assert scheme == parse_scheme(f"q{bits}") == Scheme(bits, DEFAULT_GROUP[bits])
    assert scheme.method == "auto"
    assert scheme.group in GROUPS


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("method", ["", "auto", "rtn", "hqq"])
def test_every_part_may_be_named(bits: int, group: int, method: str) -> None:
    name = f"q{bits}-g{group}"
    scheme = parse_scheme(name + (f"-{method}" if method else ""))
    assert scheme == Scheme(bits, group, method or "auto")
    assert str(scheme) == name
    assert parse_scheme(str(scheme)) == Scheme(bits, group)
    assert parse_scheme(f"  {name.upper()} ") == Scheme(bits, group)


@pytest.mark.parametrize(
    ("text", "scheme"),
    [("3-hqq", Scheme(3, 64, "hqq")), ("q8-rtn", Scheme(8, 64, "rtn")), ("4-g128", Scheme(4, 128))],
)
def test_a_method_needs_no_group(text: str, scheme: Scheme) -> None:
    assert parse_scheme(text) == scheme


@pytest.mark.parametrize(
    "text",
    [
        "",
        "q",
        "1",
        "7",
        "0",
        "16",
        "44",
        "-4",
        "4.0",
        "q4g64",
        "q4-g48",
        "q4-g0",
        "q4-g256",
        "int4",
        "q4-64",
        "g64",
        "q4-g64-",
        "q4-g64-gptq",
        "q4-hqq-g64",
        "4 5",
        "Q4_K",
        "q4-g64-hqq-rtn",
        "q٤",
        "４",
        "99999999999999999999",
        "4\n5",
        "mixed-4-6-hqq",
        "q4-g064x",
        "none",
    ],
)
def test_an_unknown_scheme_is_refused_with_the_valid_ones(text: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        parse_scheme(text)
    message = str(caught.value)
    assert message.isprintable()
    assert "2, 3, 4, 5, 6, 8" in message
    assert "16, 32, 64, 128" in message
    assert "rtn" in message
    assert "hqq" in message


@pytest.mark.parametrize("bits", BITS)
def test_auto_is_half_quadratic_at_low_bits(bits: int) -> None:
    """At 4 bits and more loading has a speed to meet; below, quality counts."""
    method = parse_scheme(str(bits)).resolved_method
    assert method in ("rtn", "hqq")
    assert (method == "hqq") or bits >= 4
    for named in ("rtn", "hqq"):
        assert parse_scheme(f"{bits}-{named}").resolved_method == named


@pytest.mark.parametrize(
    ("width", "groups"),
    [
        (96, {16: 16, 32: 32, 64: 32, 128: 32}),
        (100, dict.fromkeys(GROUPS, None)),
        (33, dict.fromkeys(GROUPS, None)),
        (16, dict.fromkeys(GROUPS, 16)),
        (48, dict.fromkeys(GROUPS, 16)),
        (192, {16: 16, 32: 32, 64: 64, 128: 64}),
        (576, {16: 16, 32: 32, 64: 64, 128: 64}),
        (8, dict.fromkeys(GROUPS, None)),
        (1, dict.fromkeys(GROUPS, None)),
        *((width, {group: group for group in GROUPS}) for width in PUBLISHED_WIDTHS),
    ],
)
def test_the_largest_group_that_divides(width: int, groups: dict[int, int | None]) -> None:
    for group, expected in groups.items():
        for bits in BITS:
            fitting = Scheme(bits, group, "hqq").fitting(width)
            wanted = None if expected is None else Scheme(bits, expected, "hqq")
            assert fitting == wanted


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_never_widened(group: int) -> None:
    for width in range(1, 400):
        fitting = Scheme(4, group).fitting(width)
        dividing = [g for g in GROUPS if g <= group and width % g == 0]
        assert (fitting.group if fitting else None) == max(dividing, default=None)


@pytest.mark.parametrize(
    ("text", "bits"), [("q4-g64", 4.5), ("q2-g32", 3.0), ("q8-g128", 8.25), ("q3-g16", 5.0)]
)
def test_bits_of_a_weight_count_scale_and_bias(text: str, bits: float) -> None:
    assert parse_scheme(text).bits_per_weight == bits
