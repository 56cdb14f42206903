"""Which device each part of a model goes to: the fastest that has room, `LayerPlan` by layer.

The plan is the best of its kind. Of all ways to cut the layers into one range for each device,
the fastest device first, and to put embedding and head on any of them, it has the most bytes that
a token reads on the fastest device, then on the next, and so on. So layers on faster devices are
as many as can be, unless the head, which is read as often, is worth more there.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from starquill.errors import BadRequestError, CapacityError
from starquill.placement.devices import CPU, DISK, kind, size_text, slowness
from starquill.placement.maps import DeviceMap
from starquill.placement.sizes import ModelSizes, Needs, Use, account


@dataclass(frozen=True)
class LayerPlan:
    """Where one layer lives, and the schemes of its matrices; None for as they are stored."""

    device: str
    scheme: str | None


@dataclass(frozen=True)
class Placement:
    """A plan for a whole model, and what it takes of each device, the fastest first.

    The final norm is with the head.
    """

    layers: tuple[LayerPlan, ...]
    embed: str
    head: str
    uses: Mapping[str, Use]

    @property
    def devices(self) -> DeviceMap:
        return DeviceMap(tuple(layer.device for layer in self.layers), self.embed, self.head)


class DoesNotFitError(CapacityError):
    """A model is larger than its devices: the first `part` without room on `device`."""

    def __init__(self, part: str, device: str, asked: Use, room: tuple[float, float]) -> None:
        """`room` is what is free and what the device has in all."""
        self.part, self.device, self.asked, self.free = part, device, asked.total, room[0]
        named = {
            "weights": asked.weights,
            "cache": asked.cache,
            "activations": asked.activations,
            "read-ahead": asked.buffers,
            "reserve": asked.reserve,
        }
        parts = ", ".join(f"{name} {size_text(size)}" for name, size in named.items() if size)
        super().__init__(
            f"{part} does not fit on {device}: it asks for {size_text(asked.total)} ({parts}) and "
            f"{size_text(room[0])} of {size_text(room[1])} are free"
        )


def plan(
    sizes: ModelSizes,
    budgets: Mapping[str, float],
    needs: Needs,
    devices: DeviceMap | None = None,
) -> Placement:
    """Place a model on the devices of `budgets` (bytes), or as `devices` say.

    A device of `devices` that has no budget is taken to have room. Raises DoesNotFitError naming
    the first part that has none.
    """
    if devices is None:
        devices = _best(sizes, budgets, needs)
    _check(sizes, budgets, needs, devices)
    schemes = sizes.schemes or (None,) * len(sizes.layers)
    uses = account(sizes, needs, devices)
    return Placement(
        tuple(map(LayerPlan, devices.layers, schemes)),
        devices.embed,
        devices.head,
        {device: uses[device] for device in sorted(uses, key=slowness)},
    )


def _check(
    sizes: ModelSizes, budgets: Mapping[str, float], needs: Needs, devices: DeviceMap
) -> None:
    fitting = _fitting_parts(sizes, budgets, needs, devices)
    if fitting == len(sizes.layers) + 2:
        return
    before = account(sizes, needs, devices, fitting)
    after = account(sizes, needs, devices, fitting + 1)
    over = _over(after, budgets)
    assert over is not None
    part = f"layer {fitting - 1}" if fitting else "the embedding"
    if fitting == len(sizes.layers) + 1:
        part = "the head"
    used = before.get(over, Use())
    budget = budgets[over]
    raise DoesNotFitError(part, over, after[over] - used, (budget - used.total, budget))


def _over(uses: Mapping[str, Use], budgets: Mapping[str, float]) -> str | None:
    """The fastest device that gives more than it has."""
    over = [d for d, use in uses.items() if use.total > budgets.get(d, math.inf)]
    return min(over, key=slowness, default=None)


def _fitting_parts(
    sizes: ModelSizes, budgets: Mapping[str, float], needs: Needs, devices: DeviceMap
) -> int:
    """How many of embedding, layers, head have room, in this order: a part only takes more."""
    count = len(sizes.layers) + 2

    def too_many(parts: int) -> bool:
        return _over(account(sizes, needs, devices, parts), budgets) is not None

    if not too_many(count):
        return count
    return bisect_left(range(1, count + 1), True, key=too_many)


def _best(sizes: ModelSizes, budgets: Mapping[str, float], needs: Needs) -> DeviceMap:
    """The best plan; one that does not fit, and comes furthest, if none does."""
    if not budgets:
        raise BadRequestError("there is no device to plan for (give --max-memory cpu=16GiB)")
    if DISK in budgets and CPU not in budgets:
        raise BadRequestError(
            "what is on disk is read into memory: give --max-memory a cpu=SIZE beside disk"
        )
    order = sorted(budgets, key=slowness)
    outer = [(d, d) for d in order] if sizes.tied else list(product(order, order))
    found = [_filled(sizes, budgets, needs, pair) for pair in outer]

    def rank(devices: DeviceMap) -> tuple[object, ...]:
        read = dict.fromkeys(order, 0)
        for device, active in zip(devices.layers, sizes.active or sizes.layers, strict=True):
            read[device] += active
        read[devices.head] += sizes.read_at_the_end
        used = len({*devices.layers, devices.embed, devices.head})
        places = (order.index(devices.head), order.index(devices.embed))
        fitting = _fitting_parts(sizes, budgets, needs, devices)
        return (-fitting, *(-count for count in read.values()), used, *places)

    return min(found, key=rank)


def _filled(
    sizes: ModelSizes, budgets: Mapping[str, float], needs: Needs, outer: tuple[str, str]
) -> DeviceMap:
    """The longest ranges that fit, the fastest device first; embedding and head are given.

    No other cut has more on a faster device: who comes further there has less left for the next.
    What fits nowhere goes to the slowest.
    """
    order = sorted(budgets, key=slowness)
    base = account(sizes, needs, DeviceMap((), *outer))
    cache = sizes.cache(needs)
    layers: list[str] = []
    for device in order:
        if device == DISK:
            continue
        used = base.get(device, Use())
        reserve = 0 if used.reserve else needs.reserve[kind(device)]
        room = budgets[device] - used.total - sizes.activations(needs) - reserve
        left = sizes.layers[len(layers) :]
        if device == CPU and DISK in budgets:
            on_disk = base.get(DISK, Use()).weights
            count = _before_disk(left, room, cache, used.buffers, budgets[DISK] - on_disk)
        else:
            sums = list(accumulate(weights + cache for weights in left))
            count = sum(total <= room for total in sums)
        layers += [device] * count
    layers += [order[-1]] * (len(sizes.layers) - len(layers))
    return DeviceMap(tuple(layers), *outer)


def _before_disk(weights: Sequence[int], room: float, cache: int, buffers: int, disk: float) -> int:
    """How many layers stay in memory where the rest is read from disk as it is needed.

    The caches of all are in memory, and room to read into; `buffers` of it is counted already.
    """
    count = len(weights)
    sums = [0, *accumulate(weights)]
    largest = [0, *accumulate(reversed(weights), max)][::-1]  # of the layers from here on
    fits = [
        kept
        for kept in range(count, -1, -1)
        if sums[kept] + count * cache + max(0, 2 * largest[kept] - buffers) <= room
    ]
    return next((kept for kept in fits if sums[-1] - sums[kept] <= disk), max(fits, default=0))
