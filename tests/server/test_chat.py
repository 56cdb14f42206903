"""`/v1/chat/completions` through the `openai` package, and the raw bytes where it hides them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import chat_request
from starquill.loading import load
from starquill.server.chat_schema import ChatBody
from starquill.types import EngineOptions, SamplingParams
from tests import tiny
from tests.server.serving import NAME, serving_engine

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
USER: list[Any] = [{"role": "user", "content": "hi"}]
TEXT = "Wéll 😀\n"
END = 0


def load_chatty(folder: Path, context: int) -> LoadedModel:
    tiny.write_checkpoint(folder, tiny.config(max_position_embeddings=context))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return load(folder)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_chatty(tmp_path_factory.mktemp("model"), 300)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Its answers go on for minutes where the end token is forbidden."""
    return load_chatty(tmp_path_factory.mktemp("endless"), 200_000)


@pytest.fixture(scope="module")
def address(chatty: LoadedModel) -> Iterator[str]:
    with serving_engine(Engine(chatty)) as found:
        yield found


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with client_of(address) as found:
        yield found


def writing(loaded: LoadedModel, text: str, messages: list[Any] = USER) -> LoadedModel:
    """A model that answers `messages` with `text`, in which tags are control tokens."""
    prompt = chat_request(loaded, messages, SamplingParams()).prompt_ids
    ids = loaded.require_tokenizer().encode(text, parse_special=True)
    return tiny.scripted(loaded, [*ids, END], len(prompt))


@contextmanager
def served(loaded: LoadedModel, **options: Any) -> Iterator[openai.OpenAI]:
    with (
        serving_engine(Engine(loaded, EngineOptions(**options))) as found,
        client_of(found) as client,
    ):
        yield client


def ask(client: openai.OpenAI, messages: list[Any] = USER, **more: Any) -> Any:
    return client.chat.completions.create(model=NAME, messages=messages, **more)


def test_an_answer(chatty: LoadedModel) -> None:
    with served(writing(chatty, TEXT)) as client:
        answer = ask(client, temperature=0)
        again = ask(client, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (answer.object, answer.model) == ("chat.completion", NAME)
    assert re.fullmatch(r"chatcmpl-\w{32}", answer.id)
    assert answer.id != again.id
    assert abs(answer.created - time.time()) < 60
    prompt = len(chat_request(chatty, USER, SamplingParams()).prompt_ids)
    written = len(chatty.require_tokenizer().encode(TEXT)) + 1
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == written
    assert answer.usage.total_tokens == prompt + written


@pytest.mark.parametrize("with_usage", [True, False])
def test_the_events_of_a_stream(chatty: LoadedModel, with_usage: bool) -> None:
    body = {"model": NAME, "messages": USER, "temperature": 0, "stream": True}
    if with_usage:
        body["stream_options"] = {"include_usage": True}
    with serving_engine(Engine(writing(chatty, TEXT))) as address:
        answer = httpx.post(f"{address}/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\n")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n")[:-1]]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", NAME)
    }
    if with_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == TEXT
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "stop")


def test_streams_write_what_whole_answers_have(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"max_tokens": 30, "seed": 3, "n": 3, "logprobs": True}
    whole = ask(client, top_logprobs=2, **more)
    texts, reasons, scored = [""] * 3, [""] * 3, [[], [], []]  # type: ignore[var-annotated]
    for chunk in ask(client, top_logprobs=2, stream=True, **more):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
            scored[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) == 3
    # The second call's prompt comes from the cache; dense products over fewer rows differ in bits.
    for ours, choice in zip(scored, whole.choices, strict=True):
        expected = choice.logprobs.content
        assert [entry.bytes for entry in ours] == [entry.bytes for entry in expected]
        found = [entry.logprob for entry in ours]
        assert found == pytest.approx([entry.logprob for entry in expected], abs=1e-4)


