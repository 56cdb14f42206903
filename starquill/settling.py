"""Carrying out a placement: each tensor to its device as it is read, and the way of a step."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from starquill.checkpoint.build import weight_of
from starquill.checkpoint.hub import ModelFiles
from starquill.checkpoint.mapped import MappedFiles
from starquill.checkpoint.memory import available_memory
from starquill.checkpoint.opening import Checkpoint, open_mapped
from starquill.checkpoint.source import HeaderSource, Stored, TensorInfo, WeightSource
from starquill.engine.loaded import Watcher
from starquill.errors import CapacityError, UnsupportedError
from starquill.isq import IsqPlan
from starquill.models.spec import ArchSpec
from starquill.nn.disk import ExpertCache, Extent, LayerExperts, ReadAhead, size_of
from starquill.nn.experts import ExpertLinear, GatedExperts, PlainExperts
from starquill.nn.linear import Embedding, Linear
from starquill.nn.route import EMBED, HEAD, Route
from starquill.placement.devices import CPU, DISK, size_text
from starquill.placement.plan import Placement
from starquill.placement.sizes import Use, host
from starquill.placement.stages import StageOf
from starquill.placing import Request, choose, free_memory, offered, read_topology_file
from starquill.quant.weight import moved, tensors_of
from starquill.types import RequantizeReport

_HOLDERS = Linear | Embedding | ExpertLinear


class Settler:
    """Puts the tensors of one model where `placement` wants them.

    `mapped` has those that are to stay on disk; None where none are.
    """

    def __init__(
        self,
        placement: Placement,
        request: Request,
        mapped: tuple[WeightSource, MappedFiles] | None,
    ) -> None:
        self.placement, self._request, self.mapped = placement, request, mapped
        self._spec = request.subject.checkpoint.spec
        self._layer = _layer_pattern(self._spec)
        self._settled: dict[str, dict[str, int]] = {}

    @property
    def in_memory(self) -> int:
        """Bytes of weights that the CPU's memory holds at once."""
        use = self.placement.uses.get(CPU, Use())
        return use.weights + use.buffers

    def part(self, name: str) -> int | str:
        """The layer that a tensor, by our name, is in, or EMBED or HEAD."""
        if match := self._layer.match(name):
            return int(match[1])
        return EMBED if name.startswith(f"{self._spec.embedding}.") else HEAD

    def device(self, part: int | str) -> str:
        if isinstance(part, int):
            return self.placement.layers[part].device
        return self.placement.embed if part == EMBED else self.placement.head

    def source(self, memory: WeightSource) -> WeightSource:
        """`memory`, but what stays on disk comes mapped."""
        return _Sources(self, memory, memory if self.mapped is None else self.mapped[0])

    def settle(self, model: nn.Module, name: str) -> None:
        """The tensor that we call `name` is in its place, on the CPU: move it where it belongs."""
        path, _, attribute = name.rpartition(".")
        module, device = model.get_submodule(path), self.device(self.part(name))
        value = getattr(module, attribute)
        if device == DISK:
            self._stay(name, value)
            return
        nbytes = sum(tensor.nbytes for tensor in tensors_of(value))
        if device != CPU:
            try:
                value = moved(value, device)
            except (RuntimeError, MemoryError) as error:
                self.ran_out(name, error)
            setattr(module, attribute, value)
        self._settled.setdefault(device, {})[name] = nbytes

    def _stay(self, name: str, value: Any) -> None:
        assert self.mapped is not None
        files = self.mapped[1]
        for tensor in tensors_of(value):
            if files.has_copy(tensor):
                raise UnsupportedError(
                    f"{_told(self.part(name))} cannot stay on disk: {name} is not stored as it is "
                    "computed with; write the model with `starquill quantize MODEL --out OUT "
                    "--quant 4`, and load OUT without --quant and --dtype"
                )
        for extent in files.extents(tensors_of(value)):
            extent.drop(cached=True)

    def ran_out(self, name: str, error: Exception) -> NoReturn:
        """Raise CapacityError if `error` is a device's want of memory, or else it as it is."""
        if not _is_want_of_memory(error):
            raise error
        part, request = self.part(name), self._request
        sizes, device = request.sizes, host(self.device(part))
        if isinstance(part, int):
            asked = sizes.layers[part]
        else:
            asked = sizes.embedding if part == EMBED else sizes.head
        free = free_memory().get(device, 0)
        used = sum(self._settled.get(device, {}).values())
        offers = request.offers({**request.budgets, device: used + free})
        raise CapacityError(
            f"{_told(part)} ran out of memory on {device}: it asks for {size_text(asked)} and "
            f"{size_text(free)} are free; {offered(offers, request.options)}"
        ) from None

    def route(self, model: nn.Module) -> Route:
        """The way through `model`, in which every tensor is settled."""
        place = self.placement
        layers = tuple(host(layer.device) for layer in place.layers)
        return Route(layers, host(place.embed), host(place.head), self._read_ahead(model))

    def _read_ahead(self, model: nn.Module) -> ReadAhead | None:
        if self.mapped is None:
            return None
        parts: dict[Hashable, list[Extent]] = {}
        mixtures: list[tuple[GatedExperts | PlainExperts, int, list[list[Extent]]]] = []
        for number, layer in enumerate(self.placement.layers):
            if layer.device == DISK:
                module = model.get_submodule(f"{self._spec.layer_prefix}{number}")
                parts[number] = self._extents(_dense_tensors(module))
                mixtures += [(m, number, self._experts(m)) for m in _mixtures(module)]
        tied = weight_of(model, self._spec.head) is weight_of(model, self._spec.embedding)
        for part, path in ((HEAD, self._spec.head), (EMBED, self._spec.embedding)):
            if self.device(part) == DISK and not (tied and part == EMBED):
                parts[part] = self._extents(tensors_of(weight_of(model, path)))
        extents = [extent for each in parts.values() for extent in each]
        extents += [extent for _, _, each in mixtures for one in each for extent in one]
        memory = available_memory()
        cached = memory is None or memory >= size_of(extents)
        room = self._room()
        ahead_room = _dense_room([size_of(e) for e in parts.values()], room) if mixtures else room
        ahead = ReadAhead(parts, ahead_room, cached=cached)
        if not tied:
            ahead.only_looked_up(EMBED)
        cache = ExpertCache(room - ahead_room, cached=cached)
        for mixture, number, each in mixtures:
            mixture.disk = LayerExperts(number, each, cache)
        for extent in extents:
            extent.drop(cached=cached)  # what loading has looked at
        return ahead

    def _room(self) -> float:
        """What memory has for what is read from disk: all that nothing else takes."""
        use = self.placement.uses[CPU]
        budget = self._request.budgets.get(CPU, math.inf)
        return max(use.buffers, budget - use.total + use.buffers)

    def _extents(self, tensors: Iterator[Tensor]) -> list[Extent]:
        assert self.mapped is not None
        return self.mapped[1].extents(tensors)

    def _experts(self, mixture: GatedExperts | PlainExperts) -> list[list[Extent]]:
        weights: list[Any] = [m.weight for m in mixture.modules() if isinstance(m, ExpertLinear)]
        return [
            self._extents(tensor for weight in weights for tensor in tensors_of(weight[number]))
            for number in range(weights[0].shape[0])
        ]


