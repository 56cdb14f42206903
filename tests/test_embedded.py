"""The model inside the package: the same text as transformers, and small enough to ship."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from starquill import Engine, SamplingParams, load
from starquill.checkpoint.hub import embedded_model
from starquill.engine.loaded import LoadedModel

HERE = Path(__file__)
LONG = HERE.read_text(encoding="utf-8")  # past the window of 512 tokens
PROMPTS = {
    "a head": "def fibonacci(n):",
    "a class": "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
    "imports": "import os\nimport sys\n\n\ndef main():",
    "past the window": LONG,
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load("default")


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_greedy_text_equals_transformers(loaded: LoadedModel, prompt: str) -> None:
    """64 tokens, without healing, which transformers does not do."""
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        embedded_model(), dtype="float32", attn_implementation="eager"
    )
    ids = loaded.require_tokenizer().encode(prompt)
    assert len(ids) > 512 or prompt is not LONG
    with torch.inference_mode():
        expected = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
        )[0, len(ids) :].tolist()
    ours = [d.token_id for d in Engine(loaded).generate(ids, SamplingParams(max_tokens=64))]
    assert ours == expected


def test_it_is_small_enough_to_ship() -> None:
    size = sum(path.stat().st_size for path in embedded_model().iterdir())
    assert size <= 12_000_000


def test_its_tokenizer_is_starcoder2s_in_small(loaded: LoadedModel) -> None:
    tokenizer = loaded.require_tokenizer()
    assert tokenizer.id_bound == loaded.config.vocab_size
    assert [tokenizer.id_of(t) for t in ("<|endoftext|>", "<fim_prefix>", "<PASSWORD>")] == [
        0,
        1,
        37,
    ]
    assert len(tokenizer.encode("2024")) == 4
