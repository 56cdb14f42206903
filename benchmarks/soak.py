"""Minutes of good, bad, slow and leaving clients against a server; what is left afterwards.

    python benchmarks/soak.py [--minutes 5] [--model default]

Good requests (every route that writes; greedy and seeded; streamed and not) have one right
answer each, computed before by an engine alone in this process, without cache reuse and lookup.
Around them `hostile.py`'s clients leave, read slowly, announce more than they send, send too
much and nonsense. There are more clients than slots and places in the queue, so some are told
503; good ones try again.

At the end there must be nobody running or waiting by `/metrics`, no more open files than before,
all slots must answer at once, and the server must end when it is asked to. The server's resident
memory is sampled each second; `megabytes_per_minute` is its slope behind the first third. More
growth in that time than `--most-growth` of it counts as a leak. Ends in one line of JSON, and with
1 if anything in `faults` is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import servers
from hostile import HOSTILE, TIMEOUT, Fault, metrics
from http_load import Json, events, text_of

from starquill.engine.engine import Engine
from starquill.loading import load
from starquill.types import EngineOptions, Hole, SamplingParams

RUNNING, WAITING = "starquill_running", "starquill_waiting"
SLOTS, QUEUE, CLIENTS = 4, 8, 16
GOOD_SHARE = 0.5
IDLE_SECONDS = 60.0
# A connection that is being taken down, or a log that was opened late.
SPARE_FILES = 4
PROMPTS = (
    "def fibonacci(n):\n    ",
    "import os\n\n\ndef files_below(folder):\n    for path in ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
    "# Read a CSV file and return the sum of its second column.\n" * 12 + "def total(path):\n",
)
HOLES = (
    ("def area(radius):\n    return ", "\n\n\nprint(area(2))\n"),
    ("for number in range(10):\n    if number % 2 == 0:\n", "\n    else:\n        odd += 1\n"),
)


@dataclass(frozen=True)
class Good:
    """A request with one right answer."""

    path: str
    body: Json
    expected: str


class Tally:
    """What came of the requests; all threads write here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    def count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def fault(self, what: str) -> None:
        with self._lock:
            self.outcomes["fault"] += 1
            if len(self.faults) < 20:
                self.faults.append(what)


def good_requests(model: str) -> list[Good]:
    """Each with the answer of an engine that has nothing else to do."""
    engine = Engine(load(model), EngineOptions(slots=1, prefix_cache=False, lookup=0))
    tokenizer = engine.model.require_tokenizer()
    made = []
    for number, prompt in enumerate(PROMPTS):
        for params in (
            SamplingParams(max_tokens=24 + number),
            SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=11 + number),
        ):
            asked: Json = {"max_tokens": params.max_tokens, "temperature": params.temperature}
            asked |= {"top_p": params.top_p, "seed": params.seed}
            text = engine.complete(prompt, params)
            made.append(Good("/v1/completions", {"prompt": prompt, **asked}, text))
        greedy = SamplingParams(max_tokens=20)
        ids = tokenizer.encode(prompt)
        text = "".join(delta.text for delta in engine.generate(ids, greedy))
        asked = {"prompt": ids, "temperature": 0}
        made.append(Good("/v1/completions", {**asked, "max_tokens": 20}, text))
        made.append(Good("/completion", {**asked, "n_predict": 20}, text))
    for before, after in HOLES:
        text = engine.fill(Hole(before, after), SamplingParams(max_tokens=16))
        asked = {"prompt": before, "suffix": after, "temperature": 0}
        made.append(Good("/v1/completions", {**asked, "max_tokens": 16}, text))
        asked = {"input_prefix": before, "input_suffix": after, "temperature": 0}
        made.append(Good("/infill", {**asked, "prompt": "", "n_predict": 16}, text))
    assert all(good.expected for good in made), "an expected answer is empty and proves nothing"
    return made


