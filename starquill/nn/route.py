"""The way of a step through a model whose parts are on several devices, some read from disk.

Nothing else hops: a layer finds its input and what the step shares on its own device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import Tensor, nn

from starquill.nn.attention import AttentionStep
from starquill.nn.cache import KvCache
from starquill.nn.disk import ReadAhead
from starquill.nn.lora import AdapterMix

EMBED, HEAD = "embed", "head"
# What all layers on the device of a layer share.
MakeStep = Callable[[int], AttentionStep]
Move = Callable[[Tensor, str], Tensor]
T = TypeVar("T")
Half = Callable[[Tensor, AttentionStep], T]  # part of a layer's work


class Rows(Protocol):
    """The rows of a step, whatever layer they are in; as in `models.spec.StepBatch`."""

    @property
    def positions(self) -> Tensor: ...

    @property
    def tables(self) -> Tensor: ...

    @property
    def spans(self) -> Tensor: ...

    @property
    def cache(self) -> KvCache: ...

    @property
    def mix(self) -> AdapterMix | None: ...


def _to(tensor: Tensor, device: str) -> Tensor:
    return tensor.to(device)


@dataclass(frozen=True, eq=False)
class Route:
    """Where each layer computes, the embedding, and the final norm with the head.

    `disk` brings those parts that are read as they are used, by a layer's number, EMBED or HEAD.
    A mix of adapters stays on the CPU: `nn.lora` takes from it what a product needs.
    """

    layers: tuple[str, ...]
    embed: str
    head: str
    disk: ReadAhead | None = None
    move: Move = _to

    def through(self, layers: Iterable[nn.Module], x: Tensor, make_step: MakeStep) -> Tensor:
        """`[B, T, D] -> [B, T, D]`, over all layers. Each device's step is made once."""
        steps: dict[str, AttentionStep] = {}
        here = self.embed
        for number, layer in enumerate(layers):
            device = self.layers[number]
            if device != here:
                x, here = self.move(x, device), device
            if device not in steps:
                steps[device] = self._on(device, make_step(number))
            if self.disk is not None:
                self.disk.use(number)
            x = layer(x, steps[device])
        return x if here == self.head else self.move(x, self.head)

    def beyond(self, x: Tensor, _: Rows) -> Tensor:
        """No layer is in another process."""
        return x

    def one(self, layer: int, half: Half[T], x: Tensor, make_step: MakeStep) -> T:
        """A part of one layer alone; what it makes stays on that layer's device."""
        device = self.layers[layer]
        if self.disk is not None:
            self.disk.use(layer)
        return half(self.move(x, device), self._on(device, make_step(layer)))

    def to_end(self, x: Tensor) -> Tensor:
        """From the last layer's device to the final norm's."""
        return self.move(x, self.head)

    def _on(self, device: str, step: AttentionStep) -> AttentionStep:
        """The cache has planned for its layers' device already."""
        if device == "cpu":
            return step
        return replace(step, cos=self.move(step.cos, device), sin=self.move(step.sin, device))

    def to_embedding(self, ids: Tensor) -> Tensor:
        if self.disk is not None:
            self.disk.look_up(EMBED, ids.numel())
        return ids if self.embed == "cpu" else self.move(ids, self.embed)

    def at_head(self) -> None:
        """The head is about to multiply."""
        if self.disk is not None:
            self.disk.use(HEAD)


class OneDevice:
    """The way where everything is on one device, the CPU, and in memory."""

    def through(self, layers: Iterable[nn.Module], x: Tensor, make_step: MakeStep) -> Tensor:
        step = make_step(0)
        for layer in layers:
            x = layer(x, step)
        return x

    def beyond(self, x: Tensor, _: Rows) -> Tensor:
        return x

    def one(self, layer: int, half: Half[T], x: Tensor, make_step: MakeStep) -> T:
        return half(x, make_step(layer))

    def to_end(self, x: Tensor) -> Tensor:
        return x

    def to_embedding(self, ids: Tensor) -> Tensor:
        return ids

    def at_head(self) -> None:
        """Nothing to fetch."""


ONE_DEVICE = OneDevice()
