"""Requests to models with SentencePiece's tokenizers: prompts, streamed text, grammars, offsets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.engine.engine import Engine
from starquill.engine.grammar import choice_grammar, json_object_grammar, regex_grammar
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import chat_request, plain_request
from starquill.loading import load
from starquill.server.llamacpp import completion_request
from starquill.server.llamacpp_schema import CompletionBody
from starquill.server.metrics import MeasuredEngine, Metrics
from starquill.types import Delta, GenerateRequest, SamplingParams
from tests import moe, pieces, tiny
from tests.server.serving import NAME, asking

FEW = SamplingParams(max_tokens=12)
thorough = settings(deadline=None, derandomize=True, max_examples=100)
SAID = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """Tiny random mixtures with the tokenizer of each form."""
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    made = {}
    for form in pieces.FORMS:
        family = "phimoe" if form == "phi" else "mixtral"
        raw = moe.config(family, vocab_size=pieces.VOCABULARY, bos_token_id=1, eos_token_id=2)
        folder = moe.write(tmp_path_factory.mktemp(family), raw, moe.reference(raw))
        tiny.write_json(folder / "tokenizer.json", pieces.definition(form))
        tiny.write_json(folder / "tokenizer_config.json", pieces.settings(form))
        made[form] = load(folder, allow_padded_vocab=True)
    return made


@pytest.fixture(scope="module", params=pieces.FORMS)
def loaded(models: dict[str, LoadedModel], request: pytest.FixtureRequest) -> LoadedModel:
    return models[request.param]


def library(loaded: LoadedModel) -> tokenizers.Tokenizer:
    definition = loaded.require_tokenizer().definition
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


def ids_of(loaded: LoadedModel, *names: str) -> list[int]:
    found = [loaded.require_tokenizer().id_of(name) for name in names]
    assert None not in found
    return [i for i in found if i is not None]


def scripted(loaded: LoadedModel, ids: Sequence[int], request: GenerateRequest) -> list[Delta]:
    """What is answered when the model writes `ids`."""
    stands_in = tiny.scripted(loaded, ids, len(request.prompt_ids))
    return list(Engine(stands_in).generate(request))


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


# --- prompts ---


def test_the_start_token_is_there_once(loaded: LoadedModel) -> None:
    """Whether it was typed or not, and in a conversation; a model without one gets none."""
    starts = [1] if loaded.require_tokenizer().start_ids else []
    made = library(loaded)
    for prompt in ("def f", "x", " \n", "😀"):
        request = plain_request(loaded, prompt, FEW, heal=False)
        assert list(request.prompt_ids) == made.encode(prompt).ids
        assert [i for i in request.prompt_ids if i == 1] == starts
    typed = plain_request(loaded, "<s>def f", FEW, heal=False)
    assert list(typed.prompt_ids) == made.encode("<s>def f", add_special_tokens=False).ids
    data = plain_request(loaded, "<s>def f", FEW, heal=False, parse_special=False)
    assert [i for i in data.prompt_ids if i == 1] == starts
    assert [i for i in chat_request(loaded, SAID, FEW).prompt_ids if i == 1] == starts
    assert plain_request(loaded, "", FEW).prompt_ids == (1,)


def test_what_goes_on_gets_no_start(loaded: LoadedModel) -> None:
    request = plain_request(loaded, "def f", FEW, heal=False, start=False)
    table = loaded.require_tokenizer().token_bytes
    assert b"".join(table[i] for i in request.prompt_ids) == b"def f"
    assert 1 not in request.prompt_ids


# --- streaming ---


@thorough
@given(
    st.sampled_from(pieces.FORMS),
    st.sampled_from(["", "def f", "a ", "x\n", "<s>"]),
    st.sampled_from(pieces.TEXTS) | st.text(max_size=6),
)
def test_streamed_text_is_the_libraries(
    models: dict[str, LoadedModel], form: str, prompt: str, text: str
) -> None:
    """Behind a prompt it goes on; where it is a text of its own, that text."""
    loaded = models[form]
    tokenizer, made = loaded.require_tokenizer(), library(loaded)
    written = tokenizer.encode(text)
    params = SamplingParams(max_tokens=max(len(written), 1))
    request = plain_request(loaded, prompt, params, heal=False)
    if not written or len(request.prompt_ids) + len(written) > 60:
        return
    answer = text_of(scripted(loaded, written, request))
    before = made.decode(request.prompt_ids)
    assert before + answer == made.decode([*request.prompt_ids, *written])
    if not before:
        assert answer == made.decode(written)


def test_a_characters_bytes_wait_for_each_other(loaded: LoadedModel) -> None:
    smile = ids_of(loaded, "<0xF0>", "<0x9F>", "<0x98>", "<0x80>")
    request = plain_request(loaded, "x", SamplingParams(max_tokens=6), heal=False)
    deltas = scripted(loaded, [*smile, *ids_of(loaded, "▁def", "<0x80>")], request)
    assert [delta.text for delta in deltas] == ["", "", "", "😀", " def", "\ufffd"]


def test_an_answer_is_a_text_of_its_own(loaded: LoadedModel) -> None:
    """As transformers' decoding of the new ids alone: the first space is the tokenizer's."""
    written = ids_of(loaded, "▁def", "▁", "x", "▁", "▁", "x")
    request = chat_request(loaded, SAID, SamplingParams(max_tokens=6))
    answer = text_of(scripted(loaded, written, request))
    assert answer == library(loaded).decode(written) == "def x  x"


def test_stop_strings(loaded: LoadedModel) -> None:
    """Over tokens, at spaces, and behind the space that is no text."""
    written = ids_of(loaded, "▁def", "▁", "x", "<0x0A>", "▁", "y")
    for stop, told in ((" x", "def"), ("f x", "de"), ("\n ", "def x"), (" d", "def x\n y")):
        params = SamplingParams(max_tokens=6, stop=(stop,))
        deltas = scripted(loaded, written, chat_request(loaded, SAID, params))
        ending = "length" if stop == " d" else "stop"
        assert (text_of(deltas), deltas[-1].finish_reason) == (told, ending)


# --- healing ---


@thorough
@given(st.sampled_from(pieces.FORMS), st.sampled_from(["def f", "a b", "x  ", "é", "x\n", "im"]))
def test_healing(models: dict[str, LoadedModel], form: str, prompt: str) -> None:
    """What is taken back is spelled again, and prompt and output are one text."""
    loaded = models[form]
    tokenizer = loaded.require_tokenizer()
    request = plain_request(loaded, prompt, SamplingParams(max_tokens=6, temperature=1.0, seed=1))
    kept = b"".join(tokenizer.token_bytes[i] for i in request.prompt_ids)
    assert kept + request.heal == b" " + prompt.encode()
    deltas = list(Engine(loaded).generate(request))
    ids = [delta.token_id for delta in deltas if delta.token_id is not None]
    spelled = b"".join(tokenizer.token_bytes[i] for i in ids)
    assert spelled.startswith(request.heal)
    shown = spelled[len(request.heal) :].decode("utf-8", errors="replace")
    assert shown.startswith(text_of(deltas))


def test_healing_chooses_longer_words(loaded: LoadedModel) -> None:
    """Taken back is " de": "▁def" is among the tokens that spell it and more."""
    spelled = loaded.healing.allowed(b" de")
    assert set(ids_of(loaded, "▁def", "▁", "<0x20>")) <= set(spelled)
    assert not set(ids_of(loaded, "x", "<0xF0>")) & set(spelled)


# --- grammars ---


@pytest.mark.parametrize("seed", range(3))
def test_grammars(loaded: LoadedModel, seed: int) -> None:
    """Random weights write what the grammar allows, in characters and in bytes, to the end."""
    for grammar, check in (
        (choice_grammar(["yes", "no 😀"]), lambda text: text in ("yes", "no 😀")),
        (regex_grammar(r" ?[ab]{3}é"), lambda text: text.lstrip(" ")[3:] == "é"),
        (regex_grammar(r" x"), lambda text: text == " x"),
    ):
        params = SamplingParams(max_tokens=24, temperature=1.5, seed=seed)
        for made in (plain_request(loaded, "x", params), chat_request(loaded, SAID, params)):
            request = _with_grammar(made, grammar)
            deltas = list(Engine(loaded).generate(request))
            assert deltas[-1].finish_reason == "stop"
            assert check(text_of(deltas))


def test_json(loaded: LoadedModel) -> None:
    made = chat_request(loaded, SAID, SamplingParams(max_tokens=30, temperature=1.0, seed=3))
    text = text_of(list(Engine(loaded).generate(_with_grammar(made, json_object_grammar()))))
    assert text.lstrip().startswith("{")


def _with_grammar(request: GenerateRequest, grammar: str) -> GenerateRequest:
    return replace(request, grammar=grammar)


# --- the server ---


@pytest.mark.parametrize("prompt", ["def f", "<s>def f", "é x", [1, 300, 400], [300, 301]])
def test_offsets_of_an_echoed_prompt(loaded: LoadedModel, prompt: Any) -> None:
    """Each token's text stands at its offset, but for what is not in the text."""
    body = {"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 1, "temperature": 0}
    with asking(loaded) as client:
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
    text, told = choice["text"], choice["logprobs"]
    if isinstance(prompt, str):
        assert text.startswith(prompt)
    offsets, names = told["text_offset"], told["tokens"]
    assert offsets == sorted(offsets)
    for name, start, end in zip(names, offsets, [*offsets[1:], len(text)], strict=True):
        shown = text[start:end].lstrip("\ufffd")  # of a byte before it, which was no character
        if not name.startswith("bytes:") and name not in loaded.require_tokenizer().added.values():
            assert shown in (name, name.removeprefix(" "))
            assert shown == name or start in (0, 3)
    typed = isinstance(prompt, list) or prompt.startswith("<s>")
    assert (names[0] == "<s>" and offsets[1] == 0) == (bool(names[0] == "<s>") and not typed)


def test_tokenizing_over_http(loaded: LoadedModel) -> None:
    """Ids and their pieces, and back; single tokens keep their spaces."""
    with asking(loaded) as client:
        told = client.post("/tokenize", json={"content": "def x é", "with_pieces": True}).json()
        ids = [token["id"] for token in told["tokens"]]
        assert ids == library(loaded).encode("def x é", add_special_tokens=False).ids
        back = client.post("/detokenize", json={"tokens": ids}).json()["content"]
        assert back == "def x é"
        body = {"model": NAME, "messages": SAID, "max_tokens": 2, "logprobs": True}
        entry = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    for token in entry["logprobs"]["content"]:
        if token["bytes"] is not None:
            assert token["token"] == bytes(token["bytes"]).decode("utf-8", errors="replace")


def test_lists_of_text_and_ids(loaded: LoadedModel) -> None:
    """llama.cpp's: the start token in front of text; text behind ids goes on."""
    plain = Engine(loaded)
    engine = MeasuredEngine(plain, Metrics(plain))
    starts = list(loaded.require_tokenizer().start_ids)
    (x,) = ids_of(loaded, "x")
    body = CompletionBody(prompt=["def", x])
    first = completion_request(engine, body, ["def", x]).prompt_ids
    assert list(first) == [*starts, *ids_of(loaded, "▁def"), x]
    then = completion_request(engine, body, [x, "def"]).prompt_ids
    assert list(then) == [x, *loaded.require_tokenizer().encode("def", inside=True)]
