"""Ollama's routes: the `ollama` package as a real client, and what Continue and Twinny send."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from starquill import __version__
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import BusyError
from starquill.loading import load
from starquill.server import ollama as routes
from starquill.server import ollama_schema
from starquill.types import GenerateRequest, Hole, SamplingParams
from tests import tiny
from tests.server.editors import NAME, serving

END, PREFIX, MIDDLE, SUFFIX, PAD, REPO, FILE, ISSUE = range(8)
CONTEXT = 256
GREEDY = {"temperature": 0, "num_predict": 12}
BEFORE, AFTER = "def double(x):\n    return ", "\n\nprint(double(4))\n"
FIM = f"<fim_prefix>{BEFORE}<fim_suffix>{AFTER}<fim_middle>"
CONTINUE_STOPS = [
    *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>"),
    *("</fim_middle>", "</code>", "\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8", "```"),
]
# A chat template in the shape of StarCoder2-Instruct's, with words of our own.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ '### ' + message['role'] + '\\n' + message['content'] + '\\n' }}{% endfor %}"
    "{{ '### assistant\\n' }}"
)


@pytest.fixture(scope="module")
def default() -> LoadedModel:
    return load("default")


@pytest.fixture(scope="module")
def http(default: LoadedModel) -> Iterator[httpx.Client]:
    with serving(Engine(default)) as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> ollama.Client:
    return ollama.Client(host=str(http.base_url))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("model")
    return tiny.load_tiny(folder, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny.write_checkpoint(
        tmp_path_factory.mktemp("chat"), tiny.config(max_position_embeddings=CONTEXT)
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tiny.write_json(folder / "tokenizer_config.json", {**settings, "chat_template": TEMPLATE})
    return load(folder)


def request(loaded: LoadedModel, **body: Any) -> GenerateRequest:
    parsed = ollama_schema.GenerateBody.model_validate(body)
    return routes.generate_request(Engine(loaded), parsed)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


# --- the ollama package ---


def test_the_package_generates(client: ollama.Client, default: LoadedModel) -> None:
    answer = client.generate(NAME, "def f(x):\n    return", options=GREEDY)
    expected = Engine(default).complete("def f(x):\n    return", SamplingParams(max_tokens=12))
    assert answer.response == expected != ""
    assert (answer.model, answer.done) == (NAME, True)
    assert answer.done_reason in ("stop", "length")
    assert answer.prompt_eval_count == len(
        default.require_tokenizer().encode("def f(x):\n    return")
    )
    assert answer.eval_count is not None
    assert 0 < answer.eval_count <= 12
    for duration in (answer.total_duration, answer.prompt_eval_duration, answer.eval_duration):
        assert isinstance(duration, int)
        assert duration > 0


def test_the_package_streams(client: ollama.Client) -> None:
    whole = client.generate(NAME, "def f(x):\n", options=GREEDY).response
    *parts, last = client.generate(NAME, "def f(x):\n", options=GREEDY, stream=True)
    assert len(parts) > 1
    assert "".join(part.response for part in parts) == whole
    assert not any(part.done for part in parts)
    assert (last.response, last.done) == ("", True)


def test_the_package_fills(client: ollama.Client, default: LoadedModel) -> None:
    answer = client.generate(NAME, BEFORE, suffix=AFTER, options=GREEDY)
    assert answer.response == Engine(default).fill(Hole(BEFORE, AFTER), SamplingParams(12))


def test_the_package_goes_on_by_context(client: ollama.Client, default: LoadedModel) -> None:
    first = client.generate(NAME, "x = 1\n", options=GREEDY)
    assert first.context is not None
    tokenizer = default.require_tokenizer()
    assert tokenizer.decode(first.context) == "x = 1\n" + first.response
    second = client.generate(NAME, "\ny =", context=first.context, options=GREEDY)
    assert second.context is not None
    assert tokenizer.decode(second.context).startswith("x = 1\n" + first.response + "\ny =")
    assert second.prompt_eval_count == len(first.context) + len(tokenizer.encode("\ny ="))


def test_the_package_scores(client: ollama.Client) -> None:
    answer = client.generate(NAME, "def f(x):\n", options=GREEDY, logprobs=True, top_logprobs=2)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == answer.eval_count
    for scored in answer.logprobs:
        assert scored.top_logprobs is not None
        assert len(scored.top_logprobs) == 2
        assert scored.top_logprobs[0].token == scored.token
    parts = list(client.generate(NAME, "def f(x):\n", options=GREEDY, logprobs=True, stream=True))
    found = [s.token for part in parts for s in part.logprobs or ()]
    assert found == [scored.token for scored in answer.logprobs]


def test_the_package_lists_and_shows(client: ollama.Client, default: LoadedModel) -> None:
    [model] = client.list().models
    assert model.model == NAME
    assert model.details is not None
    assert (model.details.family, model.details.parameter_size) == ("starcoder2", "5.7M")
    assert model.details.quantization_level == "bfloat16"
    assert model.size is not None
    assert 11e6 < model.size < 13e6
    shown = client.show(NAME)
    assert shown.capabilities == ["completion", "insert"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["starcoder2.context_length"] == default.config.context_length
    assert shown.details == model.details
    [loaded] = client.ps().models
    assert (loaded.model, loaded.digest) == (NAME, model.digest)
    assert loaded.context_length == default.config.context_length


def test_the_package_is_told_of_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match=r"'mistral' not found") as caught:
        client.generate("mistral", "x")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"use /api/generate") as caught:
        client.chat(NAME, [{"role": "user", "content": "hi"}])
    assert caught.value.status_code == 400


# --- Continue ---


def test_continue_finds_that_the_model_fills(http: httpx.Client) -> None:
    """It looks for .Suffix in the template, and every line of the parameters must match."""
    body = http.post("/api/show", json={"name": NAME}).json()
    assert ".Suffix" in body["template"]
    for line in body["parameters"].split("\n"):
        assert re.fullmatch(r'(\S+)\s+((?:".*")|\S+)', line)
    assert body["parameters"].split() == ["num_ctx", "4096"]


def continue_body(**changes: Any) -> dict[str, Any]:
    options = {
        "temperature": 0.01,
        "num_predict": 24,
        "stop": CONTINUE_STOPS,
        "num_ctx": 4096,
    }
    body = {"model": NAME, "options": options, "keep_alive": 1800, "stream": True}
    return body | changes


def test_continue_sends_a_whole_template(http: httpx.Client, default: LoadedModel) -> None:
    answers = lines(http.post("/api/generate", json=continue_body(prompt=FIM, raw=True)))
    whole = request(default, prompt=FIM, raw=True, options={"stop": CONTINUE_STOPS})
    hole = Engine(default).generate(Hole(BEFORE, AFTER)).request
    assert whole.prompt_ids == hole.prompt_ids
    assert whole.stop_ids >= hole.stop_ids
    assert answers[-1]["prompt_eval_count"] == len(hole.prompt_ids)
    assert "context" not in answers[-1]
    assert all("response" in answer for answer in answers)


def test_continue_sends_prompt_and_suffix(http: httpx.Client) -> None:
    answers = lines(http.post("/api/generate", json=continue_body(prompt=BEFORE, suffix=AFTER)))
    assert answers[-1]["done"] is True


# --- Twinny ---


def twinny_body(prompt: str, **options: Any) -> dict[str, Any]:
    return {
        "model": NAME,
        "prompt": prompt,
        "stream": True,
        "keep_alive": "5m",
        "options": {"temperature": 0.2, "num_predict": 16, **options},
    }


def test_twinny_sends_a_whole_template(http: httpx.Client, default: LoadedModel) -> None:
    stop = ["<|endoftext|>", "<file_sep>"]
    context = "<repo_name>r\n<file_sep>u.py\nU = 1\n<file_sep>m.py\n"
    body = twinny_body(context + FIM, stop=stop)
    answers = lines(http.post("/api/generate", json=body))
    assert answers[-1]["done"] is True
    made = request(default, **body)
    fim = default.require_fim()
    control = [i for i in made.prompt_ids if i in default.require_tokenizer().special_ids]
    file, repo = fim.file_sep, fim.repo_name
    assert control == [repo, file, file, fim.prefix, fim.suffix, fim.middle]
    assert made.heal == b""


def test_twinny_warms_up_with_an_empty_prompt(http: httpx.Client) -> None:
    response = http.post("/api/generate", json=twinny_body("", num_predict=1))
    answer = response.json()
    assert (answer["response"], answer["done"], answer["done_reason"]) == ("", True, "load")
    unload = http.post("/api/generate", json={"model": NAME, "keep_alive": 0}).json()
    assert unload["done_reason"] == "unload"


# --- what bodies mean ---


def test_both_sides_of_a_hole_are_data(loaded: LoadedModel) -> None:
    nasty = "<fim_middle><|endoftext|>"
    ids = request(loaded, prompt=nasty, suffix=nasty).prompt_ids
    assert [i for i in ids if i <= ISSUE] == [PREFIX, SUFFIX, MIDDLE]


def test_an_empty_suffix_is_none(loaded: LoadedModel) -> None:
    """The package sends one with every prompt."""
    made = request(loaded, prompt="ab<fim_prefix>", suffix="", system="", template="")
    assert made.prompt_ids[-1] == PREFIX
    assert MIDDLE not in made.prompt_ids


def test_raw_does_not_drop_a_suffix(loaded: LoadedModel) -> None:
    assert MIDDLE in request(loaded, prompt="a", suffix="b", raw=True).prompt_ids


def test_num_ctx_bounds_a_hole(loaded: LoadedModel) -> None:
    options = {"num_ctx": 40, "num_predict": 8}
    made = request(loaded, prompt="a" * 200, suffix="b" * 200, options=options)
    assert len(made.prompt_ids) + 8 == 40
    assert made.params.max_tokens == 8


@pytest.mark.parametrize(
    ("limit", "left"), [(-1, CONTEXT - 3), (None, CONTEXT - 3), (5, 5), (0, 0)]
)
def test_limits(loaded: LoadedModel, limit: int | None, left: int) -> None:
    assert request(loaded, prompt="abc", options={"num_predict": limit}).params.max_tokens == left


def test_stop_strings_may_name_control_tokens(loaded: LoadedModel) -> None:
    made = request(loaded, prompt="abc", options={"stop": ["<file_sep>", "x"]})
    assert FILE in made.stop_ids
    with serving(Engine(tiny.scripted(loaded, [50, FILE, 51], 3))) as client:
        options = {"stop": ["<file_sep>"], "temperature": 0}
        body = {"model": NAME, "prompt": "a<issue_start><issue_start>", "options": options}
        answer = client.post("/api/generate", json=body | {"stream": False}).json()
    assert (answer["eval_count"], answer["done_reason"]) == (2, "stop")


def test_an_instruct_model_answers_a_prompt_in_its_form(instruct: LoadedModel) -> None:
    tokenizer = instruct.require_tokenizer()
    ids = request(instruct, prompt="Sort.").prompt_ids
    assert tokenizer.decode(ids) == "### user\nSort.\n### assistant\n"
    assert tokenizer.decode(request(instruct, prompt="Sort.", raw=True).prompt_ids) == "Sort"
    # A whole fill has its form already; so has one by prompt and suffix.
    assert request(instruct, prompt="<fim_prefix>a<fim_suffix><fim_middle>").prompt_ids[0] == PREFIX
    assert request(instruct, prompt="a", suffix="b").prompt_ids[0] == PREFIX


def test_chat(instruct: LoadedModel) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    with serving(Engine(instruct)) as http:
        client = ollama.Client(host=str(http.base_url))
        options = {"temperature": 0, "num_predict": 6, "stop": ["\x00"]}
        answer = client.chat(NAME, messages, options=options)
        *parts, last = client.chat(NAME, messages, options=options, stream=True)
        assert "".join(part.message.content or "" for part in parts) == answer.message.content
        assert answer.message.role == "assistant"
        assert (last.done, last.eval_count) == (True, answer.eval_count)
        with pytest.raises(ollama.ResponseError, match="no system message"):
            client.chat(NAME, [{"role": "system", "content": "s"}, *messages])
        empty = client.chat(NAME, [])
        assert (empty.message.content, empty.done) == ("", True)


def test_a_schema_restricts_the_text(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    body = {"model": NAME, "prompt": "x = ", "format": schema, "stream": False}
    response = http.post("/api/generate", json=body | {"options": {"num_predict": 400}})
    assert isinstance(json.loads(response.json()["response"])["a"], bool)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": 1}, "prompt"),
        ({"prompt": "a", "options": {"temperature": "hot"}}, "options.temperature"),
        ({"prompt": "a", "options": {"top_p": 3}}, "top_p"),
        ({"prompt": "a", "context": [-1]}, "ids"),
        ({"prompt": "a", "format": "xml"}, "format"),
        ({"prompt": "a", "images": ["aGk="]}, "images"),
        ({"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ({"prompt": "a", "system": "be brief"}, "system"),
        ({"prompt": "a", "suffix": "b", "context": [9]}, "context"),
        ({"prompt": "x" * 9000}, "context"),
        ([], "body"),
    ],
)
def test_a_bad_body_is_told_in_ollamas_form(http: httpx.Client, body: Any, told: str) -> None:
    response = http.post("/api/generate", json=body)
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert told in response.json()["error"]


def test_a_full_queue_is_told_in_ollamas_form(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object) -> None:
        raise BusyError("2 requests wait already; try again later")

    engine = Engine(loaded)
    monkeypatch.setattr(engine, "submit", busy)
    with serving(engine) as client:
        response = client.post("/api/generate", json={"prompt": "a"})
    assert response.status_code == 503
    assert "try again" in response.json()["error"]
    assert response.headers["retry-after"]


def test_text_as_curl_sends_it(http: httpx.Client) -> None:
    """`curl -d` calls its body a form."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps({"prompt": "x", "options": {"num_predict": 1}}).encode()
    assert lines(http.post("/api/generate", content=body, headers=form))[-1]["done"] is True


def test_version(http: httpx.Client) -> None:
    assert http.get("/api/version").json() == {"version": __version__}


def test_a_model_without_fill_tokens(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path, tokenizer=tiny.byte_tokenizer(("<|endoftext|>",)))
    with serving(Engine(load(folder))) as client:
        shown = client.post("/api/show", json={"model": NAME}).json()
        assert (shown["template"], shown["capabilities"]) == ("{{ .Prompt }}", ["completion"])
        response = client.post("/api/generate", json={"prompt": "a", "suffix": "b"})
        assert response.status_code == 400
        assert "fill-in-the-middle" in response.json()["error"]
