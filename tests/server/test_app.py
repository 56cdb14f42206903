"""What holds for every route: the key, sizes, ids, the access log, errors."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from starlette.testclient import TestClient

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import NumericsError
from starquill.server.app import create_app
from starquill.server.options import ServerOptions
from starquill.types import EngineOptions, GenerateRequest
from tests import tiny
from tests.server.serving import asking, serving
from tests.server.standing_in import AnsweringEngine

ROUTE = "/v1/completions"
KEY = "a key"
MOST = 2000


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny.load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[TestClient]:
    with asking(loaded, aliases=("other", "a/folder")) as found:
        yield found


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, in OpenAI's form and one printable line."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"].isprintable()
    return error


@pytest.mark.parametrize("given", ["", KEY, "Bearer", "Bearer a", f"Basic {KEY}", "Bearer a keyx"])
def test_without_the_key_nothing_is_told(loaded: LoadedModel, given: str) -> None:
    with asking(loaded, api_key=KEY) as client:
        for method, path in (("GET", "/v1/models"), ("POST", ROUTE), ("GET", "/metrics")):
            answer = client.request(method, path, headers={"Authorization": given})
            assert error_of(answer, 401)["type"] == "authentication_error"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert client.get("/health", headers={"Authorization": given}).status_code == 200


@pytest.mark.parametrize("kind", ["Bearer", "bearer"])
def test_with_the_key_all_is_open(loaded: LoadedModel, kind: str) -> None:
    with asking(loaded, api_key=KEY) as client:
        headers = {"Authorization": f"{kind} {KEY}"}
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_a_key_of_strange_bytes_is_refused(loaded: LoadedModel) -> None:
    with serving(loaded, api_key=KEY) as url:
        answer = httpx.get(f"{url}/v1/models", headers={"Authorization": b"Bearer \xff\xe9"})
        error_of(answer, 401)


def body_of(size: int) -> bytes:
    start, end = b'{"max_tokens": 0, "prompt": "', b'"}'
    return start + b"x" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("size", "status"), [(MOST, 200), (MOST + 1, 413), (50_000_000, 413)])
def test_bodies_have_a_limit(loaded: LoadedModel, chunked: bool, size: int, status: int) -> None:
    """With a length, and without one; over a socket, whose client must get the answer."""
    body = body_of(size)
    content: Any = body
    if chunked:
        content = (body[at : at + 100_000] for at in range(0, size, 100_000))
    headers = {"Content-Type": "application/json"}
    with serving(loaded, most_body_bytes=MOST) as url:
        answer = httpx.post(url + ROUTE, content=content, headers=headers)
        assert answer.status_code == status
        if status == 413:
            assert str(MOST) in error_of(answer, 413)["message"]
        assert httpx.get(f"{url}/health").status_code == 200


def test_browsers_are_refused_unless_asked_for(loaded: LoadedModel, client: TestClient) -> None:
    asked = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    answer = client.options(ROUTE, headers=asked)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    with asking(loaded, api_key=KEY, cors=("http://page.example",)) as open_to_one:
        answer = open_to_one.options(ROUTE, headers=asked)  # a browser sends no key with it
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        other = open_to_one.options(ROUTE, headers={**asked, "Origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = open_to_one.post(ROUTE, headers={"Origin": "http://page.example"})
        assert error_of(refused, 401)
        assert refused.headers["access-control-allow-origin"] == "http://page.example"


def test_a_request_id_comes_back(client: TestClient) -> None:
    for path in ("/health", "/nowhere"):
        answer = client.get(path, headers={"X-Request-Id": "mine-1.2"})
        assert answer.headers["X-Request-Id"] == "mine-1.2"


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 200, "a\tb"])
def test_an_unusable_request_id_is_replaced(client: TestClient, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    found = {client.get("/health", headers=headers).headers["X-Request-Id"] for _ in range(2)}
    assert len(found) == 2
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in found)


def test_every_request_has_a_line_in_the_access_log(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "starquill.access"):
        client.get("/no%0Awhere%1b", headers={"X-Request-Id": "mine"})
        client.post(ROUTE, json={"prompt": "a", "max_tokens": 1})
    lines = [record.message for record in caplog.records if record.name == "starquill.access"]
    assert len(lines) == 2
    assert re.fullmatch(r"mine testclient GET /no\\nwhere\\x1b 404 [0-9.]+s", lines[0])
    assert re.fullmatch(r"[0-9a-f]{32} testclient POST /v1/completions 200 [0-9.]+s", lines[1])


def test_unknown_routes_and_methods(client: TestClient) -> None:
    assert "/v1/nothing" in error_of(client.get("/v1/nothing"), 404)["message"]
    answer = client.get(ROUTE)
    error_of(answer, 405)
    assert answer.headers["Allow"] == "POST"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b"null", b"\xff", b"[" * 100_000, b'{"prompt": "\\ud800"}'],
)
def test_bodies_that_are_no_objects(client: TestClient, body: bytes) -> None:
    error_of(client.post(ROUTE, content=body, headers={"Content-Type": "application/json"}), 400)


def test_a_body_of_another_type_is_told_about(client: TestClient) -> None:
    answer = client.post(ROUTE, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert "application/json" in error_of(answer, 400)["message"]


def test_a_full_queue_answers_503(loaded: LoadedModel) -> None:
    options = EngineOptions(slots=1, queue=1)
    engine = Engine(loaded, options)  # which nobody steps: whatever comes in stays
    client = TestClient(create_app(engine, ServerOptions("tiny")))
    for name in ("a", "b"):
        engine.submit(GenerateRequest(name, (1, 2)), lambda _: None)
    for stream in (False, True):
        answer = client.post(ROUTE, json={"prompt": "a", "stream": stream})
        assert error_of(answer, 503)["type"] == "overloaded_error"
        assert int(answer.headers["Retry-After"]) >= 1


def test_a_fault_tells_nothing_of_itself(
    loaded: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = AnsweringEngine(loaded, lambda _: [KeyError("a secret")])
    client = TestClient(create_app(engine, ServerOptions("tiny")))
    answer = client.post(ROUTE, json={"prompt": "a"}, headers={"X-Request-Id": "mine"})
    assert "secret" not in error_of(answer, 500)["message"]
    assert answer.headers["X-Request-Id"] == "mine"
    assert "a secret" in caplog.text  # the log does tell


def test_a_model_that_computes_no_numbers_is_no_fault_of_the_client(loaded: LoadedModel) -> None:
    engine: Any = AnsweringEngine(loaded, lambda _: [NumericsError("not finite")])
    client = TestClient(create_app(engine, ServerOptions("tiny")))
    assert "not finite" in error_of(client.post(ROUTE, json={"prompt": "a"}), 500)["message"]


def test_health_tells_of_an_engine_that_ended(loaded: LoadedModel) -> None:
    working = True
    app = create_app(Engine(loaded), ServerOptions("tiny"), lambda: working)
    client = TestClient(app)
    assert client.get("/health").json() == {"status": "ok"}
    working = False
    error_of(client.get("/health"), 503)


def test_models_as_the_openai_client_sees_them(loaded: LoadedModel) -> None:
    with serving(loaded, name="mine", aliases=("a/folder",)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["mine"]
        assert client.models.retrieve("mine").id == "mine"
        assert client.models.retrieve("a/folder").id == "mine"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("another")


def test_a_request_may_name_the_model_or_not(client: TestClient) -> None:
    for naming in ({}, {"model": "tiny"}, {"model": "other"}, {"model": None}, {"model": ""}):
        answer = client.post(ROUTE, json={"prompt": "a", "max_tokens": 1, **naming})
        assert answer.json()["model"] == "tiny"
    for name in ("another", "TINY", ":"):
        answer = client.post(ROUTE, json={"prompt": "a", "model": name})
        assert error_of(answer, 404)["param"] == "model"


def test_the_document_names_every_route(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert {ROUTE, "/v1/models", "/v1/models/{name}", "/health", "/metrics"} <= set(
        document["paths"]
    )
    for operation in (o for path in document["paths"].values() for o in path.values()):
        assert "422" not in operation["responses"]
