"""Topology files: which layer gets which scheme, and which device.

    "0-15": {quant: 4, device: cuda:0}        # inclusive
    "31": {quant: dense}
    "/self_attn\\\\.v_proj/": {quant: 8}
    "embed": {device: cpu}                    # as well as head, and default for all others

Of schemes the later entry wins; a layer has one device, so that two for it are an error. Beside
them `quant_organization: moqe` may stand, which quantizes experts alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from starquill.errors import BadRequestError, listing
from starquill.placement.maps import OUTSIDE, RANGE, Assignment

_KNOWN = ("quant", "device")
ORGANIZATIONS = ("default", "moqe")
_ORGANIZATION = "quant_organization"


@dataclass(frozen=True)
class TopologyEntry:
    """The weights that `target` names, and the scheme for them.

    Either `layers` (first and last, inclusive) or `pattern` is set.
    """

    target: str
    quant: str
    layers: tuple[int, int] | None = None
    pattern: re.Pattern[str] | None = None

    def matches(self, name: str, layer: int | None) -> bool:
        """Whether a weight called `name`, in `layer` (None outside of all), is meant."""
        if self.pattern is not None:
            return self.pattern.search(name) is not None
        assert self.layers is not None
        return layer is not None and self.layers[0] <= layer <= self.layers[1]


@dataclass(frozen=True)
class Topology:
    """What a file says: schemes in its order, devices (to be resolved to a map), organization."""

    quants: tuple[TopologyEntry, ...]
    devices: tuple[Assignment, ...]
    organization: str | None


def _parsed(text: str, name: str) -> Mapping[Any, Any]:
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadRequestError(f"{name} is not valid YAML: {error}") from None
    if not isinstance(raw, Mapping):
        raise BadRequestError(f"{name} holds a {type(raw).__name__} (expected layers: settings)")
    return raw


def read_organization(text: str, name: str = "topology") -> str | None:
    """What a topology says of `quant_organization`; None if it says nothing."""
    return _organization(_parsed(text, name), name)


def _organization(raw: Mapping[Any, Any], name: str) -> str | None:
    found = raw.get(_ORGANIZATION)
    if found is not None and found not in ORGANIZATIONS:
        raise BadRequestError(
            f"{name}: {_ORGANIZATION} is {found!r} (expected {' or '.join(ORGANIZATIONS)})"
        )
    return found


def read_topology(text: str, layers: int, name: str = "topology") -> tuple[TopologyEntry, ...]:
    """The schemes of a topology for a model of `layers` layers."""
    return parse_topology(text, layers, name).quants


def parse_topology(text: str, layers: int, name: str = "topology") -> Topology:
    """Parse a topology for a model of `layers` layers; all that is wrong in one error."""
    quants: list[TopologyEntry] = []
    devices: list[Assignment] = []
    problems = []
    raw = _parsed(text, name)
    organization = _organization(raw, name)
    for target, settings in raw.items():
        if target == _ORGANIZATION:
            continue
        try:
            quant, device = _entry(str(target), settings, layers)
        except BadRequestError as error:
            problems.append(str(error))
            continue
        quants += [quant] if quant else []
        devices += [device] if device else []
    if problems:
        raise BadRequestError(f"{name}: {listing(problems)}")
    return Topology(tuple(quants), tuple(devices), organization)


def _entry(
    target: str, settings: Any, layers: int
) -> tuple[TopologyEntry | None, Assignment | None]:
    if not isinstance(settings, Mapping):
        raise BadRequestError(f"{target!r} is {settings!r} (expected {{quant: SCHEME}})")
    unknown = [str(key) for key in settings if key not in _KNOWN]
    if unknown:
        raise BadRequestError(
            f"{target!r} has unknown settings {listing(unknown)} (known: {', '.join(_KNOWN)})"
        )
    quant, device = (str(settings.get(key, "")) for key in _KNOWN)
    if not quant and not device:
        raise BadRequestError(f"{target!r} sets nothing")
    if target in OUTSIDE and not quant:
        return None, Assignment(target, device, target)
    if len(target) > 2 and target.startswith("/") and target.endswith("/"):
        if device:
            raise BadRequestError(f"{target!r} cannot have a device, which takes whole layers")
        try:
            return TopologyEntry(target, quant, pattern=re.compile(target[1:-1])), None
        except re.error as error:
            raise BadRequestError(f"{target!r} is a bad regular expression: {error}") from None
    match = RANGE.fullmatch(target)
    if match is None:
        raise BadRequestError(f"{target!r} names no layers (expected 3, 0-15 or /regex/)")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last or last >= layers:
        raise BadRequestError(f"{target!r} is outside of the layers 0 to {layers - 1}")
    return (
        TopologyEntry(target, quant, layers=(first, last)) if quant else None,
        Assignment(target, device, (first, last)) if device else None,
    )