class Share:
    """What one of several processes has of a model: `layers`, and the first also its ends."""

    def __init__(self, stage: StageOf, request: Request) -> None:
        _check_alone(request)
        sizes = request.sizes
        outside = sizes.embedding + sizes.head
        self.layers = stage.stages.layers(sizes.layers, outside)[stage.number]
        self._layer = _layer_pattern(request.subject.checkpoint.spec)

    def is_here(self, name: str) -> bool:
        """Whether a tensor, by our name, belongs to it."""
        match = self._layer.match(name)
        return self.layers.start == 0 if match is None else int(match[1]) in self.layers

    def cut(self, checkpoint: Checkpoint) -> Checkpoint:
        """The headers of what belongs to it."""
        infos, rename = checkpoint.source.infos, checkpoint.spec.rename
        own = {name: info for name, info in infos.items() if self.is_here(rename(name) or name)}
        return replace(checkpoint, source=HeaderSource(own))

    def of_plan(self, plan: IsqPlan) -> IsqPlan:
        """The part of a plan that is about it."""
        own = {name: scheme for name, scheme in plan.schemes.items() if self.is_here(name)}
        return replace(plan, schemes=own)


def _layer_pattern(spec: ArchSpec) -> re.Pattern[str]:
    return re.compile(re.escape(spec.layer_prefix) + r"(\d+)\.")


