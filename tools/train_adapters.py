"""Train the two example adapters of the embedded model, below `examples/adapters/`.

    python tools/train_adapters.py tests --out examples/adapters/tests
    python tools/train_adapters.py docstrings --out examples/adapters/docstrings

The data are taken from the running Python's standard library with `ast`: for `tests` the methods
of its own test suite, for `docstrings` functions that have one, with their bodies behind the hole
or without. Every eighth file is held out. Needs peft and transformers; one thread, a few minutes.
The last line is one of JSON: bits a token of what is to be written, before and after.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import starquill
from starquill.checkpoint.hub import embedded_model
from starquill.engine.fim import fill_request
from starquill.engine.prompts import plain_request

MOST_TOKENS, LEAST_ANSWER = 320, 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"]
IGNORED = -100
NO_LIMIT = starquill.SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class Example:
    """What is shown, and what is to be written behind it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


Sample = tuple[str | starquill.Hole, str]


def functions(source: str) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    """Functions and methods, each with its class."""
    tree = ast.parse(source)
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, None
        elif isinstance(node, ast.ClassDef):
            yield from ((n, node) for n in node.body if isinstance(n, ast.FunctionDef))


def lines_of(source: str, first: int, last: int) -> str:
    return "".join(source.splitlines(keepends=True)[first - 1 : last])


def tests(source: str) -> Iterator[Sample]:
    """The head of a test's class and of the test, then its body."""
    for function, inside in functions(source):
        if inside is None or not function.name.startswith("test"):
            continue
        first = function.body[0].lineno
        head = f"class {inside.name}(unittest.TestCase):\n"
        head += lines_of(source, function.lineno, first - 1)
        body = lines_of(source, first, function.end_lineno or first)
        if body.strip().startswith(('"', "'", "#")) or first == function.lineno:
            continue
        yield head, body


def docstrings(source: str) -> Iterator[Sample]:
    """The head of a function, then its docstring: as a hole before its body, and at the end."""
    for function, _ in functions(source):
        first, rest = function.body[0], function.body[1:]
        if ast.get_docstring(function) is None or not rest or first.lineno == function.lineno:
            continue
        head = lines_of(source, function.lineno, first.lineno - 1)
        doc = lines_of(source, first.lineno, first.end_lineno or first.lineno)
        if '"""' not in doc:
            continue
        body = lines_of(source, rest[0].lineno, function.end_lineno or rest[0].lineno)
        yield head, doc
        yield starquill.Hole(head, body), doc


KINDS: dict[str, tuple[str, Callable[[str], Iterator[Sample]]]] = {
    "tests": ("test/test_*.py", tests),
    "docstrings": ("**/*.py", docstrings),
}


def examples(loaded: starquill.LoadedModel, kind: str) -> tuple[list[Example], list[Example]]:
    """For training, and held out."""
    pattern, extract = KINDS[kind]
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer, end = loaded.require_tokenizer(), min(loaded.end_ids)
    known: list[Example] = []
    held: list[Example] = []
    for path in sorted(library.glob(pattern)):
        name = path.relative_to(library)
        if "site-packages" in name.parts or (kind != "tests" and "test" in name.parts):
            continue
        try:
            samples = list(extract(path.read_text(encoding="utf-8")))
        except (UnicodeDecodeError, SyntaxError):
            continue
        part = held if zlib.crc32(str(name).encode()) % 8 == 0 else known
        for shown, written in samples:
            if isinstance(shown, str):
                request = plain_request(loaded, shown, NO_LIMIT, heal=False)
            else:
                request, _ = fill_request(loaded, shown, NO_LIMIT)
            answer = (*tokenizer.encode(written), end)
            fits = len(request.prompt_ids) + len(answer) <= MOST_TOKENS
            if fits and len(answer) >= LEAST_ANSWER:
                part.append(Example(request.prompt_ids, answer))
    return known, held


def batch_of(chosen: list[Example]) -> tuple[Tensor, Tensor]:
    """Ids `[B, T]`, and the same with all that is not to be learned left out."""
    length = max(len(one.prompt) + len(one.answer) for one in chosen)
    ids = torch.zeros(len(chosen), length, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for row, one in enumerate(chosen):
        start, end = len(one.prompt), len(one.prompt) + len(one.answer)
        ids[row, :end] = torch.tensor(one.prompt + one.answer)
        labels[row, start:end] = ids[row, start:end]
    return ids, labels


@torch.inference_mode()
def bits(model: Any, held: list[Example]) -> float:
    """Bits a token of the answers."""
    total, count = 0.0, 0
    for start in range(0, len(held), 8):
        ids, labels = batch_of(held[start : start + 8])
        tokens = int((labels[:, 1:] != IGNORED).sum())
        total += float(model(ids, labels=labels).loss) * tokens
        count += tokens
    return total / count / math.log(2)


def train(model: Any, known: list[Example], seconds: float, rate: float) -> int:
    """Steps of eight examples of similar lengths, until the time is over; how many there were."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.01)
    draw = random.Random(7)
    ordered = sorted(known, key=lambda one: len(one.prompt) + len(one.answer))
    began, steps = time.monotonic(), 0
    while (share := (time.monotonic() - began) / seconds) < 1:
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (steps + 1) / 20) * (1 - share)
        start = draw.randrange(max(len(ordered) - 8, 1))
        ids, labels = batch_of(ordered[start : start + 8])
        model(ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def save(model: Any, out: Path) -> None:
    """PEFT's folder, in half the bytes, and without the path of this machine's model."""
    model.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    weights, config = out / "adapter_model.safetensors", out / "adapter_config.json"
    save_file({n: t.to(torch.float16) for n, t in load_file(weights).items()}, weights)
    weights.chmod(0o644)
    said = json.loads(config.read_text())
    said |= {"base_model_name_or_path": "default", "target_modules": sorted(TARGETS)}
    config.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    known, held = examples(starquill.load("default"), options.kind)
    held = random.Random(7).sample(held, min(len(held), 120))
    base = transformers.Starcoder2ForCausalLM.from_pretrained(embedded_model(), dtype=torch.float32)
    before = bits(base.eval(), held)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules=TARGETS,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config).train()
    steps = train(model, known, options.seconds, options.rate)
    after = bits(model.eval(), held)
    save(model, options.out)
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(
        json.dumps(
            {
                "kind": options.kind,
                "examples": len(known),
                "steps": steps,
                "bits_before": round(before, 3),
                "bits_after": round(after, 3),
                "bytes": size,
            }
        )
    )


if __name__ == "__main__":
    main()
