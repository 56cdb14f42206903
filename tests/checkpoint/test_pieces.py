"""SentencePiece's tokenizers: ids and text are those of `tokenizers` and transformers."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.chat import chat_template
from starquill.errors import UnsupportedError
from tests import pieces

every_text = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PARTS = st.sampled_from(["def ", " ", "  ", "\n", "▁", "x", "<s", ">", "😀", "é"]) | st.text(
    max_size=3
)
TEXT = st.text() | st.lists(PARTS).map("".join)
FORM = st.sampled_from(pieces.FORMS)


@functools.cache
def ours(form: str) -> Tokenizer:
    return Tokenizer(pieces.definition(form), pieces.settings(form))


@functools.cache
def theirs(form: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(pieces.definition(form)))


@functools.cache
def in_transformers(form: str) -> Any:
    config = pieces.settings(form)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=theirs(form), **config)


def _own_space(form: str, text: str) -> str:
    """What encoding puts in front: Metaspace nothing where there is a space already."""
    return "" if not text or (form == "mixtral, newer" and text[0] in " ▁") else " "


def _after(form: str, text: str) -> str:
    """The text after a round trip, as the library gives it back."""
    return (_own_space(form, text) + text).replace("▁", " ")[bool(text) :]


@every_text
@given(FORM, TEXT)
def test_ids_and_text_of_data(form: str, text: str) -> None:
    """As the library encodes and decodes it; nothing but spaces is changed on the way."""
    ids = ours(form).encode(text)
    if not any(name in text for name in ours(form).added.values()):
        assert ids == theirs(form).encode(text, add_special_tokens=False).ids
    assert ours(form).decode(ids) == theirs(form).decode(ids)
    assert ours(form).decode(ids) == _after(form, text)
    assert not ours(form).special_ids & set(ids)


@pytest.mark.parametrize("form", pieces.FORMS)
@pytest.mark.parametrize("text", pieces.TEXTS)
def test_ids_of_known_texts(form: str, text: str) -> None:
    ids = ours(form).encode(text)
    assert ids == theirs(form).encode(text, add_special_tokens=False).ids
    assert ours(form).decode(ids) == theirs(form).decode(ids) == _after(form, text)


@every_text
@given(FORM, st.lists(st.integers(0, pieces.VOCABULARY - 1), max_size=12), st.booleans())
def test_text_of_any_ids(form: str, ids: list[int], skip: bool) -> None:
    """Also of control tokens and of bytes, where these are UTF-8: else U+FFFD stands elsewhere."""
    tokenizer = ours(form)
    ids = [i for i in ids if i < tokenizer.id_bound]
    told = theirs(form).decode(ids, skip_special_tokens=skip)
    assert ("\ufffd" in told) == ("\ufffd" in tokenizer.decode(ids, skip_special=skip))
    if "\ufffd" not in told:
        assert tokenizer.decode(ids, skip_special=skip) == told
        data = b"".join(tokenizer.token_bytes[i] for i in ids).decode()
        assert not skip or tokenizer.decode(ids) == data.removeprefix(" ")


@every_text
@given(FORM, st.lists(st.sampled_from(["<s>", "</s>", "<|end|>", "<|user|>"]) | PARTS))
def test_ids_of_text_with_control_tokens(form: str, parts: list[str]) -> None:
    """The start token stands in front once: as transformers' if it was not typed."""
    text, tokenizer = "".join(parts), ours(form)
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == theirs(form).encode(text, add_special_tokens=False).ids
    whole = in_transformers(form)(text).input_ids
    twice = form != "phi" and whole[:2] == [1, 1]
    assert tokenizer.started(ids) == (whole[1:] if twice else whole)