def test_the_asynchronous_client(chatty: LoadedModel) -> None:
    async def gather(address: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:

            async def one(seed: int, stream: bool) -> str:
                answer: Any = await client.chat.completions.create(
                    model=NAME, messages=USER, seed=seed, stream=stream, max_tokens=20
                )
                if not stream:
                    return answer.choices[0].message.content or ""
                return "".join([c.choices[0].delta.content or "" async for c in answer])

            return await asyncio.gather(*(one(s // 2, s % 2 == 0) for s in range(8)))

    with serving_engine(Engine(chatty)) as address:
        texts = asyncio.run(gather(address))
    assert texts[::2] == texts[1::2]
    assert len(set(texts)) == 4


def test_choices_have_seeds_of_their_own(client: openai.OpenAI) -> None:
    several = [c.message.content for c in ask(client, n=3, seed=5, max_tokens=20).choices]
    single = ask(client, seed=5, max_tokens=20).choices[0].message.content
    assert several[0] == single
    assert len(set(several)) == 3
    drawn = {ask(client, max_tokens=20).choices[0].message.content for _ in range(2)}
    assert len(drawn) == 2


def test_the_defaults(client: openai.OpenAI, chatty: LoadedModel) -> None:
    """Temperature 1, and an answer may fill the context."""
    texts = [
        ask(client, seed=5, max_tokens=20, **more).choices[0].message.content
        for more in ({}, {"temperature": 1}, {"temperature": 0})
    ]
    assert texts[0] == texts[1] != texts[2]
    answer = ask(client, logit_bias={str(END): -100}, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == chatty.config.context_length


def test_every_setting_reaches_the_engine() -> None:
    body = {
        "messages": USER, "max_tokens": 9, "max_completion_tokens": 8, "temperature": 0.5,
        "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 7, "stop": ["a", "b"],
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "logit_bias": {"5": -1.5, "6": 2}, "logprobs": True, "top_logprobs": 3, "user": "x",
        "store": False, "unknown": {"a": 1}, "tools": [], "suffix": None, "n": None,
    }  # fmt: skip
    assert ChatBody.model_validate(body).params(100) == SamplingParams(
        8, 0.5, 0.9, 4, 0.1, 7, ("a", "b"), 1.1, 0.2, -0.3, {5: -1.5, 6: 2.0}, 3
    )
    plain = ChatBody.model_validate({"messages": USER, "logprobs": True, "stop": "a"})
    assert plain.params(100) == SamplingParams(100, 1.0, stop=("a",), logprobs=0)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_limits_and_stop_strings(chatty: LoadedModel, name: str) -> None:
    with served(writing(chatty, "one two three")) as client:
        cut = ask(client, temperature=0, **{name: 4}).choices[0]
        stopped = ask(client, temperature=0, stop=["zz", "wo t"]).choices[0]
        nothing = ask(client, temperature=0, **{name: 0})
    assert (cut.message.content, cut.finish_reason) == ("one ", "length")
    assert (stopped.message.content, stopped.finish_reason) == ("one t", "stop")
    assert (nothing.choices[0].message.content, nothing.choices[0].finish_reason) == ("", "length")
    assert nothing.usage.completion_tokens == 0


def test_text_parts_are_paragraphs(chatty: LoadedModel) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = [{"role": "system", "content": "s"}, {"role": "user", "content": "a\nb"}]
    with served(writing(chatty, "yes", joined)) as client:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}]
        answer = ask(client, messages, temperature=0)
    assert answer.choices[0].message.content == "yes"
    prompt = chat_request(chatty, joined, SamplingParams()).prompt_ids
    assert answer.usage.prompt_tokens == len(prompt)


def test_log_probabilities(chatty: LoadedModel) -> None:
    """Bytes are exact where a token holds half a character; the end token has no entry."""
    with served(writing(chatty, f"{TEXT}<issue_start>x")) as client:
        choice = ask(client, temperature=0, logprobs=True, top_logprobs=2).choices[0]
        none = ask(client, temperature=0, logprobs=True).choices[0]
    entries = choice.logprobs.content
    assert bytes(b for e in entries for b in e.bytes or ()) == choice.message.content.encode()
    assert choice.message.content == f"{TEXT}x"
    assert [(e.token, e.bytes) for e in entries[-2:]] == [("<issue_start>", None), ("x", [120])]
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        best = entry.top_logprobs[0]
        assert (best.token, best.bytes, best.logprob) == (entry.token, entry.bytes, entry.logprob)
        assert 0 >= best.logprob > entry.top_logprobs[1].logprob
    assert all(entry.top_logprobs == [] for entry in none.logprobs.content)


# --- what may be written ---

COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}},
          "required": ["colour"], "additionalProperties": False}  # fmt: skip


def is_colour(text: str) -> bool:
    return json.loads(text) in ({"colour": "red"}, {"colour": "blue"})


@pytest.mark.parametrize(
    ("body", "holds"),
    [
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "c", "schema": COLOUR, "strict": True}}},
            is_colour,
        ),
        ({"extra_body": {"guided_json": COLOUR}}, is_colour),
        ({"extra_body": {"guided_json": json.dumps(COLOUR)}}, is_colour),
        ({"extra_body": {"guided_regex": "[0-9a-f]{6}"}}, re.compile("[0-9a-f]{6}").fullmatch),
        ({"extra_body": {"guided_choice": ["yes", "nó"]}}, ["yes", "nó"].__contains__),
        ({"extra_body": {"guided_grammar": 'root ::= "a" [bc] "d"'}}, ["abd", "acd"].__contains__),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
def test_constraints(
    client: openai.OpenAI, body: dict[str, Any], holds: Callable[[str], Any], stream: bool
) -> None:
    answer = ask(client, temperature=2, n=3, stream=stream, **body)
    texts = [""] * 3
    for part in answer if stream else [answer]:
        for choice in part.choices:
            found = choice.delta if stream else choice.message
            texts[choice.index] += found.content or ""
            assert choice.finish_reason in ("stop", None)
    assert all(map(holds, texts)), texts


