"""What suffix-prefix order costs in quality: bits per byte of true middles, and exact lines.

    python benchmarks/fim_order.py --data FILE|DIR [--model MODEL] [--holes 300]

Random spans of one to five lines are cut out of files that the model was not trained on; each is
given with the 40 lines before and the 15 after it, in both orders. Scored are the true middle's
tokens, and whether the greedy fill's first line is the true one. Both orders see the same holes, so
differences are paired. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch

from starquill.checkpoint.files import read_texts
from starquill.engine.engine import Engine
from starquill.engine.fim import FillOrder, fill_request
from starquill.engine.loaded import LoadedModel
from starquill.engine.scoring import log_probabilities
from starquill.loading import load
from starquill.types import Hole, SamplingParams

LINES_BEFORE, LINES_AFTER, MOST_LINES = 40, 15, 5
GREEDY = SamplingParams(max_tokens=64, stop=("\n",))


@dataclass(frozen=True)
class Cut:
    """A hole and what was in it."""

    hole: Hole
    middle: str


@dataclass(frozen=True)
class Result:
    """One order's scores over all holes."""

    bits_per_byte: float
    exact_first_lines: float


def cuts(texts: Sequence[str], count: int, rng: random.Random) -> list[Cut]:
    """Spans whose first line says something; the hole begins behind its indentation."""
    found: list[Cut] = []
    while len(found) < count:
        lines = rng.choice(texts).split("\n")
        first = rng.randrange(len(lines))
        end = min(first + rng.randint(1, MOST_LINES), len(lines))
        if not 8 <= len(lines[first].strip()) <= 80:
            continue
        indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
        before = "\n".join([*lines[max(0, first - LINES_BEFORE) : first], indent])
        after = "\n".join(["", *lines[end : end + LINES_AFTER]])
        middle = "\n".join(lines[first:end]).removeprefix(indent)
        found.append(Cut(Hole(before, after), middle))
    return found


def bits(loaded: LoadedModel, cut: Cut, order: FillOrder) -> float:
    """What the true middle costs behind its hole."""
    request, _ = fill_request(loaded, cut.hole, SamplingParams(max_tokens=256), order=order)
    middle = loaded.require_tokenizer().encode(cut.middle)
    ids = [*request.prompt_ids, *middle]
    with torch.inference_mode():
        scores = torch.cat(list(log_probabilities(loaded, ids[:-1])))[-len(middle) :]
    return -float(scores.gather(1, torch.tensor(middle)[:, None]).sum()) / math.log(2)


def first_line_is_right(engine: Engine, cut: Cut, order: FillOrder) -> bool:
    request, _ = fill_request(engine.model, cut.hole, GREEDY, order=order)
    text = "".join(delta.text for delta in engine.generate(request))
    return text.strip() == cut.middle.split("\n")[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="files it was not trained on")
    parser.add_argument("--model", default="default")
    parser.add_argument("--holes", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(options.model)
    engine = Engine(loaded)
    texts = [text for text in read_texts(options.data, ".py") if text.count("\n") > MOST_LINES]
    chosen = cuts(texts, options.holes, random.Random(options.seed))
    size = sum(len(cut.middle.encode()) for cut in chosen)
    costs = {order: [bits(loaded, cut, order) for cut in chosen] for order in get_args(FillOrder)}
    results = {
        order: Result(
            sum(costs[order]) / size,
            statistics.mean(first_line_is_right(engine, cut, order) for cut in chosen),
        )
        for order in get_args(FillOrder)
    }
    differences = [s - p for s, p in zip(costs["spm"], costs["psm"], strict=True)]
    report = {
        "benchmark": "fim_order",
        "model": options.model,
        "files": len(texts),
        "holes": len(chosen),
        "bytes": size,
        **{order: asdict(result) for order, result in results.items()},
        "spm_costs_bits_per_byte": sum(differences) / size,
        "standard_error": statistics.stdev(differences) * math.sqrt(len(chosen)) / size,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
