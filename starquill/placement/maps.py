"""Device maps: which device each layer, the embedding and the head are to be on.

cpu                                  # everything on one device
cuda:0=0-15,cpu=16-29,head=cuda:0    # ranges, inclusive; default=DEVICE takes what is left
0:16;1:14                            # mistral.rs's form: layers for each CUDA device in turn
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from starquill.errors import BadRequestError, listing
from starquill.placement.devices import KNOWN, read_device, slowness

AUTO = "auto"
OUTSIDE = ("embed", "head", "default")
RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_COUNTS = re.compile(r"\s*([^=;,]+?)\s*:\s*([0-9]{1,6})\s*")


@dataclass(frozen=True)
class Assignment:
    """One entry of a map: `source` is how the user wrote it.

    `target` is layers (first and last, inclusive) or one of OUTSIDE. `device` is not checked yet.
    """

    source: str
    device: str
    target: tuple[int, int] | str


@dataclass(frozen=True)
class DeviceMap:
    """A device for each layer, for the embedding, and for the final norm with the head."""

    layers: tuple[str, ...]
    embed: str
    head: str

    def __str__(self) -> str:
        """The form that `read_device_map` reads."""
        parts = [f"{device}={first}-{last}" for device, first, last in self.ranges()]
        return ",".join([*parts, f"embed={self.embed}", f"head={self.head}"])

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Neighbouring layers on one device: it, the first and the last."""
        start = 0
        for device, run in groupby(self.layers):
            count = sum(1 for _ in run)
            yield device, start, start + count - 1
            start += count


def read_device_map(
    text: str, layers: int, *, tied: bool, option: str = "--device-map"
) -> DeviceMap | None:
    """Parse a map for a model of `layers` layers; None for `auto`.

    With `tied` the head is the embedding's matrix, so both are on one device.
    Raises BadRequestError naming all that is wrong.
    """
    text = text.strip()
    if text == AUTO:
        return None
    if device := read_device(text):
        return DeviceMap((device,) * layers, device, device)
    problems: list[str] = []
    return resolve(_assignments(text, layers, problems), layers, tied, option, problems)


def _assignments(text: str, layers: int, problems: list[str]) -> list[Assignment]:
    counts = [_COUNTS.fullmatch(item) for item in text.split(";")]
    if "=" not in text and all(counts):
        return _counted([(m[1], int(m[2])) for m in counts if m], layers, problems)
    found = []
    for item in map(str.strip, text.split(",")):
        left, separator, right = (part.strip() for part in item.partition("="))
        match = RANGE.fullmatch(right)
        if separator and left in OUTSIDE:
            found.append(Assignment(item, right, left))
        elif separator and match:
            found.append(Assignment(item, left, (int(match[1]), int(match[2] or match[1]))))
        else:
            problems.append(
                f"{item!r} is no device map (expected auto, {KNOWN}, or a list of DEVICE=0-15, "
                "embed=DEVICE, head=DEVICE, default=DEVICE)"
            )
    return found


def _counted(
    counts: Sequence[tuple[str, int]], layers: int, problems: list[str]
) -> list[Assignment]:
    """mistral.rs's form: a bare number is a CUDA device."""
    found, start = [], 0
    for name, count in counts:
        source = f"{name}:{count}"
        device = f"cuda:{name}" if name.isdecimal() else name
        if count:
            found.append(Assignment(source, device, (start, start + count - 1)))
        start += count
    if start < layers:
        rest = _span(start, layers - 1)
        problems.append(f"layers {rest} have no device (add ;cpu:{layers - start})")
    return found


def resolve(
    assignments: Sequence[Assignment],
    layers: int,
    tied: bool,
    name: str,
    problems: Sequence[str] = (),
) -> DeviceMap:
    """The map that entries make together; BadRequestError with `problems` and all others.

    An embedding that is not named is with the first layer, a head with the last; where they are
    one matrix, on the faster of the two.
    """
    found = list(problems)
    devices = {a.source: read_device(a.device) for a in assignments}
    found += [
        f"{a.source!r} names an unknown device {a.device!r} (known: {KNOWN})"
        for a in assignments
        if devices[a.source] is None
    ]
    outside = _outside(assignments, found)
    owners = _owners(assignments, layers, found)
    default = outside.get("default")
    # An entry that could not be read may have been meant for what is left.
    if default is None and not problems:
        for first, last in _gaps(owners):
            found.append(f"layers {_span(first, last)} have no device (add default=cpu)")
    embed, head = outside.get("embed"), outside.get("head")
    if tied and embed and head and devices[embed.source] != devices[head.source]:
        found.append(
            f"{embed.source!r} and {head.source!r} part what is one matrix in this model; name "
            "one device for both"
        )
    if found:
        raise BadRequestError(f"{name}: {listing(found)}")

    def device(owner: Assignment | None) -> str:
        chosen = owner or default
        assert chosen is not None
        known = devices[chosen.source]
        assert known is not None
        return known

    placed = tuple(device(owner) for owner in owners)
    if tied:
        either = embed or head
        one = device(either) if either else min(placed[0], placed[-1], key=slowness)
        return DeviceMap(placed, one, one)
    return DeviceMap(
        placed, device(embed) if embed else placed[0], device(head) if head else placed[-1]
    )


def _outside(assignments: Sequence[Assignment], problems: list[str]) -> dict[str, Assignment]:
    found: dict[str, Assignment] = {}
    for a in assignments:
        if not isinstance(a.target, str):
            continue
        if a.target in found:
            problems.append(f"{found[a.target].source!r} and {a.source!r} both place {a.target}")
        found.setdefault(a.target, a)
    return found


def _owners(
    assignments: Sequence[Assignment], layers: int, problems: list[str]
) -> list[Assignment | None]:
    """Whose each layer is; None for nobody's."""
    owners: list[Assignment | None] = [None] * layers
    for a in assignments:
        if isinstance(a.target, str):
            continue
        first, last = a.target
        if first > last:
            problems.append(f"{a.source!r} ends before it begins")
            continue
        if last >= layers:
            over = _span(max(first, layers), last)
            problems.append(f"{a.source!r} passes the last layer, {layers - 1}, with layers {over}")
        overlap: dict[str, list[int]] = {}
        for layer in range(first, min(last, layers - 1) + 1):
            owner = owners[layer]
            if owner is not None:
                overlap.setdefault(owner.source, []).append(layer)
            else:
                owners[layer] = a
        for source, shared in overlap.items():
            span = _span(shared[0], shared[-1])
            problems.append(f"layers {span} are in both {source!r} and {a.source!r}")
    return owners


def _gaps(owners: Sequence[Assignment | None]) -> Iterator[tuple[int, int]]:
    for free, run in groupby(range(len(owners)), lambda layer: owners[layer] is None):
        numbers = list(run)
        if free:
            yield numbers[0], numbers[-1]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
