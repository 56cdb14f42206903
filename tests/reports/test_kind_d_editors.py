"""Kind d, the routes that editors speak: fills, their forms, and special tokens in text.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.server import llamacpp, llamacpp_schema, ollama, ollama_schema
from starquill.types import GenerateRequest
from tests import tiny
from tests.server.editors import NAME, events, serving

END, PREFIX, MIDDLE, SUFFIX, PAD, REPO, FILE, ISSUE = range(8)
CONTROL = frozenset(range(8))
UNDERSCORES = tiny.SPECIAL_TOKENS
HYPHENS = tuple(name.replace("_", "-") for name in tiny.SPECIAL_TOKENS)
NONE = ("<|endoftext|>",)
SIDES = ("a", "", " ", "\n", "\r\n", "def f():\n    ", "<fim_middle>", "<|endoftext|>", "é😀")


def loaded_with(folder: Path, special: tuple[str, ...]) -> LoadedModel:
    raw = tiny.config(max_position_embeddings=256)
    return load(tiny.write_checkpoint(folder, raw, tokenizer=tiny.byte_tokenizer(special)))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return loaded_with(tmp_path_factory.mktemp("model"), UNDERSCORES)


def by_infill(loaded: LoadedModel, before: str, after: str) -> GenerateRequest:
    body = llamacpp_schema.InfillBody(input_prefix=before, input_suffix=after, n_predict=8)
    return llamacpp.infill_request(Engine(loaded), body)[0]


def by_generate(loaded: LoadedModel, before: str, after: str) -> GenerateRequest:
    options = ollama_schema.Options(num_predict=8)
    body = ollama_schema.GenerateBody(prompt=before, suffix=after, options=options)
    return ollama.generate_request(Engine(loaded), body)


def template(before: str, after: str, special: tuple[str, ...] = UNDERSCORES) -> str:
    _, prefix, middle, suffix, *_ = special
    return f"{prefix}{before}{suffix}{after}{middle}"


def by_completion_template(loaded: LoadedModel, before: str, after: str) -> GenerateRequest:
    body = llamacpp_schema.CompletionBody(prompt="", n_predict=8)
    return llamacpp.completion_request(Engine(loaded), body, template(before, after))


def by_ollama_template(loaded: LoadedModel, before: str, after: str) -> GenerateRequest:
    options = ollama_schema.Options(num_predict=8)
    body = ollama_schema.GenerateBody(prompt=template(before, after), options=options)
    return ollama.generate_request(Engine(loaded), body)


PARTS = pytest.mark.parametrize("ask", [by_infill, by_generate])
ALL = pytest.mark.parametrize(
    "ask", [by_infill, by_generate, by_completion_template, by_ollama_template]
)


# --- B16, B17: exact forms ---


@ALL
def test_b16_fills_have_nothing_between_their_parts(loaded: LoadedModel, ask: Any) -> None:
    """B16: a third party's template put newlines around tokens, and the output was garbage."""
    encode = loaded.require_tokenizer().encode
    request = ask(loaded, "a", "b")
    assert request.prompt_ids == (PREFIX, *encode("a"), SUFFIX, *encode("b"), MIDDLE)
    assert request.heal == b""
    assert {END, *request.stop_ids} >= {END, PREFIX, MIDDLE, SUFFIX, PAD, REPO, FILE}


@PARTS
@pytest.mark.parametrize("before", SIDES)
@pytest.mark.parametrize("after", [side for side in SIDES if side])
def test_b16_whatever_the_sides_are(loaded: LoadedModel, ask: Any, before: str, after: str) -> None:
    """B15, B16, B17: no text-start token, no space, and no control token from the code."""
    encode = loaded.require_tokenizer().encode
    expected = (PREFIX, *encode(before), SUFFIX, *encode(after), MIDDLE)
    assert ask(loaded, before, after).prompt_ids == expected


