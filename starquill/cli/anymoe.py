"""`starquill anymoe`: one mixture out of fine-tunes that are there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from starquill.cli.options import expand_options
from starquill.errors import BadRequestError

if TYPE_CHECKING:
    from starquill.anymoe import TrainProgress

app = typer.Typer(help="Make a mixture of experts out of fine-tunes.", no_args_is_help=True)


@dataclass(frozen=True)
class Members:
    """What a mixture is made of."""

    base: Annotated[str | None, typer.Option(help="The model that all experts come from.")] = None
    expert: Annotated[
        list[str] | None,
        typer.Option(
            "--expert",
            help="A fine-tune or a LoRA's folder; repeat it for each.",
            metavar="NAME=PATH",
        ),
    ] = None
    layers: Annotated[
        str | None, typer.Option(help="Layers that become mixtures, as 0-15,20; all if not given.")
    ] = None
    top_k: Annotated[int, typer.Option(help="Experts for each token.")] = 1
    lora_experts: Annotated[
        str, typer.Option(help="LoRAs become whole MLPs (merge), or share the base's (delta).")
    ] = "merge"

    def experts(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for text in self.expert or ():
            name, separator, path = text.partition("=")
            if not separator or not name or not path:
                raise BadRequestError(f"--expert is {text!r} (expected NAME=PATH)")
            if name in found:
                raise BadRequestError(f"two experts are called {name}; give each its own name")
            found[name] = path
        return found


@dataclass(frozen=True)
class Settings:
    """How gates are trained."""

    epochs: Annotated[int, typer.Option(help="Most epochs; fewer if held-out rows say so.")] = 100
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3
    batch_size: Annotated[int, typer.Option(help="Rows of a step.")] = 4
    seed: Annotated[int, typer.Option(help="Seed, for the same gates every time.")] = 0
    gate: Annotated[
        str,
        typer.Option(help="Choose for every token (token), or by the mean over a prompt (mean)."),
    ] = "token"
    objective: Annotated[
        str, typer.Option(help="Learn from labels (label), or from what each predicts (lm).")
    ] = "label"
    held_out: Annotated[float, typer.Option(help="Share of rows kept from training.")] = 0.2
    tokens: Annotated[int, typer.Option(help="Tokens of a row that are read.")] = 512
    bundle: Annotated[
        bool, typer.Option("--bundle/--no-bundle", help="Write the experts, or where they are.")
    ] = True


@app.command()
@expand_options
def train(
    data: Annotated[Path, typer.Option(help="rows.json, rows.jsonl, or a folder per expert.")],
    out: Annotated[Path, typer.Option(help="The new folder; must not exist.")],
    members: Members = Members(),
    settings: Settings = Settings(),
) -> int:
    """Train gates that choose between a model and its fine-tunes, and write the mixture.

    `starquill generate --model OUT` and `serve` then run it. An interrupted run goes on where it
    was when the same command is given again.
    """
    experts = members.experts()
    if members.base is None or not experts:
        raise BadRequestError("--base and at least one --expert NAME=PATH are needed")
    from starquill.anymoe import AnyMoeConfig, read_layers
    from starquill.anymoe import train as train_gates
    from starquill.anymoe.reports import describe

    config = AnyMoeConfig(
        layers=None if members.layers is None else read_layers(members.layers),
        epochs=settings.epochs,
        learning_rate=settings.lr,
        batch_size=settings.batch_size,
        seed=settings.seed,
        gate=settings.gate,  # type: ignore[arg-type]  # train checks these
        top_k=members.top_k,
        objective=settings.objective,  # type: ignore[arg-type]
        lora_experts=members.lora_experts,  # type: ignore[arg-type]
        held_out=settings.held_out,
        tokens=settings.tokens,
        bundle=settings.bundle,
    )
    with _bars() as show:
        report = train_gates(members.base, experts, data, out, config, on_progress=show)
    print(describe(report))
    return 0


@app.command()
@expand_options
def join(
    gates: Annotated[Path, typer.Option(help="What --no-bundle wrote, or a gate.safetensors.")],
    out: Annotated[Path, typer.Option(help="The new folder; must not exist.")],
    members: Members = Members(),
    gate: Annotated[
        str, typer.Option(help="How a gate.safetensors chooses: for every token, or by the mean.")
    ] = "token",
) -> int:
    """Write the model that gates belong to, trained here or by mistral.rs."""
    experts = members.experts()
    from starquill.anymoe import AnyMoeConfig, read_layers
    from starquill.anymoe import join as join_gates

    config = AnyMoeConfig(
        layers=None if members.layers is None else read_layers(members.layers),
        top_k=members.top_k,
        lora_experts=members.lora_experts,  # type: ignore[arg-type]  # join checks these
        gate=gate,  # type: ignore[arg-type]
    )
    print(join_gates(gates, out, members.base, experts, config))
    return 0


@contextmanager
def _bars() -> Iterator[Callable[[TrainProgress], None]]:
    """A bar for each stage, on a terminal."""
    console = Console(stderr=True)
    columns: Sequence[object] = (*Progress.get_default_columns()[:3], TimeRemainingColumn())
    bars = Progress(
        *columns,  # type: ignore[arg-type]
        "{task.fields[note]}",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    tasks = {}

    def show(progress: TrainProgress) -> None:
        if progress.stage not in tasks:
            tasks[progress.stage] = bars.add_task(progress.stage, total=progress.total, note="")
        bars.update(
            tasks[progress.stage],
            completed=progress.done,
            total=progress.total,
            note=progress.note,
        )

    with bars:
        yield show
