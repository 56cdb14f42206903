"""llama.cpp's /completion: what Continue and Twinny send, forms of prompts, and why text ends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.server import llamacpp, llamacpp_schema
from starquill.server.app import create_app
from starquill.server.options import ServerOptions
from starquill.types import EngineOptions, GenerateRequest, Hole, SamplingParams
from tests import tiny
from tests.server.editors import DEADLINE, NAME, events, serving

END, PREFIX, MIDDLE, SUFFIX, PAD, REPO, FILE, ISSUE = range(8)
CONTEXT = 256
BEFORE, AFTER = "def double(x):\n    return ", "\n\nprint(double(4))\n"


@pytest.fixture(scope="module")
def default() -> LoadedModel:
    return load("default")


@pytest.fixture(scope="module")
def client(default: LoadedModel) -> Iterator[httpx.Client]:
    with serving(Engine(default)) as client:
        yield client


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return tiny.load_tiny(folder, max_position_embeddings=CONTEXT)


def written(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/completion", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def scripted(loaded: LoadedModel, *tokens: int | str) -> Engine:
    """An engine that writes these behind a prompt of token ids, whatever its length of 2."""
    encode = loaded.require_tokenizer().encode
    ids = [i for t in tokens for i in (encode(t) if isinstance(t, str) else [t])]
    return Engine(tiny.scripted(loaded, ids, 2))


# --- /completion ---


def test_continue_streams_a_completion(client: httpx.Client, default: LoadedModel) -> None:
    """Continue's llama.cpp provider: options that are not set are absent or null."""
    body = {
        "prompt": f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>",
        "stream": True,
        "n_predict": 24,
        "frequency_penalty": None,
        "mirostat": None,
        "stop": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>"],
        "temperature": 0.0,
    }
    answers = events(client.post("/completion", json=body))
    text = "".join(answer["content"] for answer in answers)
    expected = Engine(default).fill(Hole(BEFORE, AFTER), SamplingParams(max_tokens=24))
    assert text == expected != ""
    assert answers[-1]["stop"] is True


def test_twinny_streams_a_completion(client: httpx.Client) -> None:
    """Twinny's llama.cpp provider bounds by max_tokens and reads content and counts."""
    body = {"prompt": "def f(x):", "stream": True, "temperature": 0.2, "max_tokens": 7}
    *_, last = events(client.post("/completion", json=body))
    assert 0 < last["tokens_predicted"] <= 7
    assert last["tokens_evaluated"] > 0


def test_twinny_warms_up_with_an_empty_prompt(client: httpx.Client) -> None:
    body = {"prompt": "", "stream": True, "temperature": 0, "max_tokens": 1}
    assert events(client.post("/completion", json=body))[-1]["stop"] is True


@pytest.mark.parametrize("route", ["/completion", "/completions"])
def test_both_spellings(client: httpx.Client, route: str) -> None:
    response = client.post(route, json={"prompt": "x = ", "n_predict": 2, "temperature": 0})
    assert response.json()["content"]