@PARTS
@pytest.mark.parametrize("special", [UNDERSCORES, HYPHENS])
def test_b17_both_spellings_are_single_tokens(
    tmp_path: Path, ask: Any, special: tuple[str, ...]
) -> None:
    """B17: SantaCoder's hyphens were sent as pieces of text to a model with underscores."""
    other = loaded_with(tmp_path, special)
    ids = ask(other, "a", "b").prompt_ids
    assert [i for i in ids if i in CONTROL] == [PREFIX, SUFFIX, MIDDLE]
    assert len(ids) == 5


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with serving(Engine(loaded_with(tmp_path_factory.mktemp("plain"), NONE))) as client:
        yield client


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[httpx.Client]:
    with serving(Engine(loaded)) as client:
        yield client


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": ""}),
        ("/api/generate", {"prompt": "a", "suffix": "b"}),
        ("/completion", {"prompt": template("a", "b")}),
        ("/api/generate", {"prompt": template("a", "b"), "raw": True}),
    ],
)
def test_b17_a_model_without_fill_tokens_refuses_fills(
    without: httpx.Client, route: str, body: dict[str, Any]
) -> None:
    """B17: a middle token that was not there became a garbage id."""
    response = without.post(route, json=body)
    assert response.status_code == 400
    assert "fim_prefix" in response.text


@pytest.mark.parametrize(
    "prompt",
    [
        template("a", "b", HYPHENS),
        "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
        "<PRE> a <SUF>b <MID>",
        "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>\n",
    ],
)
@pytest.mark.parametrize("route", ["/completion", "/api/generate"])
def test_b17_another_models_template_is_refused(
    client: httpx.Client, route: str, prompt: str
) -> None:
    """B16, B17: tokens that a model lacks were taken apart into letters, and nobody was told."""
    response = client.post(route, json={"prompt": prompt})
    assert response.status_code == 400
    assert "another template" in response.text
    # Code that only mentions such names is plain text.
    body = {"prompt": f"x = '{prompt.strip()}'", "n_predict": 1, "options": {"num_predict": 1}}
    assert client.post(route, json=body).status_code == 200


# --- B56: suffixes ---


def test_b56_a_suffix_is_never_dropped(loaded: LoadedModel) -> None:
    """B56: suffixes were ignored, or appended to the text."""
    for raw in (None, False, True):
        body = ollama_schema.GenerateBody(prompt="a", suffix="b", raw=raw)
        ids = ollama.generate_request(Engine(loaded), body).prompt_ids
        assert [i for i in ids if i in CONTROL] == [PREFIX, SUFFIX, MIDDLE]
    body = ollama_schema.GenerateBody(prompt="", suffix="b")
    assert SUFFIX in ollama.generate_request(Engine(loaded), body).prompt_ids


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 8}),
        ("/api/generate", {"prompt": "a", "suffix": "b", "options": {"temperature": 0}}),
    ],
)
def test_b56_the_answer_is_the_middle_alone(
    loaded: LoadedModel, route: str, body: dict[str, Any]
) -> None:
    """B56, B02: neither side nor the token that ends the middle is in the answer."""
    xy = loaded.require_tokenizer().encode("xy")
    with serving(Engine(tiny.scripted(loaded, [*xy, FILE, *xy], 5))) as client:
        answer = client.post(route, json=body | {"stream": False}).json()
    assert answer.get("content", answer.get("response")) == "xy"
    assert answer.get("stop_type", answer.get("done_reason")) in ("eos", "stop")


def test_b56_tokens_and_a_suffix_are_refused(client: httpx.Client) -> None:
    """B56: a suffix beside a prompt of token ids has no text to be a prefix."""
    body = {"model": NAME, "prompt": [1, 2], "suffix": "b"}
    response = client.post("/api/generate", json=body)
    assert response.status_code == 400
    assert "prompt" in response.json()["error"]


# --- B57: special tokens in the output ---


@pytest.mark.parametrize("stream", [True, False])
def test_b57_control_tokens_count_but_do_not_show(loaded: LoadedModel, stream: bool) -> None:
    """B57: tags leaked into the text, or took the space behind them with them."""
    encode = loaded.require_tokenizer().encode
    script = [*encode("a"), ISSUE, *encode(" x"), END]
    body = {"prompt": [9, 9], "temperature": 0, "n_predict": 9, "n_probs": 1, "stream": stream}
    with serving(Engine(tiny.scripted(loaded, script, 2))) as client:
        response = client.post("/completion", json=body | {"return_tokens": True})
    if stream:
        *parts, last = events(response)
        text = "".join(part["content"] for part in parts)
        tokens = [i for part in parts for i in part["tokens"]]
        scored = [p["completion_probabilities"][0]["token"] for p in parts]
    else:
        last = response.json()
        text, tokens = last["content"], last["tokens"]
        scored = [token["token"] for token in last["completion_probabilities"]]
    assert text == "a x"
    assert tokens == script
    assert "<issue_start>" in scored
    assert last["tokens_predicted"] == len(script)
