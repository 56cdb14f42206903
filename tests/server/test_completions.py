"""`/v1/completions` as real clients see it, against the engine's own answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

import starquill
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import BusyError
from starquill.server.app import create_app
from starquill.server.options import ServerOptions
from starquill.server.schema import derived_seed
from starquill.server.together import Together
from starquill.types import (
    Delta,
    EngineOptions,
    GenerateRequest,
    Hole,
    Logprobs,
    SamplingParams,
    TokenLogprob,
)
from tests import tiny
from tests.server.serving import asking, serving, streamed
from tests.server.standing_in import AnsweringEngine
from tests.server.test_app import error_of

ROUTE = "/v1/completions"
PROMPT = "def add(a, b):\n"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return starquill.load("default")


@pytest.fixture(scope="module")
def engine(embedded: LoadedModel) -> Engine:
    """To compare with: the same model without a server."""
    return Engine(embedded)


@pytest.fixture(scope="module")
def url(embedded: LoadedModel) -> Iterator[str]:
    with serving(embedded) as address:
        yield f"{address}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def bare(embedded: LoadedModel) -> Iterator[TestClient]:
    """The same without a socket."""
    with asking(embedded) as found:
        yield found


def expected(engine: Engine, prompt: str = PROMPT, **params: Any) -> str:
    return engine.complete(prompt, SamplingParams(**{"max_tokens": 12, **params}))


# --- the openai package ---


def test_sync(client: openai.OpenAI, engine: Engine) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].text == expected(engine)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    tokenizer = engine.model.require_tokenizer()
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details is not None


@pytest.mark.parametrize("with_usage", [False, True])
def test_streaming(client: openai.OpenAI, engine: Engine, with_usage: bool) -> None:
    parts = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            stream=True,
            stream_options={"include_usage": with_usage},
            **GREEDY,
        )
    )
    assert len({part.id for part in parts}) == 1
    if with_usage:
        last = parts.pop()
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == 12
    assert all(part.usage is None for part in parts)
    assert "".join(part.choices[0].text for part in parts) == expected(engine)
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]


def test_async_and_many_at_once(url: str, engine: Engine) -> None:
    prompts = [PROMPT, "class Dog:\n    def", "import os\n", "x = [", "for i in", "a"]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def whole(prompt: str) -> str:
                answer = await client.completions.create(model="tiny", prompt=prompt, **GREEDY)
                return answer.choices[0].text

            async def parts(prompt: str) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=prompt, stream=True, **GREEDY
                )
                return "".join([part.choices[0].text async for part in stream])

            return await asyncio.gather(*map(whole, prompts), *map(parts, prompts))

    assert asyncio.run(ask()) == [expected(engine, prompt) for prompt in prompts] * 2


def test_the_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt=PROMPT, logprobs=6)
    assert refused.value.param == "logprobs"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt=PROMPT)
    assert missing.value.param == "model"


def test_suffix_fills_the_middle(client: openai.OpenAI, engine: Engine) -> None:
    after = "\n\nprint(add(1, 2))\n"
    answer = client.completions.create(model="tiny", prompt=PROMPT, suffix=after, **GREEDY)
    filled = engine.fill(Hole(PROMPT, after), SamplingParams(max_tokens=12))
    assert answer.choices[0].text == filled
    for order in ("psm", "spm"):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, suffix=after, extra_body={"fim_order": order}, **GREEDY
        )
        assert answer.choices[0].finish_reason in ("stop", "length")


def test_sampling_fields_do_what_the_engine_does(client: openai.OpenAI, engine: Engine) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.8,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    more: dict[str, Any] = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1}
    bias = {"7": -100, "300": 2.5}
    answer = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=12, logit_bias=bias, extra_body=more, **fields
    )
    numbers = {int(key): value for key, value in bias.items()}
    assert answer.choices[0].text == expected(engine, logit_bias=numbers, **fields, **more)


def test_healing_is_on_but_for_echo_and_logprobs(bare: TestClient, engine: Engine) -> None:
    prompt = "import o"
    params = SamplingParams(max_tokens=8)
    healed, plain = (engine.complete(prompt, params, heal=heal) for heal in (True, False))
    assert healed != plain
    for body, text in (
        ({}, healed),
        ({"heal": False}, plain),
        ({"logprobs": 0}, plain),
        ({"echo": True}, prompt + plain),
    ):
        asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
        assert bare.post(ROUTE, json=asked).json()["choices"][0]["text"] == text


def test_tags_in_a_prompt_are_control_tokens(bare: TestClient, engine: Engine) -> None:
    """Editors send whole templates; the model then fills and stops as with `suffix`."""
    template = f"<fim_prefix>{PROMPT}<fim_suffix>\nprint()<fim_middle>"
    ids = engine.model.require_tokenizer().encode(template, parse_special=True)
    filled = engine.fill(Hole(PROMPT, "\nprint()"), SamplingParams(max_tokens=12))
    for prompt in (template, ids):
        answer = bare.post(ROUTE, json={"prompt": prompt, "heal": False, **GREEDY})
        assert answer.json()["choices"][0]["text"] == filled


# --- several choices ---


def test_choices_differ_and_come_again_with_their_seed(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=12, temperature=1.5, seed=3, **more
        )
        return [choice.text for choice in answer.choices]

    three = ask(n=3)
    assert len(set(three)) == 3
    assert ask(n=3) == three
    assert ask() == three[:1]


def test_seeds_derived_differ() -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1):
        derived = [derived_seed(seed, number) for number in range(128)]
        assert derived[0] == seed
        assert len({one % 2**63 for one in derived if one is not None}) == 128
    assert derived_seed(None, 3) is None


def test_best_of_gives_the_likeliest(bare: TestClient) -> None:
    body = {"prompt": [PROMPT, "x ="], "max_tokens": 8, "temperature": 1.3, "seed": 1}
    every = bare.post(ROUTE, json={**body, "n": 5, "logprobs": 0}).json()["choices"]
    best = bare.post(ROUTE, json={**body, "n": 2, "best_of": 5, "heal": False}).json()
    texts = []
    for start in (0, 5):
        group = sorted(
            every[start : start + 5],
            key=lambda c: sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]),
        )
        texts += [choice["text"] for choice in (group[-1], group[-2])]
    assert [choice["text"] for choice in best["choices"]] == texts
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 2 * 5 * 8


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"n": 0}, "n"),
        ({"prompt": ["a"] * 73}, "prompt"),  # more than slots and queue hold
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"stop": 1}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "2"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"echo": 1}, "echo"),
        ({"suffix": ["a"]}, "suffix"),
        ({"suffix": "a", "echo": True, "logprobs": 1}, "suffix"),
        ({"fim_order": "mps"}, "fim_order"),
        ({"model": 5}, "model"),
    ],
)
def test_a_bad_field_is_named(bare: TestClient, body: dict[str, Any], param: str) -> None:
    answer = bare.post(ROUTE, json={"prompt": "a", "max_tokens": 1, **body})
    error = error_of(answer, 400)
    assert error["param"] == param
    assert param in error["message"] or param == "prompt"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "min_p", "presence_penalty"])
def test_numbers_that_are_none(bare: TestClient, field: str, number: str) -> None:
    answer = bare.post(
        ROUTE,
        content=f'{{"prompt": "a", "{field}": {number}}}',
        headers={"Content-Type": "application/json"},
    )
    assert error_of(answer, 400)["param"] == field


def test_nulls_and_unknown_fields_are_as_if_left_out(bare: TestClient) -> None:
    names = ("suffix", "max_tokens", "n", "best_of", "echo", "logprobs", "stop", "seed", "top_p")
    nulls = dict.fromkeys(names)
    body = {"prompt": PROMPT, "temperature": 0}
    plain = bare.post(ROUTE, json=body).json()
    odd = bare.post(ROUTE, json={**body, **nulls, "user": 5, "other": {"a": 1}}).json()
    assert odd["choices"] == plain["choices"]
    assert odd["usage"]["completion_tokens"] == 16  # OpenAI's own default


# --- what an engine may do ---


def faked(loaded: LoadedModel, *events: Delta | Exception) -> TestClient:
    engine: Any = AnsweringEngine(loaded, lambda _: events)
    return TestClient(create_app(engine, ServerOptions("tiny")))


def delta(text: str, token: int | None = 5, **more: Any) -> Delta:
    return Delta("id", token, text, **more)


def test_a_cancelled_choice_fails_the_answer(embedded: LoadedModel) -> None:
    client = faked(embedded, delta("a"), delta("", None, finish_reason="cancelled"))
    error_of(client.post(ROUTE, json={"prompt": "a"}), 503)


@pytest.mark.parametrize("event", [KeyError("secret"), delta("", None, finish_reason="cancelled")])
def test_an_error_ends_a_stream_with_an_event(embedded: LoadedModel, event: Any) -> None:
    answer = faked(embedded, delta("a"), event).post(ROUTE, json={"prompt": "a", "stream": True})
    assert answer.status_code == 200
    first, second = answer.text.strip().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
    kind, data = second.split("\n")
    assert kind == "event: error"
    told = json.loads(data.removeprefix("data: "))["error"]
    assert told["code"] == (500 if isinstance(event, Exception) else 503)
    assert "secret" not in data


def test_an_error_before_the_first_token_has_a_status(embedded: LoadedModel) -> None:
    error_of(faked(embedded, KeyError("x")).post(ROUTE, json={"prompt": "a", "stream": True}), 500)


def test_the_openai_client_raises_on_an_error_event(embedded: LoadedModel) -> None:
    http: Any = faked(embedded, delta("a"), KeyError("x"))
    client = openai.OpenAI(
        base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0
    )
    stream = client.completions.create(model="tiny", prompt="a", stream=True)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(openai.APIError):
        next(stream)


def test_cached_tokens_are_those_of_each_prompts_first_text(embedded: LoadedModel) -> None:
    client = faked(embedded, delta("a", finish_reason="stop"))  # request k has k cached tokens
    usage = client.post(ROUTE, json={"prompt": ["a", "b"], "n": 2}).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1 + 3}


def scores(*chosen: float) -> tuple[Logprobs | None, ...]:
    return (None, *(Logprobs(one, (TokenLogprob(7, -0.5),)) for one in chosen))


def echoing(loaded: LoadedModel) -> TestClient:
    """Answers with probabilities for the prompt, and one token unless none is wanted."""

    def answer(request: GenerateRequest) -> list[Delta]:
        assert request.prompt_logprobs is not None
        assert not request.heal
        about = scores(*(-float(i) for i in range(1, len(request.prompt_ids))))
        if not request.params.max_tokens:
            return [delta("", None, finish_reason="length", prompt_logprobs=about)]
        tokenizer = loaded.require_tokenizer()
        text = tokenizer.decode([300])
        scored = Logprobs(-9.0, ())
        first = delta(text, 300, finish_reason="length", logprobs=scored, prompt_logprobs=about)
        return [first]

    engine: Any = AnsweringEngine(loaded, answer)
    return TestClient(create_app(engine, ServerOptions("tiny")))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("prompt", ["x = 1\ny", "é😀!", "<fim_prefix>a<fim_suffix>", ""])
def test_echo_scores_the_prompt(
    embedded: LoadedModel, prompt: str, limit: int, stream: bool
) -> None:
    tokenizer = embedded.require_tokenizer()
    ids = tokenizer.encode(prompt, parse_special=True) or [0]
    body = {"prompt": prompt, "max_tokens": limit, "echo": True, "logprobs": 1, "stream": stream}
    answer = echoing(embedded).post(ROUTE, json=body)
    (choice,) = (
        streamed(answer.text.split("\n"))[0]["choices"] if stream else answer.json()["choices"]
    )
    written = tokenizer.decode([300]) if limit else ""
    assert choice["text"] == prompt + written
    found = choice["logprobs"]
    assert {len(column) for column in found.values()} == {len(ids) + limit}
    expected_scores = [None, *(-float(i) for i in range(1, len(ids))), *([-9.0] * limit)]
    assert found["token_logprobs"] == expected_scores
    assert found["top_logprobs"][0] is None
    assert all(one is not None for one in found["top_logprobs"][1:])
    if prompt.isascii() and prompt:
        places = zip(found["tokens"], found["text_offset"], strict=True)
        assert all(choice["text"].startswith(token, at) for token, at in places)
    if limit:
        assert found["text_offset"][-1] == len(prompt)


def test_a_request_the_engine_options_bound(embedded: LoadedModel) -> None:
    with asking(embedded, EngineOptions(slots=1, queue=1)) as client:
        assert client.post(ROUTE, json={"prompt": "a", "n": 2, "max_tokens": 1}).is_success
        error = error_of(client.post(ROUTE, json={"prompt": "a", "n": 3, "max_tokens": 1}), 400)
        assert "3" in error["message"]
        assert "2" in error["message"]


def test_a_model_without_a_tokenizer_takes_ids(tmp_path: Any) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with asking(starquill.load(folder)) as client:
        body = {"prompt": [5, 6], "max_tokens": 2, "logprobs": 1, "temperature": 0}
        choice = client.post(ROUTE, json=body).json()["choices"][0]
        assert len(choice["logprobs"]["tokens"]) == 2
        error = error_of(client.post(ROUTE, json={"prompt": "a"}), 400)
        assert "tokenizer.json" in error["message"]


def test_an_answer_that_nobody_reads_is_abandoned(embedded: LoadedModel) -> None:
    """Its client left in the moment before it began: no code of ours runs for it any more."""
    engine = AnsweringEngine(embedded, lambda _: [delta("a")])

    async def begin() -> None:
        requests = [GenerateRequest(name, (5,)) for name in "ab"]
        assert (await anext(Together(engine, requests)))[1].text == "a"

    asyncio.run(begin())
    assert [one.abandoned for one in engine.submitted] == [True, True]


def test_all_are_submitted_or_none(embedded: LoadedModel) -> None:
    engine: Any = Engine(embedded, EngineOptions(slots=1, queue=1))  # which nobody steps

    async def begin() -> None:
        with pytest.raises(BusyError):
            Together(engine, [GenerateRequest(name, (5,)) for name in "abc"])

    asyncio.run(begin())
    engine.step()
    assert engine.stats().running == engine.stats().waiting == 0
