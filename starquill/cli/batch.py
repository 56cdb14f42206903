"""`starquill batch`: answer a file of prompts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from starquill.cli.options import ModelOptions, QuantizeOptions, XLoraOptions, expand_options
from starquill.cli.ray_options import RayOptions
from starquill.cli.serve import (
    ListenOptions,
    LoadingOptions,
    LoraOptions,
    WorkOptions,
    prepared,
    require_packages,
)
from starquill.errors import BadRequestError

if TYPE_CHECKING:
    from starquill.batch.answering import Make
    from starquill.batch.journal import Journal
    from starquill.batch.lines import Line
    from starquill.server.on_ray import ClusterOptions

SOME_FAILED, INTERRUPTED = 1, 130


def _option(help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, **settings)


@dataclass(frozen=True)
class BatchOptions:
    """What holds for every line, and how many of them run."""

    set: Annotated[
        list[str] | None,
        _option(
            "A field for lines that do not have it, as max_tokens=64; may be repeated.",
            "--set",
            metavar="FIELD=VALUE",
        ),
    ] = None
    ordered: Annotated[bool, _option("Write answers in the order of their lines.", "--ordered")] = (
        False
    )
    slots: Annotated[int, _option("Lines that run at once.")] = WorkOptions.slots
    context: Annotated[
        int | None, _option("Tokens that prompt and output may have; the model's, if not given.")
    ] = None
    cache_memory: Annotated[
        str | None, _option("Memory for keys and values, as 2GiB.", metavar="SIZE")
    ] = None

    def work(self) -> WorkOptions:
        return WorkOptions(
            slots=self.slots,
            queue=self.slots * 3,  # see batch.answering
            context=self.context,
            cache_memory=self.cache_memory,
            prefill_chunk=512,
        )

    def fields(self) -> dict[str, Any]:
        """Values are JSON, or else text."""
        found: dict[str, Any] = {}
        for said in self.set or ():
            name, equals, value = said.partition("=")
            if not name or not equals:
                raise BadRequestError(f"--set is {said!r} (expected FIELD=VALUE)")
            try:
                found[name] = json.loads(value)
            except ValueError:
                found[name] = value
        return found


@expand_options
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="A JSON object a line.", show_default=False)
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="Gets the answers.", show_default=False)
    ],
    batch: BatchOptions = BatchOptions(),
    model: ModelOptions = ModelOptions(),
    quantize: QuantizeOptions = QuantizeOptions(),
    xlora: XLoraOptions = XLoraOptions(),
    lora: LoraOptions = LoraOptions(),
    ray: RayOptions = RayOptions(),
) -> int:
    """Answer a file of prompts; run again after an interruption, it goes on.

    A line has prompt, prefix and suffix, or messages; id; and fields of /v1/completions. Ends
    with 0, or with 1 if lines were answered with an error.
    """
    fields, work, cluster = batch.fields(), batch.work(), ray.chosen()
    work.chosen(), lora.chosen()
    xlora.check()
    require_packages("batches need")
    if not source.is_file():
        raise BadRequestError(f"{source} is no file (expected one with a JSON object a line)")
    from starquill.batch.journal import open_journal
    from starquill.batch.lines import settings_hash

    loading = LoadingOptions(model, quantize, xlora, lora)
    depends = [dataclasses.asdict(loading), fields, batch.context]
    make = partial(prepared, ListenOptions(), work, loading)
    with open_journal(source, target, settings_hash(depends), ordered=batch.ordered) as journal:
        work_left = Work(make, fields, source, journal, batch.ordered)
        try:
            if cluster is None:
                asyncio.run(work_left.here())
            else:
                work_left.on_ray(cluster)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on", file=sys.stderr)
            return INTERRUPTED
        print(_summary(journal), file=sys.stderr)
        return SOME_FAILED if journal.failed else 0


@dataclass(frozen=True)
class Work:
    """The lines of `source` that the journal does not have, and how to answer them."""

    make: Make
    fields: Mapping[str, Any]
    source: Path
    journal: Journal
    ordered: bool

    def left(self) -> Iterator[Line]:
        from starquill.batch.lines import read_lines

        # Decided now: lines that get their answer while this is read are behind it.
        done = frozenset(self.journal.done)
        return (line for line in read_lines(self.source) if line.index not in done)

    async def here(self) -> None:
        if next(self.left(), None) is None:
            return
        from starquill.batch.answering import Answering

        with Answering(self.make, self.fields) as answering, self._bar() as advance:
            async for line, answer in answering.answers(self.left(), ordered=self.ordered):
                self.journal.write(line, answer)
                advance()

    def on_ray(self, cluster: ClusterOptions) -> None:
        from starquill.batch.on_ray import answers_on_ray

        answers = answers_on_ray(
            self.make, self.fields, list(self.left()), cluster, ordered=self.ordered
        )
        with self._bar() as advance:
            for line, answer in answers:
                self.journal.write(line, answer)
                advance()

    @contextmanager
    def _bar(self) -> Iterator[Callable[[], None]]:
        console = Console(stderr=True)
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        done = len(self.journal.done)
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            total = done + sum(1 for _ in self.left())
            task = bar.add_task("lines", total=total, completed=done)
            yield lambda: bar.advance(task)


def _summary(journal: Journal) -> str:
    failed = f", {journal.failed} of them with an error" if journal.failed else ""
    return f"{len(journal.done)} lines are answered{failed}"