def test_text_as_curl_sends_it(client: httpx.Client) -> None:
    """`curl -d` calls its body a form."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({"prompt": "x = ", "n_predict": 1}).encode()
    assert client.post("/completion", content=body, headers=form).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        ([1, "a", 2], [[1, "a", 2]]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1, "b"]], ["a", [1, "b"]]),
    ],
)
def test_forms_of_prompts(prompt: Any, expected: Any) -> None:
    assert llamacpp.prompts(prompt) == expected


def test_mixed_prompts_are_joined(loaded: LoadedModel) -> None:
    encode = loaded.require_tokenizer().encode
    body = llamacpp_schema.CompletionBody(prompt="")
    request = llamacpp.completion_request(Engine(loaded), body, [PREFIX, "a<fim_middle>", 9])
    assert list(request.prompt_ids) == [PREFIX, *encode("a"), MIDDLE, 9]
    assert FILE in request.stop_ids


def test_several_prompts_have_several_answers(client: httpx.Client) -> None:
    body = {"n_predict": 4, "temperature": 0}
    singly = [written(client, prompt=p, **body)["content"] for p in ("x = ", "def ")]
    response = client.post("/completion", json={"prompt": ["x = ", "def "], **body})
    assert [answer["content"] for answer in response.json()] == singly
    assert [answer["index"] for answer in response.json()] == [0, 1]


def test_several_answers_to_one_prompt(client: httpx.Client) -> None:
    body = {"prompt": "def ", "n_predict": 12, "seed": 5, "n_cmpl": 3, "temperature": 1.0}
    first, second = (client.post("/completion", json=body).json() for _ in range(2))
    texts = [answer["content"] for answer in first]
    assert len(set(texts)) == 3
    assert texts == [answer["content"] for answer in second]


def test_without_a_limit_the_context_is_filled(loaded: LoadedModel) -> None:
    engine = scripted(loaded, "x")
    with serving(engine) as client:
        answer = written(client, prompt=[9, 9], n_predict=-1, temperature=0)
    assert answer["tokens_predicted"] == CONTEXT - 2
    assert (answer["stop_type"], answer["truncated"]) == ("limit", True)


@pytest.mark.parametrize(
    ("script", "stop", "expected"),
    [
        (["ab", END], [], ("ab", "eos", "")),
        (["a", ISSUE, "b", END], ["<issue_start>"], ("a", "word", "<issue_start>")),
        (["a", "b", "c", "d"], ["bc"], ("a", "word", "bc")),
        (["a", "b", "c", "d"], ["cd", "bc"], ("a", "word", "bc")),
        (["a" * 4, END], ["b"], ("aaa", "limit", "")),
    ],
)
def test_why_it_stopped(
    loaded: LoadedModel, script: list[Any], stop: list[str], expected: tuple[str, str, str]
) -> None:
    with serving(scripted(loaded, *script)) as client:
        limit = 3 if expected[1] == "limit" else 8
        body = {"prompt": [9, 9], "n_predict": limit, "temperature": 0, "stop": stop}
        answer = written(client, **body)
        last = events(client.post("/completion", json=body | {"stream": True}))[-1]
    for found in (answer, last):
        assert (found["stop_type"], found["stopping_word"]) == expected[1:]
    assert answer["content"] == expected[0]


def test_end_tokens_may_be_ignored(loaded: LoadedModel) -> None:
    with serving(Engine(tiny.scripted(loaded, [[END, 50]], 2))) as client:
        body = {"prompt": [9, 9], "n_predict": 3, "temperature": 0, "return_tokens": True}
        assert written(client, **body)["tokens"] == [END]
        assert written(client, **body, ignore_eos=True)["tokens"] == [50, 50, 50]
        for bias in ([[END, False]], [["<|endoftext|>", False]], {str(END): -100}):
            found = written(client, **body, logit_bias=bias)["tokens"]
            # Text in a bias is data, so the control token's name bans letters, not the token.
            assert found == ([END] if isinstance(bias, list) and bias[0][0] != END else [50] * 3)


def test_probabilities(client: httpx.Client) -> None:
    body = {"prompt": "def f(x):\n    return", "n_predict": 4, "temperature": 0, "n_probs": 3}
    answer = written(client, **body)
    found = answer["completion_probabilities"]
    assert len(found) == answer["tokens_predicted"]
    for token in found:
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["id"] == token["id"]
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0
        assert bytes(token["bytes"]).decode() == token["token"]
    parts = events(client.post("/completion", json=body | {"stream": True}))[:-1]
    assert [part["completion_probabilities"][0]["id"] for part in parts] == [
        token["id"] for token in found
    ]
    assert [i for part in parts for i in part["tokens"]] == [token["id"] for token in found]


def test_fields_are_chosen_and_unnested(client: httpx.Client) -> None:
    fields = ["content", "generation_settings/n_predict", "timings/none", "nothing"]
    answer = written(client, prompt="x", n_predict=1, response_fields=fields)
    assert list(answer) == ["content", "generation_settings/n_predict"]


def test_a_schema_restricts_the_text(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    body = {"prompt": "x = ", "n_predict": 400, "temperature": 0, "json_schema": schema}
    response = client.post("/completion", json=body)
    assert isinstance(json.loads(response.json()["content"])["a"], bool)


# --- sampling ---


def params(loaded: LoadedModel, **body: Any) -> SamplingParams:
    parsed = llamacpp_schema.Options.model_validate(body)
    return llamacpp_schema.sampling(loaded, parsed, llamacpp_schema.COMPLETION, 8)


def test_defaults_are_llama_cpps(loaded: LoadedModel) -> None:
    found = params(loaded)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.8, 40, 0.95, 0.05)
    assert (found.repetition_penalty, found.seed) == (1.0, None)


def test_samplers_not_named_are_off(loaded: LoadedModel) -> None:
    given = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.2, "repeat_penalty": 1.3}
    found = params(loaded, **given, samplers=["top_k", "temperature"])
    assert found == replace(params(loaded, **given), top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert found == params(loaded, **given, samplers="kt")
    assert params(loaded, **given, samplers=["top_k"]).temperature == 1.0


def test_the_infill_sampler_takes_the_likeliest(loaded: LoadedModel) -> None:
    samplers = ["top_k", "top_p", "infill"]
    assert params(loaded, samplers=samplers).temperature == 0
    assert params(loaded, samplers=samplers, n_cmpl=2).temperature > 0


def test_out_of_range_means_what_it_does_there(loaded: LoadedModel) -> None:
    found = params(loaded, temperature=-1, top_k=-1, seed=-1)
    assert (found.temperature, found.top_k, found.seed) == (0.0, 0, None)
    assert params(loaded, seed=2**32 - 1).seed is None
    assert params(loaded, seed=7).seed == 7


# --- bad bodies ---


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "a", "n_predict": "many"}, "n_predict"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": 1e300}, "temperature"),
        ({"prompt": "a", "stop": [1]}, "stop"),
        ({"prompt": "a", "top_p": 2}, "top_p"),
        ({"prompt": "a", "n_probs": 1000}, "logprobs"),
        ({"prompt": "a", "logit_bias": [[1]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [[1, "x"]]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"prompt": "a", "n_cmpl": 0}, "n_cmpl"),
        ({"prompt": {"prompt_string": "a"}}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "ids"),
        ({"prompt": [[1], [2]], "stream": True}, "stream"),
        ({"prompt": "x" * 9000}, "context"),
        ({}, "prompt"),
        ([], "body"),
    ],
)
def test_a_bad_body_names_its_field(client: httpx.Client, body: Any, field: str) -> None:
    response = client.post("/completion", json=body)
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]
    assert "\n" not in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"prompt": "\\ud800"}', b"null", b"[" * 9999])
def test_what_is_no_json_is_refused(client: httpx.Client, content: bytes) -> None:
    response = client.post("/completion", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_full_queue_refuses_all_of_several(loaded: LoadedModel) -> None:
    first = GenerateRequest("first", (1, 2))
    engines = [Engine(loaded, EngineOptions(slots=1, queue=2)) for _ in range(2)]
    for engine in engines:
        engine.submit(first, lambda _: None)
    client = TestClient(create_app(engines[0], ServerOptions(NAME)))
    response = client.post("/completion", json={"prompt": ["a", "b", "c"], "n_predict": 4})
    assert response.status_code == 503
    assert response.headers["retry-after"]
    for engine in engines:
        while engine.step():
            pass
    # None of the three stayed.
    assert engines[0].stats().generated_tokens == engines[1].stats().generated_tokens


# --- clients that leave ---


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ["/completion", "/infill", "/api/generate"])
def test_who_leaves_ends_the_work(tmp_path: Path, route: str, stream: bool) -> None:
    """B53: the text would be a million tokens long, so only the leaving can end it."""
    loaded = tiny.load_tiny(tmp_path, max_position_embeddings=10**6)
    engine = Engine(tiny.scripted(loaded, [50], 2))
    until = time.monotonic() + DEADLINE
    body = {"prompt": "ab", "input_prefix": "a", "stream": stream}
    content = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    with serving(engine) as client:
        address = (client.base_url.host, client.base_url.port or 0)
        with socket.create_connection(address) as connection:
            connection.sendall(head.encode() + content)
            while engine.stats().running == 0:
                assert time.monotonic() < until
        while engine.stats().running:
            assert time.monotonic() < until
