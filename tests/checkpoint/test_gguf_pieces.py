"""SentencePiece's tokenizers in GGUF: ids and text are those of the library that trained them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from starquill.checkpoint.gguf_tokenizer import tokenizer_definition
from starquill.checkpoint.tokenizer import Tokenizer
from starquill.errors import CheckpointError, UnsupportedError
from tests import pieces

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
every_text = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PARTS = st.sampled_from(["def ", "self.", "  ", "    ", "\n", "return", "x", "😀"]) | st.text(
    max_size=3
)
TEXT = st.text() | st.lists(PARTS).map("".join)


def _trained() -> sentencepiece.SentencePieceProcessor:
    """As Llama's: byte fallback, nothing normalized, a space in front of every text."""
    root = Path(__file__).parents[2] / "starquill"
    lines = [line for path in sorted(root.rglob("*.py")) for line in path.open(encoding="utf-8")]
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines[:6000]),
        model_writer=made,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.999,
        minloglevel=2,
        num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


THEIRS = _trained()


def _fields(**changes: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of it."""
    count = THEIRS.get_piece_size()
    kinds = [(THEIRS.is_unknown, UNKNOWN), (THEIRS.is_control, CONTROL), (THEIRS.is_byte, BYTE)]
    base = {
        "model": "llama",
        "pre": "default",
        "tokens": [THEIRS.id_to_piece(i) for i in range(count)],
        "scores": [THEIRS.get_score(i) for i in range(count)],
        "token_type": [next((kind for f, kind in kinds if f(i)), NORMAL) for i in range(count)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
    }
    merged = {**base, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in merged.items() if value is not ...}


def _tokenizer(**changes: Any) -> Tokenizer:
    definition, config, warnings = tokenizer_definition(_fields(**changes))
    assert not warnings
    return Tokenizer(definition, config)


OURS = _tokenizer()


@every_text
@given(TEXT)
def test_ids_and_text(text: str) -> None:
    """U+2581 is a space to it, and it ends at a zero byte."""
    text = text.replace("▁", " ").replace("\0", "")
    ids = OURS.encode(text)
    assert ids == THEIRS.encode(text)
    assert OURS.decode(ids) == text


@pytest.mark.parametrize("text", [t for t in pieces.TEXTS if "\0" not in t])
def test_known_texts(text: str) -> None:
    assert OURS.encode(text) == THEIRS.encode(text)
    assert OURS.started(OURS.encode(text)) == THEIRS.encode(text, add_bos=True)


def test_control_tokens() -> None:
    assert OURS.special_ids == {0, 1, 2}
    assert (OURS.start_ids, OURS.eos_id) == ((1,), 2)
    assert OURS.encode("<s>x", parse_special=True) == [1, *THEIRS.encode("x")]
    assert 1 not in OURS.encode("<s>x")


def test_the_files_own_settings() -> None:
    """A start token is llama.cpp's default for these; the space in front can be switched off."""
    assert _tokenizer(add_bos_token=...).start_ids == (1,)
    assert _tokenizer(add_bos_token=False).start_ids == ()
    bare = _tokenizer(add_space_prefix=False)
    assert bare.encode("def x") == OURS.encode("def x", inside=True)
    assert bare.decode(bare.encode(" def")) == " def"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "bert"}, UnsupportedError, "'bert'.*gpt2, llama"),
        ({"tokens": []}, CheckpointError, "no tokens"),
        ({"scores": ...}, CheckpointError, r"0 scores \(expected 700\)"),
        ({"scores": [0.0]}, CheckpointError, r"1 scores \(expected 700\)"),
    ],
)
def test_mistakes(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        _tokenizer(**changes)
