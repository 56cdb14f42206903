"""Training gates on hidden states that are kept, beside a full forward pass in every epoch.

    python benchmarks/anymoe.py --prompts 64 --epochs 100

The second way is what mistral.rs does: each epoch runs the model on all prompts. It is measured
over a few epochs (--full-epochs), each of which takes the same. Both ways share their code: what
differs is whether the pass is done again. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from starquill.anymoe.config import AnyMoeConfig
from starquill.anymoe.course import Course, Lessons
from starquill.anymoe.experts import open_base, open_experts
from starquill.anymoe.rows import Split
from starquill.anymoe.states import Pass, write_states

# Functions of the standard library, so that prompts are code.
SOURCE = Path(json.__file__).parent.glob("*.py")


def prompts(base: object, count: int, length: int) -> list[list[int]]:
    tokenizer = base.checkpoint.tokenizer  # type: ignore[attr-defined]
    ids = [i for path in sorted(SOURCE) for i in tokenizer.encode(path.read_text("utf-8"))]
    step = max(1, (len(ids) - length) // count)
    return [ids[n * step : n * step + length] for n in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--full-epochs", type=int, default=3)
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
            config = AnyMoeConfig(gate=gate, epochs=options.epochs)  # type: ignore[arg-type]
            width = base.config.hidden_size
            begun = time.perf_counter()
            states = write_states(run, labels, Path(folder) / f"{gate}.bin")
            pass_seconds = time.perf_counter() - begun
            course = Course.begin(layers, 3, width, config.learning_rate)
            course.run(Lessons(states, labels, None, 3), split, config, lambda _: None)
            kept = time.perf_counter() - begun
            once = AnyMoeConfig(gate=gate, epochs=1)  # type: ignore[arg-type]
            begun = time.perf_counter()
            for epoch in range(options.full_epochs):
                states = write_states(run, labels, Path(folder) / f"{gate}-{epoch}.bin")
                course = Course.begin(layers, 3, width, config.learning_rate)
                course.run(Lessons(states, labels, None, 3), split, once, lambda _: None)
            full = (time.perf_counter() - begun) / options.full_epochs * options.epochs
            result[gate] = {
                "kept_s": round(kept, 2),
                "of_it_the_pass_s": round(pass_seconds, 2),
                "full_s": round(full, 2),
                "times": round(full / kept, 1),
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
