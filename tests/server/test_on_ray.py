"""`starquill serve --ray` on a cluster of two nodes, one of whose replicas is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from starquill.engine.engine import Engine
from starquill.loading import load
from starquill.types import SamplingParams
from tests import tiny
from tests.cli.test_serve import Served
from tests.clusters import NO_RAY, processes, two_nodes

pytest.importorskip("ray", reason=NO_RAY)

PATIENCE = 300
LENGTH = 600
TITLE = "ray::ServeReplica:starquill-"


@dataclass
class Running:
    folder: Path
    server: Served

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=PATIENCE)

    def count(self, series: str) -> float:
        """One of the front's figures; 0 before the first."""
        text = httpx.get(f"{self.server.url}/metrics", timeout=PATIENCE).text
        found = [line for line in text.splitlines() if line.startswith(series)]
        return float(found[0].rpartition(" ")[2]) if found else 0.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny.config(max_position_embeddings=2048)
    return tiny.write_checkpoint(tmp_path_factory.mktemp("ray") / "model", raw)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, two_nodes(patch) as found:
        yield found


@contextmanager
def served(folder: Path, address: str, *more: str) -> Iterator[Running]:
    server = Served([str(folder), "--ray", "--ray-address", address, *more], last="cluster")
    try:
        yield Running(folder, server)
        code, err = server.end()
        assert code == 0, err
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()
    assert not processes(TITLE), "replicas are left behind"


@pytest.fixture(scope="module")
def running(folder: Path, address: str) -> Iterator[Running]:
    with served(folder, address, "--replicas", "2", "--slots", "4") as found:
        yield found


def test_more_replicas_come_when_requests_wait(folder: Path, address: str) -> None:
    """Work for one slot is kept waiting until there is a second replica."""
    with (
        served(folder, address, "--autoscale", "1-2", "--slots", "1") as running,
        ThreadPoolExecutor(8) as pool,
    ):
        assert running.server.block["replicas"].startswith("1 to 2")
        health = f"{running.server.url}/health"
        answers = [pool.submit(running.post, body_of(n)) for n in range(8)]
        while httpx.get(health, timeout=PATIENCE).json()["replicas"] < 2:
            time.sleep(1)  # nobody reads the log of accesses, and a pipe holds little
            if answers[0].done():
                answers.append(pool.submit(running.post, body_of(0)))
                assert answers.pop(0).result().status_code == 200
        assert all(answer.result().status_code == 200 for answer in answers)


def body_of(number: int, **more: Any) -> dict[str, Any]:
    """A long answer that is the same every time."""
    return {
        "prompt": f"def f{number}(",
        "max_tokens": LENGTH,
        "temperature": 0,
        "logit_bias": {"0": -100},
        **more,
    }


def test_replicas_answer_as_one_engine_does(running: Running) -> None:
    engine = Engine(load(running.folder))
    params = SamplingParams(max_tokens=12, logit_bias={0: -100.0})
    prompts = [f"def f{number}(" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        bodies = [body_of(number, max_tokens=12) for number in range(6)]
        texts = [a.json()["choices"][0]["text"] for a in pool.map(running.post, bodies)]
    assert texts == [engine.complete(prompt, params) for prompt in prompts]
    assert running.server.block["replicas"] == "2"


def test_killed_replicas_lose_no_accepted_request(running: Running) -> None:
    """All of them are killed while they work: every request is answered, and right.

    Requests may come too late to be in a replica when it dies, so there are several rounds.
    """
    expected = running.post(body_of(0)).json()["choices"][0]["text"]
    rounds = 0
    while not running.count('starquill_front_lost_calls_total{outcome="called again"}'):
        rounds += 1
        assert rounds <= 5, "no replica was killed at work"
        kill_all(running, expected)
    assert running.count('starquill_front_lost_calls_total{outcome="stream ended"}') == rounds
    assert httpx.get(f"{running.server.url}/health", timeout=PATIENCE).status_code == 200


def kill_all(running: Running, expected: str) -> None:
    url, body = f"{running.server.url}/v1/completions", body_of(0, stream=True)
    with (
        ThreadPoolExecutor(8) as pool,
        httpx.stream("POST", url, json=body, timeout=PATIENCE) as streamed,
    ):
        lines = streamed.iter_lines()
        first = next(lines)
        answers = [pool.submit(running.post, body_of(0)) for _ in range(8)]
        replicas = processes(TITLE)
        assert replicas
        for pid in replicas:
            os.kill(pid, signal.SIGKILL)
        rest = [line for line in lines if line]
        told = [(answer.result().status_code, answer.result().json()) for answer in answers]
    assert first.startswith("data: ")
    assert rest[-2] == "event: error"
    assert "lost" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
    assert [status for status, _ in told] == [200] * 8
    assert {said["choices"][0]["text"] for _, said in told} == {expected}


def test_errors_are_the_replicas_own(running: Running) -> None:
    answer = running.post({"prompt": "a", "temperature": 1000})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"
