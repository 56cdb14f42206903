"""Text from quantized models: the same whether weights are unpacked in kernels or written out."""

from __future__ import annotations

import pytest

import starquill
from starquill.kernels.native import native
from starquill.quant import affine

PROMPTS = ("import os\n", "class Stack:\n    def push(self, item):\n", "# A list of primes\n")


@pytest.mark.parametrize("quant", ["4", "q3-g32", "8"])
def test_exact_products_give_the_text_of_weights_written_out(
    monkeypatch: pytest.MonkeyPatch, quant: str
) -> None:
    params = starquill.SamplingParams(max_tokens=48)
    loaded = starquill.load("default", quant=quant, exact=True)
    ours = [starquill.Engine(loaded).complete(prompt, params) for prompt in PROMPTS]
    monkeypatch.setattr(affine, "serves", lambda _: False)
    plain = starquill.load("default", quant=quant, exact=True)
    assert plain.model.model.layers[0].mlp.c_fc.weight._kernel is None
    written_out = [starquill.Engine(plain).complete(prompt, params) for prompt in PROMPTS]
    assert ours == written_out


@pytest.mark.skipif(native is None, reason="the native kernels were not built")
def test_rounded_activations_hardly_change_the_text() -> None:
    """int8 activations may tip a near tie; most of the text stays."""
    params = starquill.SamplingParams(max_tokens=48)
    texts = [
        [
            starquill.Engine(starquill.load("default", quant="6", exact=exact)).complete(
                prompt, params
            )
            for prompt in PROMPTS
        ]
        for exact in (False, True)
    ]
    same = [ours == theirs for ours, theirs in zip(*texts, strict=True)]
    assert sum(same) >= 2
