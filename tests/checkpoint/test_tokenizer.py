"""The tokenizer: published vectors, exact round trips, and who may write control tokens."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from starquill.checkpoint.tokenizer import FimTokens, Tokenizer, load_tokenizer
from starquill.errors import BadRequestError, CheckpointError, UnsupportedError
from tests import tiny

END = tiny.SPECIAL_TOKENS[0]
BYTES = Tokenizer(tiny.byte_tokenizer())
# Text of any kind, and text in which tags, parts of tags and spaces meet.
PARTS = st.sampled_from(["<fim_", "prefix>", "<|", "|>", "<", ">", " ", "\n"]) | st.text(max_size=3)
PLAIN = st.text() | st.lists(PARTS).map("".join)
TEXT = PLAIN | st.lists(st.sampled_from(tiny.SPECIAL_TOKENS) | PARTS).map("".join)
every_text = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@functools.cache
def _real() -> Tokenizer:
    """StarCoder2's own vocabulary and merges."""
    return Tokenizer(tiny.real_tokenizer_definition())


@functools.cache
def _vectors() -> list[tuple[str, list[int]]]:
    base = tiny.DATA / "starcoder2-vectors.inp"
    texts = base.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = base.with_suffix(".out").read_text(encoding="utf-8").split("\n")
    vectors = [(t, [int(i) for i in line.split()]) for t, line in zip(texts, lines, strict=True)]
    assert len(vectors) == 47
    return vectors


def _has_tag(text: str) -> bool:
    return any(tag in text for tag in tiny.SPECIAL_TOKENS)


@pytest.mark.parametrize("number", range(47))
def test_published_vectors(number: int) -> None:
    """llama.cpp's ids for StarCoder's vocabulary, from either encoder, and back again."""
    text, ids = _vectors()[number]
    tokenizer = _real()
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, parse_special=True) == ids
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode()


def test_the_real_special_tokens() -> None:
    """Ids 0 to 37 are control tokens: parsed where asked for, data elsewhere, and no text."""
    tokenizer = _real()
    assert tokenizer.special_ids == frozenset(range(38))
    assert tokenizer.id_bound == 49152
    for index in range(38):
        text = tokenizer.added[index]
        assert tokenizer.encode(f"a{text}b", parse_special=True)[1:-1] == [index]
        data = tokenizer.encode(text)
        assert len(data) > 1
        assert not tokenizer.special_ids & set(data)
        assert tokenizer.decode(data) == text
        assert tokenizer.token_bytes[index] == b""
    fim = tokenizer.fim
    assert fim is not None
    assert (fim.prefix, fim.middle, fim.suffix, fim.pad) == (1, 2, 3, 4)
    assert (fim.repo_name, fim.file_sep) == (5, 6)


def test_fim_tokens_in_qwens_spelling() -> None:
    """Qwen does not flag them as special; typed as text they are data all the same."""
    names = ("prefix", "middle", "suffix", "pad")
    special = [*(f"<|fim_{name}|>" for name in names), "<|repo_name|>", "<|file_sep|>"]
    definition = tiny.byte_tokenizer(["<|endoftext|>", *special])
    for token in definition["added_tokens"][1:]:
        token["special"] = False
    tokenizer = Tokenizer(definition)
    expected = FimTokens(prefix=1, middle=2, suffix=3, pad=4, repo_name=5, file_sep=6, by_line=True)
    assert tokenizer.fim == expected
    assert tokenizer.fim.stops == frozenset(range(1, 7))
    for index, text in enumerate(special, start=1):
        assert tokenizer.encode(text, parse_special=True) == [index]
        assert not tokenizer.special_ids & set(tokenizer.encode(text))
    lacking = Tokenizer(tiny.byte_tokenizer(["<|fim_prefix|>", "<|fim_suffix|>"]))
    assert lacking.fim is None


@every_text
@given(TEXT)
def test_real_round_trip(text: str) -> None:
    """Nothing is lost or changed with the real merges either.

    Save planes 4 to 7, where no character is assigned: StarCoder2 has no token for byte 0xf1.
    """
    assume(not any("\U00040000" <= character <= "\U0007ffff" for character in text))
    tokenizer = _real()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode()
    if not any(tag in text for tag in tokenizer.added.values()):
        assert tokenizer.encode(text, parse_special=True) == ids


