"""Which device each part of a checkpoint goes to: its sizes and what the user asked, planned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from starquill.checkpoint.files import read_text
from starquill.checkpoint.memory import available_memory
from starquill.checkpoint.opening import Checkpoint
from starquill.checkpoint.source import HeaderSource
from starquill.engine.runner import PREFILL_CHUNK
from starquill.errors import BadRequestError, CapacityError
from starquill.isq import IsqPlan
from starquill.kernels.attention import BLOCK
from starquill.placement.devices import read_budgets
from starquill.placement.maps import AUTO, DeviceMap, read_device_map, resolve
from starquill.placement.offers import Offer, Variant, offers
from starquill.placement.plan import DoesNotFitError, Placement
from starquill.placement.plan import plan as place
from starquill.placement.sizes import ModelSizes, Names, Needs, TensorSize, sizes_of
from starquill.placement.topology import Topology, parse_topology
from starquill.quant.weight import Computing
from starquill.quantizing import QuantOptions, plan_checkpoint, planned_bytes, stored_infos

_FEWER_BITS = ("8", "6", "5", "4", "3", "2")


@dataclass(frozen=True)
class DeviceOptions:
    """Which devices a model may be on, and what they must have room for.

    `device_map` is `auto`, a device or a map of layers (see docs/placement.md); None leaves it to
    the topology file, or else is `auto`. `max_memory` is what devices may give, in bytes or as in
    `cuda:0=10GiB,cpu=16GiB`; None for what is free.
    """

    device_map: str | None = None
    max_memory: str | Mapping[str, float] | None = None
    max_seq_len: int | None = None
    max_batch_size: int | None = None
    topology: Path | None = None

    def needs(self, context: int) -> Needs:
        """What must have room for a model of `context` tokens; BadRequestError if it cannot."""
        length = context if self.max_seq_len is None else self.max_seq_len
        needs = Needs(length, 1 if self.max_batch_size is None else self.max_batch_size)
        needs.check(context)
        return needs

    def budgets(self) -> dict[str, float] | None:
        if self.max_memory is None or isinstance(self.max_memory, str):
            return None if self.max_memory is None else read_budgets(self.max_memory)
        return read_budgets(",".join(f"{d}={_size(n)}" for d, n in self.max_memory.items()))


def _size(amount: float) -> str:
    return "inf" if amount == math.inf else f"{amount:.0f}" if amount >= 0 else str(amount)


def free_memory() -> dict[str, float]:
    """What the devices of this machine have free."""
    memory = available_memory()
    found: dict[str, float] = {"cpu": math.inf if memory is None else memory}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found[f"cuda:{number}"] = torch.cuda.mem_get_info(number)[0]
    return found


def read_topology_file(path: Path, layers: int) -> Topology:
    return parse_topology(read_text(path), layers, str(path))


@dataclass(frozen=True)
class Subject:
    """A checkpoint, and how it is to be loaded."""

    checkpoint: Checkpoint
    computing: Computing
    quant: QuantOptions | None

    def sizes(self) -> tuple[ModelSizes, str | None]:
        """Bytes by part, and the quantization in one line. Calibration is not run."""
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
class Request:
    """A checkpoint and what the user asked of devices, resolved against each other."""

    subject: Subject
    options: DeviceOptions

    @cached_property
    def sized(self) -> tuple[ModelSizes, str | None]:
        return self.subject.sizes()

    @property
    def sizes(self) -> ModelSizes:
        return self.sized[0]

    @cached_property
    def needs(self) -> Needs:
        return self.options.needs(self.subject.checkpoint.config.context_length)

    @cached_property
    def given(self) -> dict[str, float] | None:
        return self.options.budgets()

    @cached_property
    def free(self) -> dict[str, float]:
        return free_memory()

    @cached_property
    def devices(self) -> DeviceMap | None:
        """The map that was asked for; None for an automatic one."""
        checkpoint, options = self.subject.checkpoint, self.options
        layers = checkpoint.config.num_hidden_layers
        tied = f"{checkpoint.spec.head}.weight" not in stored_infos(checkpoint)
        if options.topology is not None:
            topology = read_topology_file(options.topology, layers)
            if (topology.quants or topology.organization) and self.subject.quant is None:
                raise BadRequestError(
                    f"{options.topology} has schemes, which need --quant for all other layers"
                )
            if topology.devices and options.device_map is None:
                return resolve(topology.devices, layers, tied, "topology")
        return read_device_map(options.device_map or AUTO, layers, tied=tied)

    @cached_property
    def budgets(self) -> dict[str, float]:
        if self.given is None or self.devices is None:
            return self.free if self.given is None else self.given
        return {**self.free, **self.given}

    def room(self, planned: bool) -> tuple[int | None, int | None]:
        """How long a sequence may get and how many there may be; None for as the engine likes."""
        if planned:
            return self.needs.max_seq_len, self.needs.max_batch_size
        return self.options.max_seq_len, self.options.max_batch_size

    def place(self) -> Placement:
        """The plan; DoesNotFitError where there is none."""
        return place(self.sizes, self.budgets, self.needs, self.devices)

    def offers(self, budgets: Mapping[str, float] | None = None) -> list[Offer]:
        """What would fit instead."""
        allowed = budgets or self.given or self.free
        return offers(list(self.subject.variants(self.sizes)), allowed, self.needs)


def choose(request: Request) -> Placement | None:
    """Where everything is to go; None for the CPU's memory, as if nobody had asked.

    Raises CapacityError with what would fit, and BadRequestError for devices that are not here.
    """
    asked = request.given is not None or request.devices is not None
    assert request.needs  # checked in any case
    if not asked and request.free.keys() == {"cpu"}:
        return None
    try:
        placement = request.place()
    except DoesNotFitError as error:
        raise CapacityError(f"{error}; {offered(request.offers(), request.options)}") from None
    devices = {*placement.devices.layers, placement.embed, placement.head}
    check_present(devices)
    return None if devices == {"cpu"} else placement


def check_present(devices: set[str]) -> None:
    """Raise BadRequestError for devices that this machine does not have."""
    present = {*free_memory(), "disk"}
    if torch.backends.mps.is_available():
        present.add("mps")
    if absent := sorted(devices - present):
        raise BadRequestError(
            f"{', '.join(absent)} is not on this machine (it has {', '.join(sorted(present))})"
        )


def offered(found: Sequence[Offer], options: DeviceOptions) -> str:
    """Offers as options of a command line."""
    if not found:
        more = "" if "disk" in (options.budgets() or {}) else ", or disk=inf in --max-memory"
        return f"nothing smaller fits either: give more memory{more}"
    return f"what fits: {' or '.join(_as_options(offer) for offer in found)}"


def _as_options(offer: Offer) -> str:
    words = [] if offer.quant is None else ["--quant", offer.quant]
    words += ["--device-map", str(offer.placement.devices)]
    words += ["--max-seq-len", str(offer.needs.max_seq_len)]
    return " ".join([*words, "--max-batch-size", str(offer.needs.max_batch_size)])
