"""`starquill plan`: on which devices a model would be, without reading its weights."""

from __future__ import annotations

import json as jsonlib
import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from starquill.cli.options import QuantizeOptions, expand_options
from starquill.errors import BadRequestError, CapacityError, printable
from starquill.placement.devices import read_budgets, size_text
from starquill.placement.maps import AUTO, DeviceMap, read_device_map, resolve
from starquill.placement.offers import Offer, Variant, offers
from starquill.placement.plan import DoesNotFitError, Placement
from starquill.placement.plan import plan as place
from starquill.placement.sizes import ModelSizes, Names, Needs, TensorSize, sizes_of
from starquill.placement.topology import Topology, parse_topology

if TYPE_CHECKING:
    from starquill.checkpoint.opening import Checkpoint
    from starquill.quant.weight import Computing
    from starquill.quantizing import QuantOptions

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
    given = None if where.max_memory is None else read_budgets(where.max_memory)
    computing = _computing(where.dtype)
    checkpoint = _opened(model, where.revision)
    needs = _needs(where, checkpoint.config.context_length)
    topology = _topology(options, checkpoint.config.num_hidden_layers)
    command = _Command(model, where, options)
    if options.quant is None and topology is not None and not topology.quants:
        options = replace(options, topology=None)
    subject = _Subject(checkpoint, computing, options.chosen())
    sizes, summary = subject.sizes()
    devices = _device_map(where.device_map, topology, len(sizes.layers), sizes.tied)
    free = _free() if given is None or devices is not None else {}
    budgets = free if given is None else given if devices is None else {**free, **given}
    asked = {"model": model, "max_seq_len": needs.max_seq_len}
    asked |= {"max_batch_size": needs.max_batch_size, "quantization": summary}
    try:
        placement = place(sizes, budgets, needs, devices)
    except DoesNotFitError as error:
        command = replace(command, placed=devices is not None)
        found = offers(list(subject.variants(sizes)), given or free, needs)
        if json:
            print(jsonlib.dumps({**asked, **_refusal(error, found, command)}))
        raise CapacityError(f"{error}; {_offered(found, command)}") from None
    facts = {**asked, **_facts(placement, sizes, budgets)}
    if json:
        print(jsonlib.dumps(facts))
    else:
        _print_table(facts)
    return 0


def _needs(where: PlanOptions, context: int) -> Needs:
    length = context if where.max_seq_len is None else where.max_seq_len
    needs = Needs(length, where.max_batch_size)
    needs.check(context)
    return needs


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


def _topology(options: QuantizeOptions, layers: int) -> Topology | None:
    from starquill.checkpoint.files import read_text

    if options.topology is None:
        return None
    return parse_topology(read_text(options.topology), layers, str(options.topology))


def _device_map(
    text: str | None, topology: Topology | None, layers: int, tied: bool
) -> DeviceMap | None:
    if text is None and topology is not None and topology.devices:
        return resolve(topology.devices, layers, tied, "topology")
    return read_device_map(text or AUTO, layers, tied=tied)


def _free() -> dict[str, float]:
    """What the devices of this machine have free."""
    import torch

    from starquill.checkpoint.memory import available_memory

    memory = available_memory()
    found: dict[str, float] = {"cpu": math.inf if memory is None else memory}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found[f"cuda:{number}"] = torch.cuda.mem_get_info(number)[0]
    return found


@dataclass(frozen=True)
class _Subject:
    """A checkpoint, and how it is to be loaded."""

    checkpoint: Checkpoint
    computing: Computing
    quant: QuantOptions | None

    def sizes(self) -> tuple[ModelSizes, str | None]:
        """Bytes by part, and the quantization in one line."""
        from starquill.checkpoint.source import HeaderSource
        from starquill.engine.runner import PREFILL_CHUNK
        from starquill.isq import IsqPlan
        from starquill.kernels.attention import BLOCK
        from starquill.quantizing import plan_checkpoint, planned_bytes, stored_infos

        checkpoint, spec = self.checkpoint, self.checkpoint.spec
        infos = stored_infos(checkpoint)
        schemes = IsqPlan({})
        if self.quant is not None:
            schemes = plan_checkpoint(checkpoint, replace(self.quant, calibrate=None))

        def planned(name: str) -> TensorSize:
            alone = replace(checkpoint, source=HeaderSource({name: infos[name]}))
            stored = infos[name].dtype if infos[name].is_quantized else None
            scheme = str(schemes.schemes[name]) if name in schemes.schemes else stored
            size = planned_bytes(alone, schemes, self.computing)
            return TensorSize(infos[name].shape, size, scheme)

        shape = checkpoint.config.cache_shape()
        sizes = sizes_of(
            {name: planned(name) for name in infos},
            Names(spec.layer_prefix, spec.embedding, spec.head),
            shape.layers,
            shape.block_bytes(self.computing.dtype) // (shape.layers * BLOCK),
            window=shape.window,
        )
        sizes = replace(sizes, block=BLOCK, chunk=PREFILL_CHUNK)
        return sizes, schemes.summary(infos) if schemes.schemes else None

    def variants(self, sizes: ModelSizes) -> Iterator[Variant]:
        """As asked for, and with ever fewer bits where the checkpoint is not quantized yet."""
        from starquill.quantizing import QuantOptions

        yield Variant(None, sizes)
        if any(info.is_quantized for info in self.checkpoint.source.infos.values()):
            return
        for scheme in _FEWER_BITS:
            options = QuantOptions(scheme) if self.quant is None else self.quant
            quant = replace(options, scheme=scheme, strict=False)
            fewer, _ = replace(self, quant=quant).sizes()
            if fewer.weights < sizes.weights:
                yield Variant(scheme, fewer)


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