@every_text
@given(TEXT)
def test_round_trip_of_data(text: str) -> None:
    """`decode(encode(text)) == text` for every text, and no id of it is a control token."""
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert BYTES.decode(ids, skip_special=False) == text
    assert b"".join(BYTES.token_bytes[i] for i in ids) == text.encode()
    assert not BYTES.special_ids & set(ids)


@every_text
@given(TEXT)
def test_round_trip_with_control_tokens(text: str) -> None:
    """Parsed tags come back when asked for, and are left out when not."""
    ids = BYTES.encode(text, parse_special=True)
    assert BYTES.decode(ids, skip_special=False) == text
    parts = [BYTES.added.get(i, "").encode() or BYTES.token_bytes[i] for i in ids]
    assert b"".join(parts) == text.encode()
    plain = b"".join(BYTES.token_bytes[i] for i in ids if i not in BYTES.special_ids)
    assert BYTES.decode(ids) == plain.decode()
    tags = [i for i in ids if i in BYTES.special_ids]
    assert bool(tags) == _has_tag(text)


@every_text
@given(PLAIN)
def test_encoders_agree_without_tags(text: str) -> None:
    """The two encoders differ in tags and in nothing else."""
    assume(not _has_tag(text))
    assert BYTES.encode(text) == BYTES.encode(text, parse_special=True)


@every_text
@given(st.binary())
def test_decoding_any_bytes(data: bytes) -> None:
    """Bytes that are no UTF-8 become U+FFFD where Python's own decoder puts it."""
    by_byte = {
        spelled: i for i, spelled in reversed([*enumerate(BYTES.token_bytes)]) if len(spelled) == 1
    }
    ids = [by_byte[data[i : i + 1]] for i in range(len(data))]
    assert BYTES.decode(ids) == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("tag", tiny.SPECIAL_TOKENS)
def test_tags_are_data_unless_parsed(tag: str) -> None:
    """The whole string, alone, doubled, amid text and beside spaces, which are never eaten."""
    index = tiny.SPECIAL_TOKENS.index(tag)
    for before, after in (("", ""), ("a", "b"), (" ", " "), ("\n", "\n"), (tag, tag)):
        text = f"{before}{tag}{after}"
        assert index not in BYTES.encode(text)
        parsed = BYTES.encode(text, parse_special=True)
        left, right = (BYTES.encode(part, parse_special=True) for part in (before, after))
        assert parsed == [*left, index, *right]


@pytest.mark.parametrize("text", ["\ud800", "ab\udcff", "\udc80x", "\U0001f600\ud83d"])
@pytest.mark.parametrize("parse_special", [True, False])
def test_lone_surrogates_are_refused(text: str, parse_special: bool) -> None:
    """No bytes stand for them; the place of the first is told."""
    at = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    with pytest.raises(BadRequestError, match=rf"^the text is not UTF-8 \(character {at}\)$"):
        BYTES.encode(text, parse_special)


@pytest.mark.parametrize("unknown", [None, END])
@pytest.mark.parametrize("parse_special", [True, False])
def test_bytes_without_a_token_are_refused(unknown: str | None, parse_special: bool) -> None:
    """StarCoder2 lacks a token for 0xf1: no byte may vanish, or become the end token."""
    definition = tiny.byte_tokenizer()
    vocabulary = definition["model"]["vocab"]
    vocabulary["no longer 0xf1"] = vocabulary.pop("ñ")  # how byte-level BPE writes 0xf1
    definition["model"]["unk_token"] = unknown
    tokenizer = Tokenizer(definition)
    with pytest.raises(BadRequestError, match=r"no token for byte 0xf1 \(character 2\)"):
        tokenizer.encode("ab\U00040000", parse_special)
    assert tokenizer.decode(tokenizer.encode("abñ", parse_special)) == "abñ"


def test_bytes_that_the_real_vocabulary_lacks_are_refused() -> None:
    """The real vocabulary lacks 0xf1 alone of the bytes that UTF-8 uses."""
    with pytest.raises(BadRequestError, match=r"no token for byte 0xf1 \(character 0\)"):
        _real().encode("\U00040000")
    spelled = {piece for piece in _real().token_bytes if len(piece) == 1}
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert {b for b in range(256) if bytes([b]) not in spelled} == never | {0xF1}