def _check_alone(request: Request) -> None:
    """Refuse, all at once, what does not go with stages."""
    options, quant = request.options, request.subject.quant
    topology = options.topology
    layers = request.subject.checkpoint.config.num_hidden_layers
    refused = {
        "a device map": options.device_map is not None,
        "a limit of memory": options.max_memory is not None,
        "devices in a topology": topology is not None
        and bool(read_topology_file(topology, layers).devices),
        "calibration": quant is not None and quant.calibrate is not None,
        "distillation": quant is not None and quant.distill is not None,
    }
    if found := [what for what, asked in refused.items() if asked]:
        raise UnsupportedError(
            f"{' and '.join(found)} cannot be had with stages: each is in its process' memory, and "
            "none sees the whole model; leave it away, or write the model with `starquill quantize`"
        )


def settler_for(files: ModelFiles, request: Request) -> Settler | None:
    """What puts a model on its devices; None for the CPU's memory alone."""
    placement = choose(request)
    if placement is None:
        return None
    on_disk = DISK in placement.uses
    mapped = open_mapped(files, request.subject.checkpoint) if on_disk else None
    return Settler(placement, request, mapped)


class _Sources:
    """Reads each tensor from memory's source or from disk's."""

    def __init__(self, settler: Settler, memory: WeightSource, disk: WeightSource) -> None:
        self._settler, self._memory, self._disk = settler, memory, disk
        self.infos: dict[str, TensorInfo] = memory.infos
        self.warnings = memory.warnings
        self._names = {name: settler._spec.rename(name) or name for name in self.infos}

    def read(self, name: str) -> Stored:
        ours = self._names[name]
        device = self._settler.device(self._settler.part(ours))
        try:
            return (self._disk if device == DISK else self._memory).read(name)
        except (RuntimeError, MemoryError) as error:
            self._settler.ran_out(ours, error)


class Stays:
    """In place of a requantizer: a model whose weights cannot be changed as it runs, and `why`."""

    times = 0

    def __init__(self, name: str, why: str) -> None:
        self._name, self._why = name, why
        self.watchers: WeakSet[Watcher] = WeakSet()

    def __call__(self, quant: object) -> RequantizeReport:  # noqa: ARG002
        raise UnsupportedError(
            f"{self._name} has layers {self._why}; write it anew with `starquill quantize`"
        )


ON_DISK, ELSEWHERE = "on disk, which stay as they are stored", "in other processes"


def _told(part: int | str) -> str:
    if isinstance(part, int):
        return f"layer {part}"
    return "the embedding" if part == EMBED else "the head"


def _is_want_of_memory(error: Exception) -> bool:
    """torch tells it by a class of its own for GPUs and in words for the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _mixtures(layer: nn.Module) -> list[GatedExperts | PlainExperts]:
    return [m for m in layer.modules() if isinstance(m, GatedExperts | PlainExperts)]


def _dense_tensors(layer: nn.Module) -> Iterator[Tensor]:
    """All that every token may read: not what is fetched expert by expert."""
    fetched = {module for mixture in _mixtures(layer) for module in mixture.modules()}
    for module in layer.modules():
        if isinstance(module, _HOLDERS) and module not in fetched:
            yield from tensors_of(module.weight)


def _dense_room(sizes: list[int], room: float) -> float:
    """What of `room` goes to the parts that every token reads, where experts have the rest."""
    return min(sum(sizes), max(2 * max(sizes, default=0), room / 4), room)
