"""Topology files: ranges, single layers, patterns; later entries win; every mistake is named."""

from __future__ import annotations

import pytest

from starquill.errors import BadRequestError
from starquill.placement import read_topology

TEXT = """
"0-1": {quant: 4}
1: {quant: dense}
"/self_attn\\\\.v_proj/": {quant: 8}
"""


def test_entries_match_what_they_name() -> None:
    first, second, third = read_topology(TEXT, 3)
    names = [("model.layers.0.mlp.c_fc.weight", 0), ("model.layers.1.self_attn.v_proj.weight", 1)]
    names.append(("lm_head.weight", None))  # type: ignore[arg-type]
    assert [first.matches(*name) for name in names] == [True, True, False]
    assert [second.matches(*name) for name in names] == [False, True, False]
    assert [third.matches(*name) for name in names] == [False, True, False]
    assert [entry.quant for entry in (first, second, third)] == ["4", "dense", "8"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"0-3": {quant: 4}', "'0-3' is outside of the layers 0 to 2"),
        ('"2-1": {quant: 4}', "'2-1' is outside of the layers"),
        ('"3": {quant: 4}', "'3' is outside"),
        ('"0": {bits: 4}', r"unknown settings bits \(known: quant\)"),
        ('"0": 4', "'0' is 4"),
        ('"0": {}', "'0' sets nothing"),
        ('"/(/": {quant: 4}', "bad regular expression"),
        ('"head": {quant: 4}', "'head' names no layers"),
        ("- 1", r"holds a list \(expected"),
        ("{", "not valid YAML"),
    ],
)
def test_mistakes_are_named(text: str, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        read_topology(text, 3)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(BadRequestError, match=r"'9' is outside.*'x' names no layers"):
        read_topology('"9": {quant: 4}\nx: {quant: 4}', 3)