def test_token_bytes_cover_the_vocabulary() -> None:
    """One entry per id; the 256 bytes each once; nothing for control tokens."""
    table = BYTES.token_bytes
    assert len(table) == BYTES.id_bound == 320
    assert sorted(t for t in table if len(t) == 1) == [bytes([b]) for b in range(256)]
    assert [i for i, t in enumerate(table) if not t] == list(range(len(tiny.SPECIAL_TOKENS)))
    assert table[BYTES.id_of("Ċ") or 0] == b"\n"


@pytest.mark.parametrize("text", ["<tab>", "  ", "é→", "ĠĊ"])
def test_added_tokens_that_are_no_control_tokens_are_text(text: str) -> None:
    """Such tokens stand for their own characters, in both encoders, and are shown."""
    definition = tiny.byte_tokenizer(vocab_size=319)
    definition["added_tokens"].append(
        {**definition["added_tokens"][0], "id": 319, "content": text, "special": False}
    )
    tokenizer = Tokenizer(definition)
    assert tokenizer.encode(f"a{text}b")[1:-1] == [319]
    assert tokenizer.encode(f"a{text}b", parse_special=True)[1:-1] == [319]
    assert tokenizer.decode([319]) == text
    assert tokenizer.token_bytes[319] == text.encode()


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    """A file saved in training cuts at 4 tokens or pads to 16; prompts must not be."""
    definition = tiny.byte_tokenizer()
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    definition["padding"] = {
        "strategy": {"Fixed": 16},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END,
    }
    tokenizer = Tokenizer(definition)
    for text in ("abcdefgh", "ab"):
        for parse_special in (True, False):
            assert tokenizer.encode(text, parse_special) == BYTES.encode(text)


@pytest.mark.parametrize("value", [END, {"content": END, "lstrip": False}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_named_tokens(tmp_path: Path, file: str, value: Any) -> None:
    """The end token is found in either file and either form."""
    folder = tiny.write_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tiny.write_json(folder / file, {"eos_token": value, "pad_token": None})
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert (tokenizer.eos_id, tokenizer.named_token("eos_token")) == (0, END)
    assert tokenizer.named_token("pad_token") is None
    assert tokenizer.named_token("bos_token") is None


def test_a_name_that_is_no_token_has_no_id() -> None:
    assert Tokenizer(tiny.byte_tokenizer(), {"eos_token": "</s>"}).eos_id is None
    assert BYTES.eos_id is None
    assert BYTES.id_of("<|end_of_text|>") is None


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def _without_vocabulary() -> dict[str, Any]:
    definition = tiny.byte_tokenizer()
    del definition["model"]["vocab"]
    return definition


def _with_unknown_merge() -> dict[str, Any]:
    definition = tiny.byte_tokenizer()
    definition["model"]["merges"] = [["nowhere", "found"]]
    return definition


@pytest.mark.parametrize(
    "definition",
    [
        {},
        {"model": None},
        {"model": {"type": "BPE"}},
        {"version": "1.0", "model": {"type": "Novel", "vocab": {}}},
        _without_vocabulary(),
        _with_unknown_merge(),
        {**tiny.byte_tokenizer(), "added_tokens": 5},
        {**tiny.byte_tokenizer(), "added_tokens": [{"content": "no id"}]},
        {**tiny.byte_tokenizer(), "added_tokens": ["text"]},
        {**tiny.byte_tokenizer(), "pre_tokenizer": {"type": "Unknown"}},
    ],
    ids=lambda definition: json.dumps(definition)[:40],
)
def test_broken_definitions_are_named(tmp_path: Path, definition: dict[str, Any]) -> None:
    """Whatever is wrong with `tokenizer.json`, the error is one line that names the file."""
    tiny.write_json(tmp_path / "tokenizer.json", definition)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'} is not a tokenizer definition: ")
    assert "\n" not in message


@pytest.mark.parametrize("decoder", [None, {"type": "Metaspace"}, {"type": "WordPiece"}])
def test_other_decoders_are_refused(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    """Streaming and healing need the bytes of every token."""
    full = {"replacement": "▁", "prepend_scheme": "always", "split": True}
    full |= {"prefix": "##", "cleanup": True}
    definition = {**tiny.byte_tokenizer(), "decoder": decoder and {**full, **decoder}}
    tiny.write_json(tmp_path / "tokenizer.json", definition)
    with pytest.raises(UnsupportedError, match=r"the decoder is .*implemented: ByteLevel"):
        load_tokenizer(tmp_path)
