"""Which layers each stage has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starquill.errors import BadRequestError
from starquill.placement.stages import Stages, read_stages

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=9)


def largest(found: Sequence[range], layers: Sequence[int], outside: int) -> int:
    sums = [sum(layers[n] for n in part) for part in found]
    return max([sums[0] + outside, *sums[1:]])


@given(sizes, st.integers(0, 200), st.data())
def test_layers_are_shared_out_as_evenly_as_can_be(
    layers: list[int], outside: int, data: st.DataObject
) -> None:
    """Against all ways to cut them."""
    count = data.draw(st.integers(1, len(layers)))
    found = Stages(count).layers(layers, outside)
    assert [n for part in found for n in part] == list(range(len(layers)))
    assert len(found) == count
    assert all(found)
    cuts = combinations(range(1, len(layers)), count - 1)
    ways = [
        [range(a, b) for a, b in zip((0, *cut), (*cut, len(layers)), strict=True)] for cut in cuts
    ]
    assert largest(found, layers, outside) == min(largest(way, layers, outside) for way in ways)


def test_layers_may_be_told() -> None:
    assert read_stages(" 0-11, 12-29 ").layers([1] * 30, 5) == (range(12), range(12, 30))
    assert read_stages("0,1-2").layers([1] * 3, 5) == (range(1), range(1, 3))
    assert read_stages("3").count == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "1 or more"),
        ("-2", "1 or more"),
        ("two", "1 or more"),
        ("0-3", "1 or more"),
        ("", "1 or more"),
        ("0-3,5-7", "5-7 .expected to begin with layer 4"),
        ("1-3,2-4,9-8", "1-3 .* layer 0.*2-4 .* layer 4.*9-8"),
        ("0-3,4-2", "4-2 .expected the first layer before the last"),
    ],
)
def test_mistakes_are_named(text: str, told: str) -> None:
    with pytest.raises(BadRequestError, match=told):
        read_stages(text)


def test_they_are_of_the_model() -> None:
    with pytest.raises(BadRequestError, match=r"ends with layer 3 \(expected 5"):
        read_stages("0-1,2-3").layers([1] * 6, 0)
    with pytest.raises(BadRequestError, match="5, and the model has 4 layers"):
        read_stages("5").layers([1] * 4, 0)
