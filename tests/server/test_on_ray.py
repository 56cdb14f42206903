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
from tests.adapters import making
from tests.cli.test_serve import Served
from tests.clusters import NO_RAY, processes, two_nodes

pytest.importorskip("ray", reason=NO_RAY)

PATIENCE = 300
LENGTH = 600
TITLE = "ray::ServeReplica:starquill-"
STAGE = "ray::StageProcess"


@dataclass
class Running:
    server: Served
    client: httpx.Client  # one for all: to make one takes longer than a short answer

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(f"{self.server.url}/v1/completions", json=body)

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
def served(address: str, *more: str) -> Iterator[Running]:
    server = Served(["--ray", "--ray-address", address, *more], last="cluster")
    try:
        with httpx.Client(timeout=PATIENCE) as client:
            yield Running(server, client)
        code, err = server.end()
        assert code == 0, err
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()
    assert not processes(TITLE), "replicas are left behind"
    assert not processes(STAGE), "stages are left behind"


@pytest.fixture(scope="module")
def running(folder: Path, address: str) -> Iterator[Running]:
    with served(address, str(folder), "--replicas", "2", "--slots", "4") as found:
        yield found


def test_more_replicas_come_when_requests_wait(folder: Path, address: str) -> None:
    """Work for one slot is kept waiting until there is a second replica."""
    with (
        served(address, str(folder), "--autoscale", "1-2", "--slots", "1") as running,
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


def test_several_models_one_of_them_in_stages(folder: Path, address: str, tmp_path: Path) -> None:
    """Each answers as one process does, and a stage that is killed loses no accepted request."""
    adapter = making.peft_folder(tmp_path / "sql", r=4)[0]
    file = tmp_path / "models.yml"
    file.write_text(
        f"whole: {{model: {folder}, slots: 2}}\n"
        f"split: {{model: {folder}, quant: 8, stages: 2, lora: [sql={adapter}]}}\n",
        encoding="utf-8",
    )
    with served(address, "--models", str(file), "--replica-cpus", "0.5") as running:
        assert running.server.block["replicas"] == "1; 1, of 2 stages each"
        listed = httpx.get(f"{running.server.url}/v1/models", timeout=PATIENCE).json()["data"]
        assert [item["id"] for item in listed] == ["whole", "split", "sql"]
        assert running.post({"model": "other", "prompt": "a"}).status_code == 404
        check_texts(running, folder, adapter)
        expected = running.post(body_of(0, model="split")).json()["choices"][0]["text"]
        kill_at_work(running, expected, STAGE, model="split")
        answered = httpx.get(f"{running.server.url}/health", timeout=PATIENCE).json()
        assert answered["models"] == {"whole": 1, "split": 1}


def check_texts(running: Running, folder: Path, adapter: Path) -> None:
    """Requests to all models at once get what one engine writes."""
    loaded = load(folder, quant="8")
    loaded.adapters.load("sql", adapter)
    engines = {"whole": Engine(load(folder)), "split": Engine(loaded), "sql": Engine(loaded)}
    params = SamplingParams(max_tokens=12, logit_bias={0: -100.0})
    asked = [(name, f"def f{number}(") for number in range(4) for name in engines]
    with ThreadPoolExecutor(len(asked)) as pool:
        bodies = [body_of(0, model=name, prompt=text, max_tokens=12) for name, text in asked]
        texts = [a.json()["choices"][0]["text"] for a in pool.map(running.post, bodies)]
    expected = [
        engines[name].complete(text, params, adapter="sql" if name == "sql" else None)
        for name, text in asked
    ]
    assert texts == expected
    assert len(set(expected)) > len(expected) // 2


def test_replicas_answer_as_one_engine_does(running: Running, folder: Path) -> None:
    engine = Engine(load(folder))
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
        kill_at_work(running, expected, TITLE)
    assert running.count('starquill_front_lost_calls_total{outcome="stream ended"}') == rounds
    assert httpx.get(f"{running.server.url}/health", timeout=PATIENCE).status_code == 200


def kill_at_work(running: Running, expected: str, title: str, **more: Any) -> None:
    """Kill the processes of this title while a stream is read and others wait for answers."""
    url, body = f"{running.server.url}/v1/completions", body_of(0, stream=True, **more)
    with (
        ThreadPoolExecutor(8) as pool,
        httpx.stream("POST", url, json=body, timeout=PATIENCE) as streamed,
    ):
        lines = streamed.iter_lines()
        first = next(lines)
        answers = [pool.submit(running.post, body_of(0, **more)) for _ in range(8)]
        for _ in range(200):  # lines of the stream, while the others arrive
            next(lines)
        found = processes(title)
        assert found
        for pid in found:
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
