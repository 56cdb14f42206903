"""Who may ask: pages of other servers may not, nor names that only look like this machine's."""

from __future__ import annotations

import httpx
import pytest

from starquill.engine.loaded import LoadedModel
from tests import tiny
from tests.server.serving import asking, serving
from tests.server.test_app import error_of

ROUTE = "/v1/completions"
PAGE = "http://page.example"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny.load_tiny(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("origin", [PAGE, "null", "file://", "http://localhost:1", "http://", ""])
@pytest.mark.parametrize("route", ["/completion", "/infill", "/tokenize"])
def test_other_servers_pages_may_not_ask(loaded: LoadedModel, origin: str, route: str) -> None:
    """A browser asks nobody before it sends text/plain, and these routes read whatever comes."""
    with serving(loaded) as url:
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        answer = httpx.post(url + route, content=b'{"prompt": "a"}', headers=headers)
        assert "--cors" in error_of(answer, 403)["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_its_own_page_and_programs_may(loaded: LoadedModel) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    with serving(loaded) as url:
        port = url.rpartition(":")[2]
        for address in (url, f"http://localhost:{port}", f"http://LOCALHOST:{port}"):
            host = address.removeprefix("http://")
            for headers in ({"Host": host, "Origin": address}, {"Host": host}):
                assert httpx.post(url + ROUTE, json=body, headers=headers).status_code == 200
        # Behind a proxy that ends TLS.
        headers = {"Host": "models.example", "Origin": "https://models.example"}
        assert httpx.post(url + ROUTE, json=body, headers=headers).status_code == 200


@pytest.mark.parametrize("cors", [(PAGE,), ("http://another.example", PAGE), ("*",)])
def test_pages_that_are_let_may(loaded: LoadedModel, cors: tuple[str, ...]) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    with asking(loaded, cors=cors) as client:
        for origin, allowed in ((PAGE, True), ("http://third.example", cors == ("*",))):
            answer = client.post(ROUTE, json=body, headers={"Origin": origin})
            assert answer.status_code == (200 if allowed else 403)
            assert ("access-control-allow-origin" in answer.headers) == allowed


GOOD_HOSTS = [
    *("localhost", "localhost:8080", "LocalHost.", "api.localhost:1", "127.0.0.1:8080"),
    *("127.5.6.7", "[::1]:8080", "mine:8080", "MINE"),
]
BAD_HOSTS = [
    *("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("notlocalhost", "192.168.0.1", "0.0.0.0:8080", "[::2]", "[::1", "", "localhost@evil.example"),
]


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models", "/api/tags"])
def test_a_name_that_leads_here_is_not_enough(loaded: LoadedModel, path: str) -> None:
    with asking(loaded, hosts=("mine",)) as client:
        for host in GOOD_HOSTS:
            assert client.get(path, headers={"Host": host}).status_code == 200, host
        for host in BAD_HOSTS:
            headers = {"Host": host, "Origin": f"http://{host}"}
            assert client.get(path, headers=headers).status_code == 403, host


def test_an_allowed_origins_name_leads_here_too(loaded: LoadedModel) -> None:
    with asking(loaded, hosts=(), cors=("https://models.example",)) as client:
        for host, status in (("models.example", 200), ("other.example", 403)):
            assert client.get("/health", headers={"Host": host}).status_code == status
    with asking(loaded, hosts=(), cors=("*",)) as client:
        assert client.get("/health", headers={"Host": "other.example"}).status_code == 200


def test_elsewhere_any_name_leads_here(loaded: LoadedModel) -> None:
    with asking(loaded) as client:
        assert client.get("/health", headers={"Host": "models.example"}).status_code == 200
