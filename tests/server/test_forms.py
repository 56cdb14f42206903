"""Small things that clients of each kind rely on: forms of errors, names, headers, methods."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from starquill.engine.loaded import LoadedModel
from starquill.server.models import is_served
from starquill.server.options import ServerOptions
from starquill.types import EngineOptions
from tests import tiny
from tests.server.serving import asking, serving
from tests.server.test_limits import BODIES, LIMITS
from tests.server.test_limits import loaded as loaded  # the fixture: a model with a chat template

KEY = "a key"


@pytest.fixture(scope="module")
def client(loaded: LoadedModel) -> Iterator[TestClient]:
    with asking(loaded, name="mine", aliases=("other:latest", "third:7b")) as found:
        yield found


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status"),
    [
        ("GET", "/api/tags", {"Authorization": "Bearer no"}, b"", 401),
        ("POST", "/api/generate", {}, b"x" * 5000, 413),
        ("POST", "/api/generate", {}, [b"x" * 3000, b"x" * 3000], 413),
        ("POST", "/api/pull", {}, b"{}", 404),
        ("GET", "/api/generate", {}, b"", 405),
        ("GET", "/api/tags", {"Origin": "http://page.example"}, b"", 403),
    ],
)
def test_every_error_of_ollamas_routes_is_in_its_form(
    loaded: LoadedModel, method: str, path: str, headers: Any, content: Any, status: int
) -> None:
    with serving(loaded, api_key=KEY, most_body_bytes=4000) as url:
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        body = iter(content) if isinstance(content, list) else content
        answer = httpx.request(method, url + path, headers=headers, content=body)
    assert answer.status_code == status
    (told,) = answer.json().values()
    assert answer.json().keys() == {"error"}
    assert isinstance(told, str)
    assert ("WWW-Authenticate" in answer.headers) == (status == 401)
    assert ("Allow" in answer.headers) == (status == 405)


def test_other_routes_have_openais_form(loaded: LoadedModel) -> None:
    with asking(loaded) as client:
        for path in ("/apis", "/v1/nothing", "/api"):
            assert client.get(path).json()["error"]["code"] == 404


NAMES = ["mine", "mine:latest", "other", "other:latest", "third:7b", "third:7b:latest", "", None]


NAMING = ("/v1/completions", "/v1/chat/completions", "/api/generate", "/api/chat")


@pytest.mark.parametrize("route", NAMING)
def test_a_model_by_each_of_its_names(client: TestClient, route: str) -> None:
    for named in NAMES:
        body = {**LIMITS, **BODIES[route], "model": named}
        answer = client.post(route, json=body)
        assert answer.status_code == 200, named
        assert answer.json()["model"] == "mine"


@pytest.mark.parametrize("name", ["third", "mine:7b", "Mine", ":latest", "mine:latest:latest", "m"])
def test_other_names_are_other_models(client: TestClient, name: str) -> None:
    for route in NAMING:
        body = {**LIMITS, **BODIES[route], "model": name}
        assert client.post(route, json=body).status_code == 404


def test_a_name_given_with_a_tag() -> None:
    assert is_served(ServerOptions("a:latest"), "a")
    assert not is_served(ServerOptions("a:7b"), "a")


@pytest.mark.parametrize(
    "body", [{"n_cmpl": 4}, {"prompt": ["a", "b", "c", "d"]}, {"prompt": ["a", "b"], "n_cmpl": 2}]
)
@pytest.mark.parametrize("route", ["/completion", "/infill"])
def test_more_answers_than_could_ever_wait(
    loaded: LoadedModel, route: str, body: dict[str, Any]
) -> None:
    """503 says that it can be asked again, which never helped."""
    if route == "/infill" and "prompt" in body:
        body = {"n_cmpl": 64}
    with asking(loaded, EngineOptions(slots=1, queue=2)) as client:
        answer = client.post(route, json={**LIMITS, **BODIES[route], **body})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in ("n_cmpl", "prompt")
        body = {**LIMITS, **BODIES[route], "n_cmpl": 3, "temperature": 1}
        assert len(client.post(route, json=body).json()) == 3


def test_head(loaded: LoadedModel) -> None:
    with serving(loaded) as url:
        for path in ("/health", "/v1/models", "/api/version", "/api/tags"):
            answer = httpx.head(url + path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert "head" not in json.dumps(list(httpx.get(f"{url}/openapi.json").json()["paths"]))


@pytest.mark.parametrize("route", BODIES)
def test_a_mark_in_front_of_the_body(client: TestClient, route: str) -> None:
    content = codecs.BOM_UTF8 + json.dumps({**LIMITS, **BODIES[route]}).encode()
    answer = client.post(route, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("route", BODIES)
def test_top_k_may_be_off(client: TestClient, route: str) -> None:
    seeded = {"seed": 7, "temperature": 1.5}
    texts = []
    for top_k in (-1, 0):
        sampling = {**seeded, "top_k": top_k}
        body = {**LIMITS, **BODIES[route], **sampling, "options": {"num_predict": 3, **sampling}}
        answer = client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        choice = found.get("choices", [{}])[0]
        texts.append(choice.get("text") or choice.get("message") or found.get("content"))
    assert texts[0] == texts[1]
    if route.startswith("/v1"):
        body = {**LIMITS, **BODIES[route], "top_k": -2}
        assert client.post(route, json=body).status_code == 400


@pytest.mark.parametrize("route", BODIES)
def test_streams_are_not_kept_on_their_way(client: TestClient, route: str) -> None:
    answer = client.post(route, json={**LIMITS, **BODIES[route], "stream": True})
    assert answer.status_code == 200
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"


def test_chat_shows_control_tokens_if_asked_for(loaded: LoadedModel) -> None:
    """B57: by default they are hidden, and counted."""
    issue, end = 7, 0
    encode = loaded.require_tokenizer().encode
    model = tiny.scripted(loaded, [*encode("a"), issue, *encode(" x"), end], len(encode("abc")))
    body = {**BODIES["/v1/chat/completions"], "temperature": 0, "max_tokens": 9}
    with asking(model) as client:
        for skip, text in ((True, "a x"), (False, "a<issue_start> x")):
            asked = {**body, "skip_special_tokens": skip}
            answer = client.post("/v1/chat/completions", json=asked).json()
            assert answer["choices"][0]["message"]["content"] == text
            assert answer["usage"]["completion_tokens"] == 5
