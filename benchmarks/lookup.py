"""Decoding with prompt lookup and without it, in one process, in turn.

    python benchmarks/lookup.py --model DIR [--rounds 3]

The model's weights are random, so what it would write tells nothing. It is made to write a
given text: behind the head, the wanted token of each position gets a large bias, so that guesses
are right or wrong as they would be for a model that writes this text, and cost what they cost.

The texts: `edit` is a file of 300 lines again, one identifier renamed, after a prompt with the
file. `prose` is this repository's documentation after some of its code. `no_repeats` is a run of
tokens of which no two are alike. `misleading` repeats pairs of the prompt's tokens, each followed
by another token than there: every guess is wrong. Both sides must write the text, token for
token. Rates are of decoding alone, medians of rounds. Ends in one line of JSON; a ratio above 1
means that lookup pays. `--model` is quantized to 4 bits while loading unless it is already.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.loading import load
from starquill.models.spec import StepBatch
from starquill.types import EngineOptions, GenerateRequest, GenerationStats, SamplingParams

ROOT = Path(__file__).parents[1]
BIAS = 1e4
RENAMED = ("loaded", "checkpoint_in_use")


@dataclass(frozen=True)
class Task:
    """A prompt, and what is to be written after it."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]


class ForcedModel:
    """A model that writes `task`'s target.

    A row of hidden states carries its position in one more column to the head, whichever rows
    the engine takes there.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.task = Task((), ())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def hidden(self, batch: StepBatch) -> Tensor:
        hidden = self._model.hidden(batch)
        return torch.cat((hidden, batch.positions[..., None].to(hidden.dtype)), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.logits(hidden[..., :-1].contiguous())
        rows = logits.view(-1, logits.shape[-1])
        first = len(self.task.prompt) - 1
        for row, position in enumerate(hidden[..., -1].flatten().tolist()):
            number = round(position) - first
            if 0 <= number < len(self.task.target):
                rows[row, self.task.target[number]] += BIAS
        return logits


def code_lines(count: int) -> list[str]:
    """Lines of this package that name what is renamed often enough."""
    files = sorted((ROOT / "starquill").glob("engine/*.py"))
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) >= count, f"{len(lines)} lines of code (expected {count})"
    return lines[:count]


def edit_task(tokenizer: Tokenizer, lines: int) -> Task:
    before = "\n".join(code_lines(lines)) + "\n"
    after = re.sub(rf"\b{RENAMED[0]}\b", RENAMED[1], before)
    assert after != before, f"{RENAMED[0]} is not in the code"
    return Task(tuple(tokenizer.encode(before)), tuple(tokenizer.encode(after)))


def prose_task(tokenizer: Tokenizer, prompt: int, tokens: int) -> Task:
    code = tokenizer.encode("\n".join(code_lines(200)))
    prose = tokenizer.encode((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
    return Task(tuple(code[:prompt]), tuple(prose[:tokens]))


def no_repeats_task(prompt: int, tokens: int) -> Task:
    ids = random.Random(0).sample(range(100, 5000), k=prompt + tokens)
    return Task(tuple(ids[:prompt]), tuple(ids[prompt:]))


def misleading_task(tokens: int) -> Task:
    """The target's triples begin as the prompt's do and end otherwise."""
    ids = random.Random(1).sample(range(100, 5000), k=4 * (-(-tokens // 3)))
    quads = [ids[i : i + 4] for i in range(0, len(ids), 4)]
    prompt = [token for quad in quads for token in quad[:3]]
    target = [token for quad in reversed(quads) for token in (quad[0], quad[1], quad[3])]
    return Task(tuple(prompt), tuple(target[:tokens]))


def tasks(tokenizer: Tokenizer, options: argparse.Namespace) -> dict[str, Task]:
    return {
        "edit": edit_task(tokenizer, options.lines),
        "prose": prose_task(tokenizer, options.prompt, options.tokens),
        "no_repeats": no_repeats_task(options.prompt, options.tokens),
        "misleading": misleading_task(options.tokens),
    }


def write(engine: Engine, task: Task, tokens: int) -> GenerationStats:
    params = SamplingParams(max_tokens=min(tokens, len(task.target)))
    generation = engine.generate(GenerateRequest("measured", task.prompt, params))
    written = [d.token_id for d in generation if d.token_id is not None]
    assert written == list(task.target[: params.max_tokens]), "another text was written"
    return generation.stats


def measure(
    engines: dict[str, Engine], model: ForcedModel, task: Task, rounds: int
) -> dict[str, Any]:
    model.task = task
    for engine in engines.values():
        write(engine, task, 8)  # warms up
    found: dict[str, list[GenerationStats]] = {side: [] for side in engines}
    for number in range(rounds):
        for side in list(engines)[:: 1 if number % 2 == 0 else -1]:
            found[side].append(write(engines[side], task, len(task.target)))
    rates = {
        side: round(statistics.median(stats.generation_rate for stats in several), 2)
        for side, several in found.items()
    }
    last = found["lookup"][-1]
    return {
        "prompt": len(task.prompt),
        "written": len(task.target),
        "tokens_per_second": rates,
        "ratio": round(rates["lookup"] / rates["plain"], 3),
        "proposed": last.proposed_tokens,
        "accepted": last.accepted_tokens,
    }


def forced(folder: Path) -> tuple[LoadedModel, ForcedModel]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    loaded = load(folder, quant=None if "quantization" in config else "4")
    model = ForcedModel(loaded.model)
    # No token ends the text: what is written is as long as the target.
    return replace(loaded, model=model, end_ids=frozenset()), model


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", help="some of edit, prose, no_repeats, misleading")
    parser.add_argument("--lines", type=int, default=300, help="of the edited file")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before free text")
    parser.add_argument("--tokens", type=int, default=256, help="of free text")
    parser.add_argument("--lookup", type=int, default=16, help="tokens guessed at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def results(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    loaded, model = forced(options.model)
    plain = EngineOptions(slots=1, prefix_cache=False, lookup=0)
    engines = {
        "plain": Engine(loaded, plain),
        "lookup": Engine(loaded, replace(plain, lookup=options.lookup)),
    }
    made = tasks(loaded.require_tokenizer(), options)
    chosen: Sequence[str] = options.tasks or list(made)
    for name in chosen:
        yield name, measure(engines, model, made[name], options.rounds)


def main() -> None:
    options = parse()
    busy = round(os.getloadavg()[0], 2)
    torch.set_num_threads(options.threads)
    found = {}
    for name, result in results(options):
        found[name] = result
        print(name, json.dumps(result), flush=True)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    settings["load_average"] = busy
    print(json.dumps({"benchmark": "lookup", **settings, "texts": found}))


if __name__ == "__main__":
    main()