def test_any_json_object(chatty: LoadedModel) -> None:
    with served(writing(chatty, '{"a": [1, {"b": null}]}')) as client:
        answer = ask(client, temperature=0, response_format={"type": "json_object"})
        text = ask(client, temperature=0, response_format={"type": "text"})
    assert json.loads(answer.choices[0].message.content) == {"a": [1, {"b": None}]}
    assert answer.choices[0].finish_reason == "stop"
    assert text.choices[0].message.content == answer.choices[0].message.content
    with served(writing(chatty, 'no: "x"')) as client:
        other = ask(client, temperature=0, max_tokens=9, response_format={"type": "json_object"})
    assert other.choices[0].message.content.startswith("{")


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    """The package's own helper: a pydantic model in, an object of it out."""
    from pydantic import BaseModel, Field

    class Point(BaseModel):
        x: int = Field(ge=0, le=9)
        y: int = Field(ge=0, le=9)

    answer = client.chat.completions.parse(model=NAME, messages=USER, response_format=Point)
    assert isinstance(answer.choices[0].message.parsed, Point)


# --- refusals ---


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"messages": []}, "messages", ""),
        ({"messages": [{"role": "user"}]}, "messages", ""),
        ({"messages": [{"role": "user", "content": 1}]}, "messages", "text parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text"),
        ({"messages": [{"role": "<file_sep>", "content": "x"}]}, None, "role"),
        ({"messages": [{"role": "user", "content": "x" * 999}]}, None, "context"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "UTF-8"),
        ({"temperature": "hot"}, "temperature", ""),
        ({"temperature": True}, "temperature", ""),
        ({"temperature": float("nan")}, "temperature", ""),
        ({"max_tokens": 1.5}, "max_tokens", ""),
        ({"max_completion_tokens": -1}, "max_completion_tokens", ""),
        ({"n": 0}, "n", ""),
        ({"n": 100}, "n", "at most 72"),
        ({"seed": 2**70}, "seed", ""),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": [1]}, "stop", "16"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"320": 1}}, None, "ids 0 to 319"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ""),
        ({"stream": 1}, "stream", ""),
        ({"tools": [{"type": "function"}]}, "tools", "no tools"),
        ({"response_format": {"type": "xml"}}, "response_format", ""),
        ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
        ({"guided_regex": "["}, "guided_regex", "unclosed"),
        ({"guided_json": {"type": "x"}}, "guided_json", "refused"),
        ({"guided_json": [1]}, "guided_json", ""),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"guided_grammar": "start: no"}, "guided_grammar", "no"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "one of them"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}},
         "response_format", "one of them"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_refused(
    address: str, body: dict[str, Any], field: str | None, words: str, stream: bool
) -> None:
    """With a status, one line and the field; streams are refused before they begin."""
    content = json.dumps({"messages": USER, "stream": stream, **body})
    answer = httpx.post(
        f"{address}/v1/chat/completions",
        content=content,
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert words in error["message"]
    assert "\n" not in error["message"]


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt"):
        client.chat.completions.create(model="gpt", messages=USER)


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_is_told_before_the_answer_begins(endless: LoadedModel, stream: bool) -> None:
    with served(endless, slots=1, queue=0) as client:
        running = ask(client, stream=True, logit_bias={str(END): -100})
        next(running)
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client, stream=stream)
        running.close()
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"]


def test_a_request_that_fails_on_its_way(client: openai.OpenAI) -> None:
    """A whole answer has a status for it, a stream an event."""
    rules = {"guided_grammar": 'start: "ab" <[1]>'}
    with pytest.raises(openai.BadRequestError, match="no token that spells"):
        ask(client, extra_body=rules)
    chunks: list[Any] = []
    with pytest.raises(openai.APIError, match="no token that spells"):
        chunks.extend(ask(client, extra_body=rules, stream=True))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "ab"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_requests(endless: LoadedModel, stream: bool) -> None:
    engine = Engine(endless)
    body = {"messages": USER, "n": 3, "stream": stream, "logit_bias": {str(END): -100}}
    with serving_engine(engine) as address, httpx.Client(base_url=address, timeout=30) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body, timeout=0.1)
        limit = time.monotonic() + 30
        while engine.stats().running + engine.stats().waiting:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert client.post("/v1/chat/completions", json={"messages": USER}).status_code == 200


def test_a_base_model(tmp_path: Path) -> None:
    loaded = tiny.load_tiny(tmp_path)
    with served(loaded) as client, pytest.raises(openai.BadRequestError) as caught:
        ask(client)
    assert "base model" in caught.value.message
    assert "/v1/completions" in caught.value.message
