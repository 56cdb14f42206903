"""`starquill bench`: how fast a model runs here."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starquill.cli.options import AdapterOptions, ModelOptions, QuantizeOptions, expand_options
from starquill.errors import BadRequestError, printable

if TYPE_CHECKING:
    from starquill.adapters.store import Lease
    from starquill.engine.bench import BenchPlan, Measurement, Subject
    from starquill.engine.loaded import LoadedModel

MOST_THREADS = 1024
_WIDTH_IN_A_PIPE = 200


@expand_options
def bench(
    name: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="The model, here or as --model.", show_default=False),
    ] = None,
    prompt: Annotated[
        str, typer.Option(help="Lengths of prompts to prefill; 0 for none.", metavar="N,N...")
    ] = "16,256,1024",
    depth: Annotated[
        str, typer.Option(help="Tokens in the cache before decoding.", metavar="N,N...")
    ] = "0,512",
    batch: Annotated[
        str, typer.Option(help="Sequences decoded together.", metavar="N,N...")
    ] = "1,4",
    tokens: Annotated[int, typer.Option(help="Tokens to decode; 0 for none.")] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds, of which the median counts.")] = 3,
    threads: Annotated[
        int | None, typer.Option(help="Threads; as many as PyTorch takes, if not given.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the rates too.", metavar="FILE.png")
    ] = None,
    model: ModelOptions = ModelOptions(),
    quantize: QuantizeOptions = QuantizeOptions(),
    adapters: AdapterOptions = AdapterOptions(),
) -> int:
    """Measure prefill and decode rates over prompt length, depth and batch."""
    lengths = {"prompt": prompt, "depth": depth, "batch": batch}
    prompts, depths, batches = (_numbers(option, text) for option, text in lengths.items())
    model = _which(name, model)
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise BadRequestError(f"--threads is {threads} (expected 1 to {MOST_THREADS})")
    if plot is not None:
        _check_plot(plot)
    acting = adapters.chosen()
    import torch

    from starquill.cli.run import load_adapters, load_model
    from starquill.engine.bench import BenchPlan, subject

    plan = BenchPlan(prompts, depths, batches, tokens, rounds)
    plan.check()
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(model, quantize)
    plan.check_context(loaded.config.context_length)
    with loaded.adapters.lease(load_adapters(loaded, acting)) as lease:
        found = _measure_all(loaded, plan, lease)
    about = replace(subject(loaded), adapters=acting)
    if plot is not None:
        _draw(about, found, plot)
    if json:
        print(jsonlib.dumps(_as_json(about, rounds, found), ensure_ascii=False))
    else:
        _print_table(about, found)
    return 0


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """`16,256` to numbers, each of them once."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise BadRequestError(
            f"--{option} is {text!r} (expected whole numbers with commas between, as in 16,256)"
        ) from None


def _which(name: str | None, model: ModelOptions) -> ModelOptions:
    if name is None:
        return model
    if model.model not in (ModelOptions().model, name):
        raise BadRequestError(f"two models are named, {name} and {model.model}; name one")
    return replace(model, model=name)


def _measure_all(loaded: LoadedModel, plan: BenchPlan, lease: Lease) -> list[Measurement]:
    from rich.console import Console

    from starquill.engine.bench import measure

    cases, found = plan.cases(), []
    with Console(stderr=True).status("") as status:  # shows itself on a terminal only
        for number, case in enumerate(cases, 1):
            status.update(f"measuring {case} ({number} of {len(cases)})")
            found.append(measure(loaded, case, plan.rounds, lease=lease))
    return found


def _as_json(about: Subject, rounds: int, found: Sequence[Measurement]) -> dict[str, Any]:
    """The object that `--json` prints."""
    measurements = [
        {
            **asdict(one.case),
            "tokens_per_second": round(one.rate, 3),
            "deviation": round(one.deviation, 3),
            "milliseconds_per_token": round(one.milliseconds, 4),
            "weight_bytes_per_second": None if one.bytes_rate is None else round(one.bytes_rate),
            "seconds": [round(seconds, 6) for seconds in one.seconds],
        }
        for one in found
    ]
    return {**asdict(about), "rounds": rounds, "measurements": measurements}


def _describe(about: Subject) -> str:
    kinds: dict[str, list[str]] = {}
    for kind, counts in about.schemes.items():
        kinds.setdefault(" and ".join(counts), []).append(kind)
    stored = "; ".join(f"{schemes}: {', '.join(names)}" for schemes, names in kinds.items())
    isa = about.instruction_set or "no native kernels"
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    acting = ", ".join(f"{path}={weight:g}" for path, weight in about.adapters.items())
    model = printable(f"{about.model} with {acting}" if acting else about.model)
    return (
        f"{model}: {about.weight_bytes / 1e6:.1f} MB of weights a step\n"
        f"{stored}\n"
        f"threads: {about.threads}; {isa}; computing in {about.dtype}\n"
        f"{versions}\n"
    )


def _print_table(about: Subject, found: Sequence[Measurement]) -> None:
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table

    terminal = sys.stdout.isatty()
    print(_describe(about))
    table = Table(box=ROUNDED if terminal else None, pad_edge=terminal)
    table.add_column("")
    for title in ("tokens", "depth", "batch", "tokens/s", "±", "ms/token", "weights GB/s"):
        table.add_column(title, justify="right")
    for one in found:
        read = "" if one.bytes_rate is None else f"{one.bytes_rate / 1e9:.2f}"
        case = one.case
        rates = (f"{one.rate:.2f}", f"{one.deviation:.2f}", f"{one.milliseconds:.3f}", read)
        table.add_row(case.kind, *map(str, (case.tokens, case.depth, case.batch)), *rates)
    Console(width=None if terminal else _WIDTH_IN_A_PIPE).print(table)


def _check_plot(path: Path) -> None:
    """Refuse what could not be drawn, before anything is measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadRequestError("--plot needs matplotlib; pip install 'starquill[bench]'") from None
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise BadRequestError(
            f"--plot is {str(path)!r} (expected a name that ends in one of {', '.join(kinds)})"
        )
    if path.is_dir() or not path.parent.is_dir():
        raise BadRequestError(f"--plot is {str(path)!r} (expected a file in a folder that exists)")


def _draw(about: Subject, found: Sequence[Measurement], path: Path) -> None:
    """Rates over prompt length, and over depth with a line for each batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{printable(about.model)}, threads: {about.threads}", parse_math=False)
    prefill, decode = figure.subplots(1, 2)
    lines: dict[tuple[Any, str], list[tuple[int, Measurement]]] = {}
    for one in found:
        case = one.case
        if case.kind == "prefill":
            lines.setdefault((prefill, "prefill"), []).append((case.tokens, one))
        else:
            lines.setdefault((decode, f"batch {case.batch}"), []).append((case.depth, one))
    for (axes, label), points in lines.items():
        points.sort(key=lambda point: point[0])
        rates = [one.rate for _, one in points]
        deviations = [one.deviation for _, one in points]
        axes.errorbar([at for at, _ in points], rates, deviations, marker="o", label=label)
    for axes, title, below in ((prefill, "prefill", "prompt"), (decode, "decode", "depth")):
        axes.set(title=title, xlabel=f"{below} (tokens)", ylabel="tokens/s")
        axes.set_ylim(bottom=0)
    if any(axes is decode for axes, _ in lines):
        decode.legend()
    figure.savefig(path, dpi=150)
