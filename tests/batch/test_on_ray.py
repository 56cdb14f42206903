"""`starquill batch --ray` on a cluster of two nodes: a killed worker, and a killed driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from starquill.cli.app import main
from tests import tiny
from tests.batch.test_batch import read, write
from tests.clusters import NO_RAY, processes, two_nodes

pytest.importorskip("ray", reason=NO_RAY)

COUNT = 600
ACTOR = "ray::MapWorker(MapBatches(Worker))"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, two_nodes(patch) as found:
        yield found


def test_on_two_nodes_killed_and_taken_up_again(address: str, tmp_path: Path) -> None:
    """A worker is killed, then the driver; the answers are those of one machine, each once."""
    folder = tiny.write_checkpoint(tmp_path / "model", tiny.config(max_position_embeddings=512))
    lines: list[object] = [
        {"id": n, "prompt": f"def f{n}(", "max_tokens": 30, "temperature": 0} for n in range(COUNT)
    ]
    source = write(tmp_path / "in", [*lines, "nonsense"])
    command = ["batch", str(source), str(tmp_path / "here"), "--model", str(folder)]
    assert main(command) == 1
    expected = sorted(read(tmp_path / "here"), key=lambda answer: answer["index"])

    target = tmp_path / "out"
    command[2] = str(target)
    command = [sys.executable, "-m", "starquill", *command]
    command += ["--ray", "--ray-address", address, "--replicas", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(process, target, 1)
    workers = processes(ACTOR)
    assert workers
    os.kill(workers[0], signal.SIGKILL)
    wait_for(process, target, 200)
    process.kill()
    process.communicate()
    kept = read_whole(target)
    assert 200 <= len(kept) < COUNT

    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        1,
        f"{COUNT + 1} lines are answered, 1 of them with an error",
    )
    answers = read(target)
    assert answers[: len(kept)] == kept
    answers.sort(key=lambda answer: answer["index"])
    for answer in (*answers, *expected):
        answer.get("usage", {}).pop("prompt_tokens_details", None)  # what was cached is chance
    assert answers == expected


def wait_for(process: subprocess.Popen[str], target: Path, count: int) -> None:
    while not target.exists() or target.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def read_whole(target: Path) -> list[object]:
    data = target.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
