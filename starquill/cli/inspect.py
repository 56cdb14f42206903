"""`starquill inspect`: what a model is, without reading its weights."""

from __future__ import annotations

import json as jsonlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from starquill.errors import printable

if TYPE_CHECKING:
    from starquill.checkpoint.describe import ModelFacts


def inspect(
    model: Annotated[str, typer.Argument(help="A folder, a .safetensors file or a hub id.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Tell a model's architecture, sizes, context and tokens; no weights are read."""
    from starquill.checkpoint.describe import describe

    facts = describe(model, revision)
    if json:
        print(jsonlib.dumps(asdict(facts), ensure_ascii=False))
    else:
        _print_table(facts)
    return 0


_FILLS = {True: "yes", False: "no", None: "not known (no tokenizer)"}
_WIDTH_IN_A_PIPE = 200


def _print_table(facts: ModelFacts) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(printable(facts.name)), show_header=False)
    total = sum(facts.bytes.values())
    window = facts.sliding_window
    rows = {
        "folder": facts.folder,
        "architecture": f"{facts.model_type}, {facts.layers} layers of width {facts.hidden_size}",
        "parameters": f"{facts.parameters:,}",
        "bytes": f"{total:,}",
        **{
            f"  {p}": f"{size:,} ({facts.bits[p]:.4g} bits each)" for p, size in facts.bytes.items()
        },
        **({} if "head" in facts.bytes else {"  head": "the embedding (tied)"}),
        "in memory": f"{sum(facts.resident.values()):,}",
        "dtypes": ", ".join(f"{name} ({count} tensors)" for name, count in facts.dtypes.items()),
        "quantization": facts.quantization or "none",
        "context": f"{facts.context_length} tokens"
        + (f", sliding window {window}" if window else ""),
        "chat template": "yes" if facts.chat_template else "no (a base model)",
        "fill in the middle": _FILLS[facts.fill_in_the_middle],
        "vocabulary": f"{facts.vocab_size} tokens",
        "end tokens": ", ".join(map(str, facts.end_tokens)) or "none",
        "special tokens": " ".join(f"{t}={i}" for t, i in facts.special_tokens.items()) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, escape(printable(value)))
    for warning in facts.warnings:
        table.add_row("warning", escape(printable(warning)))
    Console(width=None if sys.stdout.isatty() else _WIDTH_IN_A_PIPE).print(table)
