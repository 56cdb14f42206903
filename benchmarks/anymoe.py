"""Training gates on hidden states that are kept, beside a full forward pass in every epoch.

    python benchmarks/anymoe.py --prompts 64 --epochs 100

The second way is what mistral.rs does: each epoch runs the model on all prompts, and takes as long
as any other: one pass and one epoch of gates, times --epochs. Both ways share their code: what
differs is whether the pass is done again. Medians of --rounds; seconds of the processor (with one
thread, those of a machine that does nothing else) and of the clock. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from starquill.anymoe.config import AnyMoeConfig
from starquill.anymoe.course import Course, Lessons
from starquill.anymoe.experts import open_base, open_experts
from starquill.anymoe.rows import Split
from starquill.anymoe.states import Pass, write_states

T = TypeVar("T")
# Functions of the standard library, so that prompts are code.
SOURCE = Path(json.__file__).parent.glob("*.py")


def prompts(base: object, count: int, length: int) -> list[list[int]]:
    tokenizer = base.checkpoint.tokenizer  # type: ignore[attr-defined]
    ids = [i for path in sorted(SOURCE) for i in tokenizer.encode(path.read_text("utf-8"))]
    step = max(1, (len(ids) - length) // count)
    return [ids[n * step : n * step + length] for n in range(count)]


@dataclass(frozen=True)
class Cost:
    """Seconds: of the processor, and of the clock, which also counts what others did."""

    cpu: float
    wall: float


def timed(action: Callable[[], T]) -> tuple[T, Cost]:
    wall, cpu = time.perf_counter(), time.process_time()
    value = action()
    return value, Cost(time.process_time() - cpu, time.perf_counter() - wall)


def ignore(_: Course) -> None:
    """Nobody looks at the epochs."""


def summary(
    trained: list[float], passes: list[float], epochs: list[float], count: int
) -> dict[str, float]:
    """Medians: one pass and `count` epochs of gates, beside so many passes with an epoch each."""
    kept = median(passes) + median(trained)
    full = count * (median(passes) + median(epochs))
    return {
        "kept_s": round(kept, 2),
        "of_it_the_pass_s": round(median(passes), 2),
        "full_s": round(full, 2),
        "times": round(full / kept, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base = open_base(options.model)
    layers = tuple(range(base.config.num_hidden_layers))
    # The base thrice: what its experts hold does not matter to the time.
    experts = open_experts(base, {"one": options.model, "two": options.model}, layers)
    texts = prompts(base, options.prompts, options.length)
    labels = [row % 3 for row in range(len(texts))]
    run = Pass(base, experts, layers, texts)
    split = Split(tuple(range(len(texts))), ())
    result: dict[str, object] = {"prompts": len(texts), "epochs": options.epochs}
    with tempfile.TemporaryDirectory() as folder:
        for gate in ("token", "mean"):
            config = AnyMoeConfig(gate=gate, epochs=options.epochs)
            once = AnyMoeConfig(gate=gate, epochs=1)
            trained: list[Cost] = []
            passes: list[Cost] = []
            epochs: list[Cost] = []
            # In turns, so that what else the machine does strikes both alike.
            for number in range(options.rounds):
                path = Path(folder) / f"{gate}-{number}.bin"
                states, cost = timed(partial(write_states, run, labels, path))
                passes.append(cost)
                lessons = Lessons(states, labels, None, 3)
                course = Course.begin(layers, 3, base.config.hidden_size, config.learning_rate)
                trained.append(timed(partial(course.run, lessons, split, config, ignore))[1])
                course = Course.begin(layers, 3, base.config.hidden_size, config.learning_rate)
                lessons = Lessons(states, labels, None, 3)
                epochs.append(timed(partial(course.run, lessons, split, once, ignore))[1])
            costs = {"trained": trained, "passes": passes, "epochs": epochs}
            result[gate] = {
                kind: summary(
                    **{name: [getattr(c, kind) for c in own] for name, own in costs.items()},
                    count=options.epochs,
                )
                for kind in ("cpu", "wall")
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
