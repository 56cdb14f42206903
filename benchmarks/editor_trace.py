"""Time to the first token while somebody types: with and without the prefix cache.

    python benchmarks/editor_trace.py --model DIR [--requests 50] [--cursor 0.5]

A file of 2,000 tokens (this repository's own code) is edited at a cursor that starts at
`--cursor` of its lines: each request has a few more characters in front of it, and every tenth
one the cursor is in another of the lines around. Each is a fill (`POST /infill`) of the whole
file. The same trace goes to servers with the cache and without it (`--no-prefix-cache`), in each
order of prefix and suffix (psm, spm); both servers of an order run, and are asked in turn.
In psm the suffix stands behind what was typed and is computed again, so `--cursor` decides how
much a cache can spare there.

`--model` is a folder that is quantized to 4 bits once, into `--work`, or is quantized already.
`same_answers` counts the requests that both servers answered with the same text. Ends in one
line of JSON; a ratio is the median time without the cache by that with it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import servers
from http_load import Json, Streamed, stream

from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.quantizing import QuantOptions, quantize_checkpoint

ROOT = Path(__file__).parents[1]
ORDERS = ("psm", "spm")
LINES_PER_MOVE, TYPED_PER_LINE = 8, 10
TYPED = "result = [self.price(item, quantity) for item, quantity in order.lines if quantity > 0]"
KEYS = (2, 5)  # characters typed from one request to the next


def source_file(model: str | Path, tokens: int) -> str:
    """`tokens` of this package's code, cut at the end of a line."""
    tokenizer = open_checkpoint(locate(model, None)).tokenizer
    assert tokenizer is not None, f"{model} has no tokenizer.json"
    files = sorted((ROOT / "starquill" / "engine").glob("*.py"))
    lines = "".join(path.read_text(encoding="utf-8") for path in files).splitlines(keepends=True)
    few, many = 0, len(lines)
    while many - few > 1:
        middle = (few + many) // 2
        fits = len(tokenizer.encode("".join(lines[:middle]))) <= tokens
        few, many = (middle, many) if fits else (few, middle)
    return "".join(lines[:few])


def trace(text: str, requests: int, cursor: float, seed: int) -> Iterator[tuple[str, str]]:
    """What stands before and after the cursor at each request; what was typed stays."""
    rng = random.Random(seed)
    lines = text.splitlines(keepends=True)
    line = round(cursor * (len(lines) - 1))
    for number in range(requests):
        if number % TYPED_PER_LINE == 0:
            moved = rng.randint(-LINES_PER_MOVE, LINES_PER_MOVE) if number else 0
            line = min(max(line + moved, 0), len(lines) - 1)
            lines.insert(line, "    ")
            typed = 0
        typed += rng.randint(*KEYS)
        lines[line] = "    " + TYPED[:typed]
        yield "".join(lines[: line + 1]), "\n" + "".join(lines[line + 1 :])
        if number % TYPED_PER_LINE == TYPED_PER_LINE - 1:
            lines[line] += "\n"


def body(before: str, after: str, order: str, tokens: int) -> Json:
    shared = {"prompt": "", "n_predict": tokens, "temperature": 0, "fim_order": order}
    return {"input_prefix": before, "input_suffix": after, **shared}


def measure_order(
    order: str, model: str, text: str, options: argparse.Namespace, work: Path
) -> dict[str, Any]:
    flags = {"cached": [], "uncached": ["--no-prefix-cache"]}
    found: dict[str, list[Streamed]] = {side: [] for side in flags}
    with ExitStack() as stack:
        ports = {}
        for side, more in flags.items():
            log = work / f"{order}-{side}.log"
            server = servers.starquill(model, log, options.threads, "--slots", "2", *more)
            ports[side] = stack.enter_context(server).port
            # Warms up with another text: nothing of the trace is in the cache.
            stream(ports[side], "/infill", body("import os\n", "\n", order, options.tokens))
        steps = trace(text, options.requests, options.cursor, options.seed)
        for number, (before, after) in enumerate(steps):
            for side in list(ports)[:: 1 if number % 2 == 0 else -1]:
                request = body(before, after, order, options.tokens)
                found[side].append(stream(ports[side], "/infill", request))
    waits = {side: [a.first - a.sent for a in answers] for side, answers in found.items()}
    medians = {side: statistics.median(seconds) for side, seconds in waits.items()}
    both = zip(found["cached"], found["uncached"], strict=True)
    return {
        "first_token_ms": {side: round(1000 * median, 1) for side, median in medians.items()},
        "slowest_ms": {side: round(1000 * max(seconds), 1) for side, seconds in waits.items()},
        "ratio": round(medians["uncached"] / medians["cached"], 2),
        "same_answers": sum(a.text == b.text for a, b in both),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="where files are made and kept")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--file-tokens", type=int, default=2000)
    parser.add_argument("--cursor", type=float, default=0.5, help="0 is the file's top, 1 its end")
    parser.add_argument("--tokens", type=int, default=8, help="written by each request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse()
    busy = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        model = options.model
        if "quantization" not in json.loads((model / "config.json").read_text(encoding="utf-8")):
            model = work / "ours-4"
            if not model.exists():
                quantize_checkpoint(options.model, model, QuantOptions("4"))
        text = source_file(model, options.file_tokens)
        found = {}
        for order in options.orders:
            found[order] = measure_order(order, str(model), text, options, work)
            print(order, json.dumps(found[order]), flush=True)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    settings["load_average"] = busy
    print(json.dumps({"benchmark": "editor_trace", **settings, "sides": found}))


if __name__ == "__main__":
    main()
