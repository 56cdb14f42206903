"""`starquill plan`: on which devices a model would be, without reading its weights."""

from __future__ import annotations

import json as jsonlib
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starquill.cli.options import QuantizeOptions, expand_options
from starquill.errors import BadRequestError, CapacityError, printable
from starquill.placement.devices import size_text
from starquill.placement.maps import AUTO
from starquill.placement.offers import Offer
from starquill.placement.plan import DoesNotFitError, Placement
from starquill.placement.sizes import ModelSizes

if TYPE_CHECKING:
    from starquill.checkpoint.opening import Checkpoint
    from starquill.quant.weight import Computing

_FEWER_BITS = ("8", "6", "5", "4", "3", "2")
_WIDTH_IN_A_PIPE = 200


def _option(help: str, **settings: Any) -> Any:
    return typer.Option(help=help, **settings)


@dataclass(frozen=True)
class PlanOptions:
    """Which devices there are to be, and what they must have room for."""

    device_map: Annotated[
        str | None,
        _option(
            "auto, one device, or cuda:0=0-15,cpu=16-29,embed=cpu,head=cuda:0. Wins over devices "
            "in the topology.",
            metavar="MAP",
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        _option(
            "What devices may give: cuda:0=10GiB,cpu=16GiB,disk=inf; else what is free.",
            metavar="SIZES",
        ),
    ] = None
    max_seq_len: Annotated[
        int | None, _option("Tokens in a sequence; else the model's context.")
    ] = None
    max_batch_size: Annotated[int, _option("Sequences at once.")] = 1
    dtype: Annotated[str, _option("auto, float32, bfloat16 or float16.")] = "auto"
    revision: Annotated[str | None, _option("Branch, tag or commit of a hub model.")] = None


@expand_options
def plan(
    model: Annotated[str, typer.Argument(help="A folder, a file or a hub id.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    where: PlanOptions = PlanOptions(),
    options: QuantizeOptions = QuantizeOptions(),
) -> int:
    """Tell which layers go to which device, or what would fit; no weights are read.

    Calibration changes no size and is not run.
    """
    from starquill.placing import DeviceOptions, Request, Subject

    devices = DeviceOptions(
        where.device_map,
        where.max_memory,
        where.max_seq_len,
        where.max_batch_size,
        options.topology,
    )
    devices.budgets()
    computing = _computing(where.dtype)
    checkpoint = _opened(model, where.revision)
    command = _Command(model, where, options)
    request = Request(Subject(checkpoint, computing, options.chosen()), devices)
    needs = request.needs
    asked = {"model": model, "max_seq_len": needs.max_seq_len}
    asked |= {"max_batch_size": needs.max_batch_size, "quantization": request.sized[1]}
    try:
        placement = request.place()
    except DoesNotFitError as error:
        command = replace(command, placed=request.devices is not None)
        found = request.offers()
        if json:
            print(jsonlib.dumps({**asked, **_refusal(error, found, command)}))
        raise CapacityError(f"{error}; {_offered(found, command)}") from None
    facts = {**asked, **_facts(placement, request.sizes, request.budgets)}
    if json:
        print(jsonlib.dumps(facts))
    else:
        _print_table(facts)
    return 0


def _computing(name: str) -> Computing:
    import torch

    from starquill.quant.weight import Computing

    dtypes = {"auto": torch.float32, "float32": torch.float32}
    dtypes |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise BadRequestError(f"dtype is {name!r} (expected {', '.join(dtypes)})")
    return Computing(dtypes[name], as_stored=name == "auto")


def _opened(model: str, revision: str | None) -> Checkpoint:
    from starquill.checkpoint.build import compare
    from starquill.checkpoint.hub import locate
    from starquill.checkpoint.opening import open_checkpoint

    checkpoint = open_checkpoint(locate(model, revision), headers_only=True)
    spec = checkpoint.spec
    compare(spec, spec.Model(checkpoint.config), checkpoint.source.infos).check()
    return checkpoint


@dataclass(frozen=True)
class _Command:
    """The command line that was given, to be given again with changes."""

    model: str
    where: PlanOptions
    options: QuantizeOptions
    placed: bool = False

    def changed(self, offer: Offer) -> str:
        """With what `offer` changes; its plan is an automatic one."""
        where, options = self.where, self.options
        words = ["starquill", "plan", self.model]
        settings = {
            "--revision": where.revision,
            "--dtype": None if where.dtype == "auto" else where.dtype,
            "--quant": offer.quant or options.quant,
            "--topology": options.topology,
            "--device-map": AUTO if self.placed else None,
            "--max-memory": where.max_memory,
            "--max-seq-len": offer.needs.max_seq_len,
            "--max-batch-size": offer.needs.max_batch_size,
        }
        for name, value in settings.items():
            words += [] if value is None else [name, str(value)]
        for override in options.quant_override or ():
            words += ["--quant-override", override]
        return shlex.join(words)


def _offered(found: list[Offer], command: _Command) -> str:
    if not found:
        disk = "" if "disk" in (command.where.max_memory or "") else ", or disk=inf in --max-memory"
        return f"nothing smaller fits either: give more memory{disk}"
    return f"what fits: {' or '.join(command.changed(offer) for offer in found)}"


def _refusal(error: DoesNotFitError, found: list[Offer], command: _Command) -> dict[str, Any]:
    return {
        "fits": False,
        "part": error.part,
        "device": error.device,
        "asked": error.asked,
        "free": error.free,
        "problem": str(error),
        "offers": [
            {
                "quant": offer.quant or command.options.quant,
                "max_seq_len": offer.needs.max_seq_len,
                "max_batch_size": offer.needs.max_batch_size,
                "device_map": str(offer.placement.devices),
                "command": command.changed(offer),
            }
            for offer in found
        ],
    }


def _facts(placement: Placement, sizes: ModelSizes, budgets: Mapping[str, float]) -> dict[str, Any]:
    spans: dict[str, list[str]] = {}
    for device, first, last in placement.devices.ranges():
        spans.setdefault(device, []).append(f"{first}-{last}" if last > first else f"{first}")
    return {
        "fits": True,
        "weights": sizes.weights,
        "device_map": str(placement.devices),
        "embed": placement.embed,
        "head": placement.head,
        "devices": [
            {
                "device": device,
                "layers": ",".join(spans.get(device, ())),
                **asdict(use),
                "total": use.total,
                "free": _finite(budgets.get(device, math.inf)),
            }
            for device, use in placement.uses.items()
        ],
        "layers": [
            {**asdict(layer), "weights": weights}
            for layer, weights in zip(placement.layers, sizes.layers, strict=True)
        ],
    }


def _finite(budget: float) -> int | None:
    """As JSON can have it: None for no limit."""
    return None if budget == math.inf else int(budget)


def _print_table(facts: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    columns = ("weights", "cache", "activations", "buffers", "reserve", "total", "free")
    table = Table(title=escape(printable(facts["model"])))
    table.add_column("device")
    table.add_column("layers")
    for name in columns:
        table.add_column(name, justify="right")
    for use in facts["devices"]:
        amounts = [size_text(math.inf if use[n] is None else use[n]) for n in columns]
        table.add_row(use["device"], use["layers"] or "none", *amounts)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_IN_A_PIPE)
    console.print(table)
    rows = {
        "room for": f"{facts['max_batch_size']} x {facts['max_seq_len']} tokens",
        "quantization": facts["quantization"] or "as stored",
        "embedding": facts["embed"],
        "head": facts["head"],
        "device map": facts["device_map"],
    }
    for name, value in rows.items():
        console.print(f"{name}: {escape(printable(value))}", soft_wrap=True, highlight=False)
