"""`starquill serve`: what it says, what it refuses, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from starquill.cli.app import main
from starquill.cli.serve import size_of
from starquill.errors import BadRequestError
from tests import tiny
from tests.cli.test_errors import error_line

Capture = pytest.CaptureFixture[str]
ROUTE = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny.config(max_position_embeddings=2**20)
    return tiny.write_checkpoint(tmp_path_factory.mktemp("serve") / "model", raw)


class Served:
    """A `starquill serve` of its own process that has started."""

    def __init__(self, arguments: Sequence[str], last: str = "cache") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "starquill", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert self.process.stdout is not None
        self.block: dict[str, str] = {}
        for line in self.process.stdout:
            name, _, value = line.partition(":")
            self.block[name] = value.strip()
            if name == last:
                break
        if not self.block:
            raise AssertionError(self.process.communicate()[1])
        self.url = self.block["address"]

    def end(self, kind: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code and what it wrote to standard error."""
        self.process.send_signal(kind)
        err = self.process.communicate(timeout=60)[1]
        return self.process.returncode, err


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    found = Served(arguments)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
            found.process.communicate()


def test_it_tells_what_it_serves_and_ends_with_0(folder: Path) -> None:
    settings = ("--slots", "2", "--queue", "3", "--context", "128", "--quant", "8")
    with served(str(folder), *settings, "--name", "mine", "--name", "other") as server:
        block = server.block
        assert block["model"] == f"mine ({folder})"
        assert "q8" in block["weights"]
        assert (block["slots"], block["queue"], block["context"]) == ("2", "3", "128 tokens")
        for name in ("mine", "other", "model", str(folder)):
            body = {"prompt": "ab", "max_tokens": 2, "model": name}
            assert httpx.post(server.url + ROUTE, json=body).json()["model"] == "mine"
        code, err = server.end()
    assert code == 0
    lines = [line for line in err.splitlines() if not line.startswith("quantizing")]
    assert len(lines) == 4
    assert all("POST /v1/completions 200" in line for line in lines)


@pytest.mark.parametrize(("host", "status"), [("localhost", 403), ("0.0.0.0", 200)])
def test_on_a_loopback_address_only_its_names_lead_there(
    folder: Path, host: str, status: int
) -> None:
    """A web page whose name was made to lead here would be this server's own."""
    with served(str(folder), "--host", host) as server:
        port = server.url.rpartition(":")[2]
        page = {"Host": f"page.example:{port}", "Origin": f"http://page.example:{port}"}
        url = f"http://127.0.0.1:{port}/v1/models"
        assert httpx.get(url, headers=page).status_code == status
        assert httpx.get(url, headers={"Host": f"localhost:{port}"}).status_code == 200


def test_ctrl_c_ends_it_with_0(folder: Path) -> None:
    with served("--model", str(folder)) as server:
        assert server.end(signal.SIGINT) == (0, "")


def test_at_the_end_running_requests_are_answered(folder: Path) -> None:
    """A signal while a stream is read: it goes on to its end, and nobody new gets in."""
    body = {"prompt": "ab", "max_tokens": 300, "temperature": 0, "stream": True}
    body["logit_bias"] = {"0": -100}
    with (
        served(str(folder)) as server,
        httpx.stream("POST", server.url + ROUTE, json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert server.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_draining_has_an_end(folder: Path) -> None:
    body = {"prompt": "ab", "max_tokens": 900_000, "temperature": 0, "stream": True}
    body["logit_bias"] = {"0": -100}
    with (
        served(str(folder), "--drain-seconds", "0") as server,
        httpx.stream("POST", server.url + ROUTE, json=body, timeout=60) as answer,
    ):
        next(answer.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_the_key_from_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-a-file\n")
    with served(str(folder), "--api-key-file", str(tmp_path / "key")) as server:
        url = f"{server.url}/v1/models"
        assert httpx.get(url).status_code == 401
        headers = {"Authorization": "Bearer from-a-file"}
        assert httpx.get(url, headers=headers).status_code == 200


def test_a_port_in_use(capsys: Capture, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = error_line(capsys, "serve", str(folder), "--port", str(port))
    assert str(port) in line


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "a" * 70, "\ud800"])
def test_an_address_that_is_none(capsys: Capture, folder: Path, host: str) -> None:
    assert "--host" in error_line(capsys, "serve", str(folder), "--port", "0", "--host", host)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--port", "-1"), "--port"),
        (("--port", "65536"), "--port"),
        (("--slots", "0"), "--slots"),
        (("--queue", "-1"), "--queue"),
        (("--context", "0"), "--context"),
        (("--prefill-chunk", "0"), "--prefill-chunk"),
        (("--lookup", "-1"), "--lookup"),
        (("--cache-memory", "much"), "--cache-memory"),
        (("--max-body", "0"), "--max-body"),
        (("--max-body", "-1"), "--max-body"),
        (("--drain-seconds", "-1"), "--drain-seconds"),
        (("--api-key", ""), "key"),
        (("--api-key", "é"), "key"),
        (("--api-key", "a", "--api-key-file", "b"), "--api-key-file"),
        (("--api-key-file", "/no/such/file"), "/no/such/file"),
        (("--model", "another"), "another"),
    ],
)
def test_options_that_make_no_sense(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, options: Sequence[str], named: str
) -> None:
    """Told before anything is loaded."""
    monkeypatch.setattr("starquill.cli.run.load", pytest.fail)
    assert named in error_line(capsys, "serve", "some/model", *options)


def test_sizes() -> None:
    for text, size in (
        ("0", 0),
        ("1048576", 2**20),
        ("16MiB", 16 * 2**20),
        ("2 GiB", 2 * 2**30),
        ("2g", 2 * 10**9),
        ("500MB", 500 * 10**6),
        ("1TiB", 2**40),
        ("3kib", 3 * 1024),
    ):
        assert size_of("--x", text) == size
    for text in ("", "GiB", "1.5GiB", "1 2", "1XB", "１", "-1", "1e3"):
        with pytest.raises(BadRequestError, match="--x"):
            size_of("--x", text)


def test_without_the_packages_it_says_how_to_get_them(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == "uvicorn" else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    line = error_line(capsys, "serve", "some/model")
    assert "pip install 'starquill[serve]'" in line


@pytest.mark.parametrize("when", ["prompt", "token"])
def test_b61_a_failing_first_step_ends_the_start(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, folder: Path, when: str
) -> None:
    """B61: the server said that it was ready, and then every completion failed."""
    from starquill.loading import load
    from starquill.models.causal import CausalLM

    whole, calls = CausalLM.logits, []

    def broken(self: Any, hidden: Any) -> Any:
        calls.append(1)
        if when == "prompt" or len(calls) > 1:
            raise RuntimeError("a weight is not there")
        return whole(self, hidden)

    monkeypatch.setattr(CausalLM, "logits", broken)
    monkeypatch.setattr("uvicorn.Server.run", pytest.fail)
    assert load(folder) is not None
    threads = threading.active_count()
    line = error_line(capsys, "serve", str(folder), "--port", "0")
    assert "a weight is not there" in line
    assert threading.active_count() == threads


def test_help_names_the_options(capsys: Capture) -> None:
    assert main(["serve", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("--host", "--api-key-file", "--cache-memory", "--no-prefix-cache", "--quant"):
        assert option in out
