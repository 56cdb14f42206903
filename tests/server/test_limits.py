"""What one client sends must not keep the others waiting, whatever it is."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine import grammar as grammars
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.server import (
    chat_schema,
    completion_schema,
    llamacpp_schema,
    ollama_schema,
)
from starquill.server.schema import MOST_BIASES
from tests import tiny
from tests.server.serving import asking

CONTEXT = 64
MANY = 2000
KINDS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (completion_schema.CompletionBody, {"prompt": "a"}),
    (chat_schema.ChatBody, {"messages": [{"role": "user", "content": "a"}]}),
    (chat_schema.ChatMessage, {"role": "user", "content": "a"}),
    (llamacpp_schema.CompletionBody, {"prompt": "a"}),
    (llamacpp_schema.InfillBody, {}),
    (llamacpp_schema.TokenizeBody, {"content": "a"}),
    (llamacpp_schema.DetokenizeBody, {"tokens": [1]}),
    (ollama_schema.GenerateBody, {}),
    (ollama_schema.Options, {}),
    (ollama_schema.ChatBody, {}),
    (ollama_schema.Message, {"role": "user"}),
]
FIELDS = [(kind, good, field) for kind, good in KINDS for field in kind.model_fields]
SAID = [{"role": "user", "content": "abc"}]
# One body for each route that writes.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": SAID},
    "/completion": {"prompt": "abc"},
    "/infill": {"input_prefix": "abc", "prompt": "d"},
    "/api/generate": {"prompt": "abc"},
    "/api/chat": {"messages": SAID},
}
LIMITS = {"max_tokens": 3, "n_predict": 3, "options": {"num_predict": 3}, "stream": False}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    raw = tiny.config(max_position_embeddings=CONTEXT)
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("chat"), raw)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tiny.write_json(folder / "tokenizer_config.json", {**settings, "chat_template": template})
    return load(folder)


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[TestClient]:
    with asking(loaded) as found:
        yield found


class Places:
    """Counts calls of a function, and those of them that are made in the event loop's thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.calls = self.blocking = 0
        self._function = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        try:
            asyncio.get_running_loop()
            self.blocking += 1
        except RuntimeError:
            pass
        return self._function(*arguments, **named)


def in_place_of(patch: pytest.MonkeyPatch, owner: Any, name: str) -> Places:
    """Watches the function that `owner` has under this name."""
    places = Places(getattr(owner, name))

    def watched(*arguments: Any, **named: Any) -> Any:
        return places(*arguments, **named)

    patch.setattr(owner, name, watched)
    return places


def mistakes(validate: Callable[[Any], BaseModel], body: Any) -> int:
    try:
        validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(("kind", "good", "field"), FIELDS)
