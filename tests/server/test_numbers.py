"""Numbers that JSON has not, or that no float holds: 400, and never in an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from starquill.engine.loaded import LoadedModel
from starquill.server.app import create_app
from starquill.server.options import ServerOptions
from starquill.server.stream import event, json_text
from starquill.types import Delta, Logprobs, TokenLogprob
from tests import tiny
from tests.server.serving import asking
from tests.server.standing_in import AnsweringEngine

STRANGE = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "-1" + "0" * 400]
SAMPLING = ("temperature", "top_p", "min_p", "top_k", "seed", "presence_penalty")
COMMON = (*SAMPLING, "frequency_penalty", "logit_bias")
FIELDS = {
    "/v1/completions": (*COMMON, "repetition_penalty", "max_tokens", "n", "logprobs"),
    "/completion": (
        *COMMON,
        "repeat_penalty",
        "n_predict",
        "t_max_predict_ms",
        "n_probs",
        "n_cmpl",
    ),
    "/infill": (*COMMON, "repeat_penalty", "n_predict", "t_max_predict_ms"),
    "/api/generate": ("keep_alive", "top_logprobs"),
    "/api/generate options": (*SAMPLING, "repeat_penalty", "num_ctx", "num_predict"),
}
CASES = [(route, field) for route, fields in FIELDS.items() for field in fields]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny.load_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[TestClient]:
    with asking(loaded) as found:
        yield found


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("number", STRANGE)
@pytest.mark.parametrize(("route", "field"), CASES)
def test_strange_numbers(client: TestClient, route: str, field: str, number: str) -> None:
    path, _, place = route.partition(" ")
    value = f'{{"9": {number}}}' if field == "logit_bias" else number
    given = f'"{field}": {value}'
    inner = f'"{place}": {{{given}}}' if place else given
    limit = (
        "" if field in ("n_predict", "max_tokens") or place else '"n_predict": 2, "max_tokens": 2,'
    )
    content = f'{{"prompt": "ab", "input_prefix": "a", "stream": false, {limit} {inner}}}'
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400), answer.text
    json.loads(answer.text, parse_constant=refuse)


@pytest.mark.parametrize("route", ["/completion", "/infill"])
@pytest.mark.parametrize("field", ["t_max_predict_ms", "temperature"])
@pytest.mark.parametrize("number", ["NaN", "1e999", "-1e999"])
def test_no_number_is_refused(client: TestClient, route: str, field: str, number: str) -> None:
    content = f'{{"prompt": "a", "n_predict": 1, "{field}": {number}}}'
    answer = client.post(route, content=content)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e999"])
def test_a_bias_that_no_float_holds(client: TestClient, number: str) -> None:
    content = f'{{"prompt": "a", "n_predict": 1, "logit_bias": [[9, {number}]]}}'
    answer = client.post("/completion", content=content)
    assert answer.status_code == 400
    assert "logit_bias" in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_answers_are_json(number: float) -> None:
    for write in (event, json_text):
        with pytest.raises(ValueError, match="JSON"):
            write({"number": number})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("route", "wanted"),
    [
        ("/v1/completions", {"prompt": "ab", "logprobs": 1}),
        ("/completion", {"prompt": "ab", "n_probs": 1}),
        ("/api/generate", {"prompt": "ab", "logprobs": True, "top_logprobs": 1}),
    ],
)
def test_a_token_that_cannot_be_has_a_number(
    loaded: LoadedModel, route: str, wanted: dict[str, Any], stream: bool
) -> None:
    scored = Logprobs(-math.inf, (TokenLogprob(9, -math.inf),))
    deltas = [Delta("r", 9, "a", scored), Delta("r", 10, "b", scored, "length")]
    engine: Any = AnsweringEngine(loaded, lambda _: deltas)
    client = TestClient(create_app(engine, ServerOptions("tiny")))
    answer = client.post(route, json={**wanted, "stream": stream})
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    found = [json.loads(line, parse_constant=refuse) for line in lines if line != "[DONE]"]
    assert "logprob" in json.dumps(found)
    assert not any("error" in one for one in found)
