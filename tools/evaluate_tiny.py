"""Measure the embedded model on held-out files that it never saw, and print one JSON object.

- bits per byte, beside `xz -9e` on the same files, each file alone and all in one stream;
- the share of greedy function bodies that parse with `ast`;
- exact match of filled single lines.

    python tools/evaluate_tiny.py --work build/tiny --model default
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiny_corpus import Document, read_documents

from starquill.engine.engine import Engine
from starquill.engine.scoring import score_texts
from starquill.loading import load
from starquill.types import Hole, SamplingParams


def xz_bits_per_byte(documents: list[Document]) -> dict[str, float]:
    texts = [document.text.encode() for document in documents]
    size = sum(map(len, texts))

    def compressed(data: bytes) -> int:
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    return {
        "each file alone": 8 * sum(map(compressed, texts)) / size,
        "one stream": 8 * compressed(b"".join(texts)) / size,
    }


@dataclass(frozen=True)
class FunctionHead:
    """A file up to and including a function's `def ...:` line, and the head alone."""

    prompt: str
    head: str


def function_heads(documents: list[Document]) -> Iterator[FunctionHead]:
    for document in documents:
        lines = document.text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(document.text)):
            if not isinstance(node, ast.FunctionDef) or node.body[0].lineno == node.lineno:
                continue
            head_end = node.body[0].lineno - 1
            head = "".join(lines[node.lineno - 1 : head_end])
            if head.rstrip().endswith(":"):
                yield FunctionHead("".join(lines[:head_end]).rstrip("\n"), head.rstrip("\n"))


def body_of(head: str, completion: str, finished: bool) -> str:
    """The completion up to the first line that leaves the function, whole lines only."""
    indent = len(head) - len(head.lstrip())
    lines = completion.split("\n")
    if not finished:
        lines = lines[:-1]
    body = lines[:1]
    for line in lines[1:]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        body.append(line)
    return "\n".join(body)


def parses(head: str, body: str) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(f"{head}{body}"))
    except (SyntaxError, ValueError):
        return False
    return isinstance(tree.body[0], ast.FunctionDef)


def parse_rate(engine: Engine, heads: list[FunctionHead]) -> float:
    """A body that is cut off by the token limit counts by its whole lines."""
    good = 0
    tokenizer = engine.model.require_tokenizer()
    for item in heads:
        prompt = tokenizer.decode(tokenizer.encode(item.prompt)[-1024:])
        deltas = list(engine.generate(prompt, SamplingParams(max_tokens=128)))
        text = "".join(delta.text for delta in deltas)
        body = body_of(item.head, text, deltas[-1].finish_reason == "stop")
        good += bool(body.strip()) and parses(item.head, body)
    return good / len(heads)


def line_holes(
    documents: list[Document], rng: random.Random, count: int
) -> Iterator[tuple[Hole, str]]:
    """Random lines of 8 to 80 characters; the hole is the line without its indentation.

    The lines around it are as many as the model was trained with: 40 before and 15 after.
    """
    for _ in range(count):
        while True:
            text = rng.choice(documents).text
            lines = text.split("\n")
            number = rng.randrange(len(lines))
            wanted = lines[number].strip()
            if 8 <= len(wanted) <= 80:
                break
        indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
        before = "\n".join([*lines[max(0, number - 40) : number], indent])
        yield Hole(before, "\n" + "\n".join(lines[number + 1 : number + 16])), wanted


def exact_match(engine: Engine, holes: list[tuple[Hole, str]]) -> float:
    params = SamplingParams(max_tokens=64, stop=("\n",))
    return sum(engine.fill(hole, params).strip() == wanted for hole, wanted in holes) / len(holes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="the corpus")
    parser.add_argument("--model", default="default")
    parser.add_argument("--heads", type=int, default=300)
    parser.add_argument("--holes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    documents = read_documents(options.work / "heldout.jsonl")
    engine = Engine(load(options.model))
    rng = random.Random(options.seed)
    heads = rng.sample(list(function_heads(documents)), options.heads)
    holes = list(line_holes(documents, rng, options.holes))
    result = {
        "files": len(documents),
        "bytes": sum(len(document.text.encode()) for document in documents),
        "bits_per_byte": score_texts(engine.model, [d.text for d in documents]).bits_per_byte,
        "xz_bits_per_byte": xz_bits_per_byte(documents),
        "function_heads": options.heads,
        "parse_rate": parse_rate(engine, heads),
        "line_holes": options.holes,
        "exact_match": exact_match(engine, holes),
    }
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}))


if __name__ == "__main__":
    main()