def test_a_wrong_list_has_few_mistakes(
    kind: type[BaseModel], good: dict[str, Any], field: str
) -> None:
    """Each element of a list was a mistake to tell: a million took half a minute, and 4 GB."""
    for value in ([None] * MANY, [[None] * MANY], [[]] * MANY, [{}] * MANY):
        body = {**good, field: value}
        assert mistakes(kind.model_validate, body) < 20
        assert mistakes(kind.model_validate_json, json.dumps(body)) < 20


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/completion"])
def test_biases_are_not_too_many(client: TestClient, route: str) -> None:
    for count in (MOST_BIASES, MOST_BIASES + 1):
        biases = {str(i): None for i in range(count)}
        body = {**BODIES[route], **LIMITS, "logit_bias": biases}
        answer = client.post(route, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("logit_bias")
        assert (f"{count} entries" in answer.text) == (count > MOST_BIASES)


def test_others_run_while_a_long_text_is_tokenized(loaded: LoadedModel) -> None:
    text = Path(grammars.__file__).read_text(encoding="utf-8") * 60
    tokenizer = loaded.require_tokenizer()
    ended = threading.Event()
    ticks: list[float] = []

    def tick() -> None:
        while not ended.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    ids = tokenizer.encode(text)
    ended.set()
    thread.join()
    assert len(ticks) > 20
    half = text.index("\n\n", len(text) // 2)
    assert tokenizer.decode(ids) == text
    pieces = [text[at : at + 1000] for at in range(0, half, 1000)]
    assert all(tokenizer.decode(tokenizer.encode(piece)) == piece for piece in pieces)


def test_long_and_short_texts_have_the_same_ids(loaded: LoadedModel) -> None:
    """The bound between the two ways of tokenizing."""
    tokenizer = loaded.require_tokenizer()
    for parse in (False, True):
        word = tokenizer.encode("def <fim_pad>", parse)
        for count in (1, 100, 1000):
            assert tokenizer.encode("def <fim_pad>" * count, parse) == word * count


@pytest.mark.parametrize("route", [*BODIES, "/tokenize", "/detokenize"])
def test_no_route_tokenizes_in_the_event_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    name = "decode" if route == "/detokenize" else "encode"
    places = in_place_of(monkeypatch, Tokenizer, name)
    body = {**LIMITS, "content": "abc", "tokens": [9, 10], **BODIES.get(route, {})}
    assert client.post(route, json=body).status_code == 200
    assert places.calls
    assert not places.blocking


@pytest.mark.parametrize("route", [route for route in BODIES if route != "/infill"])
def test_what_cannot_fit_is_refused_unread(
    client: TestClient, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    most = loaded.require_tokenizer().most_bytes
    assert most == len("<|endoftext|>")
    places = in_place_of(monkeypatch, Tokenizer, "encode")
    for length, read in ((CONTEXT * most, True), ((CONTEXT + 1) * most, False)):
        text = "x" * length
        field = "messages" if "messages" in BODIES[route] else "prompt"
        given: Any = [{"role": "user", "content": text}] if field == "messages" else text
        answer = client.post(route, json={**LIMITS, field: given})
        assert answer.status_code == 400
        assert str(CONTEXT) in answer.text
        assert bool(places.calls) == read
        places.calls = 0


def test_what_the_longest_tokens_spell_is_read(client: TestClient) -> None:
    prompt = "<|endoftext|>" * (CONTEXT - 1)
    for route in ("/v1/completions", "/completion"):
        assert client.post(route, json={**LIMITS, "prompt": prompt}).status_code == 200
    # A prompt that is not continued needs no room.
    body = {"prompt": "x" * 5000, "max_tokens": 0}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_text_that_is_made_shorter_is_read() -> None:
    definition = {**tiny.byte_tokenizer(), "normalizer": {"type": "NFC"}}
    assert Tokenizer(definition).most_bytes is None


RESTRICTED = {
    "/v1/completions": {"guided_regex": "b+"},
    "/v1/chat/completions": {"guided_regex": "c+"},
    "/completion": {"grammar": 'root ::= "d"+'},
    "/infill": {"grammar": 'root ::= "e"+'},
    "/api/generate": {"format": {"type": "integer"}},
    "/api/chat": {"format": {"type": "boolean"}},
}


@pytest.mark.parametrize("route", BODIES)
def test_no_route_compiles_in_the_event_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """A healed prompt's grammar begins with the healed text: another one than without."""
    places = in_place_of(monkeypatch, grammars, "_deeply")
    answer = client.post(route, json={**LIMITS, **BODIES[route], **RESTRICTED[route]})
    assert answer.status_code == 200
    assert places.calls
    assert not places.blocking


@pytest.mark.parametrize("route", BODIES)
def test_while_a_grammar_cannot_be_stopped_no_other_is_begun(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(grammars, "_unstoppable", {Future()})
    # One that was not compiled before.
    restricted = {"guided_regex": "h", "grammar": 'root ::= "h"', "format": {"const": "h"}}
    answer = client.post(route, json={**LIMITS, **BODIES[route], **restricted})
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]


def test_stop_strings_are_not_too_many(client: TestClient) -> None:
    stop = ["ab"] * 300
    for route, more in (
        ("/completion", {"stop": stop}),
        ("/api/generate", {"options": {"stop": stop}}),
    ):
        assert client.post(route, json={**LIMITS, **BODIES[route], **more}).status_code == 400