def ask(port: int, good: Good, stream: bool) -> str | None:
    """The text of the answer; None where the server is busy, after the time it asked for."""
    connection = HTTPConnection(servers.HOST, port, timeout=TIMEOUT)
    try:
        body = json.dumps({**good.body, "stream": stream})
        connection.request("POST", good.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status == 503:
            response.read()
            time.sleep(float(response.headers["Retry-After"]))
            return None
        if response.status != 200:
            raise Fault(f"{good.path} was answered {response.status}: {response.read(300)!r}")
        answers = events(response) if stream else [json.loads(response.read())]
        return "".join(text_of(answer) for answer in answers)
    finally:
        connection.close()


def ask_until_answered(port: int, good: Good, rng: random.Random, tally: Tally) -> str:
    stream = rng.random() < 0.5
    while (text := ask(port, good, stream)) is None:
        tally.count("good: busy")
    if text != good.expected:
        told = f"{good.path} {json.dumps(good.body)[:120]} (stream: {stream})"
        raise Fault(f"{told} wrote {text!r} (expected {good.expected!r})")
    return "right"


def work(server: servers.Server, good: list[Good], tally: Tally, ends: float, seed: int) -> None:
    """One client after the other, until it is time."""
    port = server.port
    rng = random.Random(seed)
    hostile = list(HOSTILE)
    while time.monotonic() < ends and server.process.poll() is None:
        kind = "good" if rng.random() < GOOD_SHARE else rng.choice(hostile)
        try:
            if kind == "good":
                outcome = ask_until_answered(port, rng.choice(good), rng, tally)
            else:
                outcome = HOSTILE[kind](port, rng)
            tally.count(f"{kind}: {outcome}")
        except Exception as error:
            tally.fault(f"{kind}: {type(error).__name__}: {error}"[:600])


class MemoryWatch:
    """Samples a process's resident size each second, in a thread."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/status")
        self._done = threading.Event()
        self.samples: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        started = time.monotonic()
        while not self._done.wait(1.0):
            lines = self._path.read_text().splitlines()
            kib = [int(line.split()[1]) for line in lines if line.startswith("VmRSS")]
            if not kib:  # the process has ended
                return
            self.samples.append((time.monotonic() - started, kib[0] * 1024))

    def summary(self) -> dict[str, float]:
        late = self.samples[len(self.samples) // 3 :]
        seconds, sizes = zip(*late, strict=True)
        slope = statistics.linear_regression(seconds, sizes).slope
        return {
            "first_megabytes": round(self.samples[0][1] / 1e6, 1),
            "median_megabytes": round(statistics.median(sizes) / 1e6, 1),
            "peak_megabytes": round(max(size for _, size in self.samples) / 1e6, 1),
            "megabytes_per_minute": round(60 * slope / 1e6, 3),
            "growth": round(slope * (seconds[-1] - seconds[0]) / statistics.median(sizes), 4),
        }


def until_idle(port: int) -> dict[str, float]:
    """The metrics when nobody runs or waits any more, or those at the end of patience."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        found = metrics(port)
        missing = {RUNNING, WAITING} - set(found)
        if missing:
            raise Fault(f"/metrics has no {missing}")
        if found[RUNNING] == found[WAITING] == 0 or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def all_at_once(port: int, good: list[Good], tally: Tally) -> None:
    """Every good request, as many at a time as there are slots."""

    def one(number: int) -> None:
        rng = random.Random(number)
        tally.count(f"after: {ask_until_answered(port, good[number], rng, tally)}")

    with ThreadPoolExecutor(SLOTS) as pool:
        for future in [pool.submit(one, number) for number in range(len(good))]:
            try:
                future.result()
            except Exception as error:
                tally.fault(f"after: {type(error).__name__}: {error}"[:600])


def soak(server: servers.Server, good: list[Good], options: argparse.Namespace) -> dict[str, Any]:
    tally = Tally()
    port, pid = server.port, server.process.pid
    all_at_once(port, good, tally)  # warms up, and must be right already
    before = open_files(pid)
    watch = MemoryWatch(pid)
    ends = time.monotonic() + 60 * options.minutes
    clients = [
        threading.Thread(target=work, args=(server, good, tally, ends, options.seed + number))
        for number in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    watch.stop()
    outcomes = tally.outcomes
    if (code := server.process.poll()) is not None:
        return {"outcomes": outcomes, "faults": [*tally.faults, f"the server ended with {code}"]}
    left = until_idle(port)
    all_at_once(port, good, tally)
    left = until_idle(port) if left[RUNNING] == left[WAITING] == 0 else left
    after, memory = open_files(pid), watch.summary()
    code = server.stop()
    checks: dict[str, Callable[[], bool]] = {
        f"running {left[RUNNING]:.0f}, waiting {left[WAITING]:.0f} at the end": lambda: (
            left[RUNNING] == left[WAITING] == 0
        ),
        f"{after} open files (before: {before})": lambda: after <= before + SPARE_FILES,
        f"memory grew by {memory['growth']:.1%}": lambda: memory["growth"] <= options.most_growth,
        f"the server ended with {code}": lambda: code in (0, -signal.SIGTERM),
        "a traceback is in the log": lambda: "Traceback" not in server.log.read_text(),
    }
    faults = tally.faults + [told for told, is_right in checks.items() if not is_right()]
    return {
        "outcomes": dict(sorted(outcomes.items())),
        "memory": memory,
        "open_files": [before, after],
        "faults": faults,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default", help="a folder with fill tokens, or default")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--most-growth", type=float, default=0.05, help="of resident memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--log", type=Path, help="where the server's log is kept")
    return parser.parse_args()


def main() -> int:
    options = parse()
    busy = round(os.getloadavg()[0], 2)
    good = good_requests(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        log = options.log or Path(scratch) / "server.log"
        flags = ("--slots", str(SLOTS), "--queue", str(QUEUE))
        with servers.starquill(options.model, log, options.threads, *flags) as server:
            result = soak(server, good, options)
    settings = {"minutes": options.minutes, "model": options.model, "seed": options.seed}
    settings |= {"slots": SLOTS, "queue": QUEUE, "clients": CLIENTS, "load_average": busy}
    print(json.dumps({"benchmark": "soak", **settings, **result}, ensure_ascii=False))
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