@pytest.mark.parametrize(
    ("form", "config", "start"),
    [
        ("mixtral", {}, (1,)),
        ("phi", {}, ()),
        ("mixtral", {"add_bos_token": False, "bos_token": "<s>"}, ()),
        ("phi", {"add_bos_token": True, "bos_token": "<s>"}, (1,)),
        ("phi", {"add_bos_token": True}, ()),
    ],
)
def test_start_tokens(form: str, config: dict[str, Any], start: tuple[int, ...]) -> None:
    """The post-processor's, unless the config says it."""
    tokenizer = Tokenizer(pieces.definition(form), config)
    assert tokenizer.start_ids == start
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(pieces.definition(form))),
        **config,
    )
    assert made("x = 1").input_ids == tokenizer.started(tokenizer.encode("x = 1"))


@every_text
@given(FORM, TEXT, TEXT)
def test_text_inside_another(form: str, before: str, after: str) -> None:
    """It gets no space in front, so that ids put together are the texts put together."""
    tokenizer = ours(form)
    ids = [*tokenizer.encode(before), *tokenizer.encode(after, inside=True)]
    data = b"".join(tokenizer.token_bytes[i] for i in ids)
    assert data == (_own_space(form, before) + before + after).replace("▁", " ").encode()


@pytest.mark.parametrize("form", pieces.FORMS)
@pytest.mark.parametrize("content", ["hi", " hi", "two\n\nlines ", "😀", "", "[/INST]"])
def test_conversations(form: str, content: str) -> None:
    """As transformers encodes the rendered text, the start token once."""
    tokenizer = ours(form)
    template = chat_template(tokenizer)
    assert template is not None
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": f"{content}."},
        {"role": "user", "content": "more"},
    ]
    rendered = in_transformers(form).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    ids = template.encode(messages)
    assert ids == theirs(form).encode(rendered, add_special_tokens=False).ids
    assert ids.count(1) == (form != "phi")


@pytest.mark.parametrize("form", pieces.FORMS)
def test_control_tokens_in_messages_are_data(form: str) -> None:
    template = chat_template(ours(form))
    assert template is not None
    plain = template.encode([{"role": "user", "content": "x"}])
    ids = template.encode([{"role": "user", "content": "</s><s> <|end|>"}])
    special = ours(form).special_ids
    assert [i for i in ids if i in special] == [i for i in plain if i in special]


@pytest.mark.parametrize("form", pieces.FORMS)
def test_single_tokens(form: str) -> None:
    tokenizer = ours(form)
    vocabulary = pieces.definition(form)["model"]["vocab"]
    assert tokenizer.token_bytes[vocabulary["<0xE2>"]] == b"\xe2"
    assert tokenizer.token_bytes[vocabulary["▁def"]] == b" def"
    assert tokenizer.piece(vocabulary["▁def"]) == " def"
    assert tokenizer.piece(1) == "<s>"
    assert tokenizer.token_bytes[0] == tokenizer.token_bytes[1] == b""
    longest = max(map(len, tokenizer.token_bytes))
    assert tokenizer.most_bytes == (None if form == "phi" else longest)


def test_a_vocabulary_that_cannot_spell_every_text_is_refused() -> None:
    definition = pieces.definition()
    names = definition["model"]["vocab"]
    definition["model"] = {
        **definition["model"],
        "vocab": {("never" if name == "<0xE2>" else name): i for name, i in names.items()},
    }
    with pytest.raises(UnsupportedError, match=r"1 of the 256 byte tokens .*<0xE2>"):
        Tokenizer(definition)


@pytest.mark.parametrize(
    "decoders",
    [
        [{"type": "ByteFallback"}, {"type": "Fuse"}],
        [{"type": "Strip", "content": " ", "start": 1, "stop": 0}],
        [{"type": "Replace", "pattern": {"String": "_"}, "content": " "}],
        [],
    ],
)
def test_other_decoders_are_refused(decoders: list[dict[str, Any]]) -> None:
    definition = pieces.definition()
    rest = definition["decoder"]["decoders"][1:3] if len(decoders) == 1 else []
    definition["decoder"] = {"type": "Sequence", "decoders": [*decoders, *rest]}
    with pytest.raises(UnsupportedError, match="the decoder is"):
        Tokenizer(definition)
