"""`/metrics`, read by Prometheus' own parser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.loop import EngineLoop
from starquill.server.app import create_app
from starquill.server.options import ServerOptions
from tests import tiny
from tests.server.standing_in import AnsweringEngine

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]
ROUTE = "/v1/completions"
FIRST, BETWEEN = "starquill_time_to_first_token_seconds", "starquill_time_between_tokens_seconds"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny.load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def client(loaded: LoadedModel) -> Iterator[TestClient]:
    engine = Engine(loaded)
    with EngineLoop(engine):
        yield TestClient(create_app(engine, ServerOptions("tiny")))


def values(client: TestClient) -> Values:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(found: Values, name: str, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0.0)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_timed(client: TestClient, stream: bool) -> None:
    bias = {"0": -100}
    body = {"prompt": [5, 6], "max_tokens": 7, "logit_bias": bias, "n": 2, "stream": stream}
    assert client.post(ROUTE, json=body).status_code == 200
    client.post(ROUTE, json={"prompt": "a", "max_tokens": 0})
    found = values(client)
    assert value(found, f"{FIRST}_count") == 2
    assert value(found, f"{BETWEEN}_count") == 2 * 6
    assert value(found, f"{FIRST}_sum") > 0


def test_answers_are_counted_by_route_and_status(client: TestClient) -> None:
    client.post(ROUTE, json={"prompt": "a", "max_tokens": 1})
    client.post(ROUTE, json={})
    for name in ("a", "b/c"):
        client.get(f"/v1/models/{name}")
        client.get(f"/made-up/{name}")
    found = values(client)

    def count(method: str, route: str, status: int) -> float:
        labels = {"method": method, "route": route, "status": str(status)}
        return value(found, "starquill_http_requests_total", **labels)

    assert count("POST", ROUTE, 200) == 1
    assert count("POST", ROUTE, 400) == 1
    assert count("GET", "/v1/models/{name:path}", 404) == 2
    assert count("any", "none", 404) == 2
    assert not any("made-up" in label for _, labels in found for _, label in labels)


def test_the_engines_counts_are_shown(loaded: LoadedModel) -> None:
    engine: Any = AnsweringEngine(loaded, lambda _: [])
    found = values(TestClient(create_app(engine, ServerOptions("tiny"))))
    names = ("running", "waiting", "prompt_tokens_total", "cached_tokens_total",
             "generated_tokens_total", "proposed_tokens_total", "accepted_tokens_total",
             "steps_total", "cache_bytes", "cache_bytes_used")  # fmt: skip
    shown = [value(found, f"starquill_{name}") for name in names]
    assert shown == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_two_applications_count_apart(loaded: LoadedModel) -> None:
    apps = [create_app(Engine(loaded), ServerOptions("tiny")) for _ in range(2)]
    first, second = (TestClient(app) for app in apps)
    first.get("/health")
    labels = {"method": "GET", "route": "/health", "status": "200"}
    assert value(values(first), "starquill_http_requests_total", **labels) == 1
    assert value(values(second), "starquill_http_requests_total", **labels) == 0
