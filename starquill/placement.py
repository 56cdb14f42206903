"""Which layer gets what, from a topology file: pure functions, no tensors.

A topology maps layers to settings, later entries winning:

    "0-15": {quant: 4}        # inclusive
    "31": {quant: dense}
    "/self_attn\\\\.v_proj/": {quant: 8}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from starquill.errors import BadRequestError, listing

_KNOWN = ("quant",)


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


def read_topology(text: str, layers: int, name: str = "topology") -> tuple[TopologyEntry, ...]:
    """Parse a topology for a model of `layers` layers; all that is wrong in one error."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadRequestError(f"{name} is not valid YAML: {error}") from None
    if not isinstance(raw, Mapping):
        raise BadRequestError(f"{name} holds a {type(raw).__name__} (expected layers: settings)")
    entries, problems = [], []
    for target, settings in raw.items():
        try:
            entries.append(_entry(str(target), settings, layers))
        except BadRequestError as error:
            problems.append(str(error))
    if problems:
        raise BadRequestError(f"{name}: {listing(problems)}")
    return tuple(entries)


def _entry(target: str, settings: Any, layers: int) -> TopologyEntry:
    if not isinstance(settings, Mapping):
        raise BadRequestError(f"{target!r} is {settings!r} (expected {{quant: SCHEME}})")
    unknown = [str(key) for key in settings if key not in _KNOWN]
    if unknown:
        raise BadRequestError(
            f"{target!r} has unknown settings {listing(unknown)} (known: {', '.join(_KNOWN)})"
        )
    quant = str(settings.get("quant", ""))
    if not quant:
        raise BadRequestError(f"{target!r} sets nothing")
    if len(target) > 2 and target.startswith("/") and target.endswith("/"):
        try:
            return TopologyEntry(target, quant, pattern=re.compile(target[1:-1]))
        except re.error as error:
            raise BadRequestError(f"{target!r} is a bad regular expression: {error}") from None
    match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", target)
    if match is None:
        raise BadRequestError(f"{target!r} names no layers (expected 3, 0-15 or /regex/)")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last or last >= layers:
        raise BadRequestError(f"{target!r} is outside of the layers 0 to {layers - 1}")
    return TopologyEntry(target, quant, layers=(first, last))
