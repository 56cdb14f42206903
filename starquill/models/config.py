"""Typed reading of `config.json`: every problem of a file is told at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from starquill.errors import CheckpointError, UnsupportedError, listing
from starquill.nn.rope import RopeConfig, yarn_attention_factor

ROPE_TYPES = ("default", "linear", "dynamic", "yarn")
_REQUIRED: Any = object()
# Larger than any model's sizes; a damaged number must not make us build something endless.
MOST, MOST_LAYERS, MOST_POSITIONS = 2**24, 10_000, 2**31 - 1
MOST_ROPE = 1e6

Value = TypeVar("Value")


class ConfigReader:
    """Reads keys of a JSON object by type, collecting problems until `finish`.

    A key that is missing or null takes the default; without one it is a problem. A problem
    yields a harmless placeholder, so that reading goes on and finds the others.
    """

    def __init__(self, raw: Mapping[str, Any], name: str = "config.json") -> None:
        self.raw = raw
        self.name = name
        self.problems: list[str] = []
        self.wrong: set[str] = set()
        self.unsupported: list[str] = []

    def _take(self, key: str, default: Any, expected: str, placeholder: Value) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            self.problems.append(f"{key} is missing (expected {expected})")
            self.wrong.add(key)
            return placeholder
        return default

    def positive_int(self, key: str, default: Any = _REQUIRED, most: int = MOST) -> int:
        expected = f"a whole number from 1 to {most}"
        value = self._take(key, default, expected, 1)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            return self._wrong(key, value, expected, 1)
        return value

    def positive_float(self, key: str, default: Any = _REQUIRED) -> float:
        expected = "a positive number"
        value = self._take(key, default, expected, 1.0)
        if value is default:
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            return self._wrong(key, value, expected, 1.0)
        try:
            return float(value)
        except OverflowError:
            return self._wrong(key, value, expected, 1.0)

    def _wrong(self, key: str, value: object, expected: str, placeholder: Value) -> Value:
        self.wrong.add(key)
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        self.problems.append(f"{key} is {shown} (expected {expected})")
        return placeholder

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        value = self._take(key, default, "true or false", False)
        if value is not default and not isinstance(value, bool):
            return self._wrong(key, value, "true or false", False)
        return value

    def optional_boolean(self, key: str) -> bool | None:
        return None if self.raw.get(key) is None else self.boolean(key)

    def choice(self, key: str, known: tuple[str, ...], default: Any = _REQUIRED) -> str:
        """A string of which only `known` values are implemented."""
        value = self._take(key, default, f"one of {', '.join(known)}", known[0])
        if value not in known:
            self.unsupported.append(f"{key} {value!r} (implemented: {', '.join(known)})")
            return known[0]
        return value

    def require(self, holds: bool, problem: str, *keys: str) -> None:
        """Note `problem` unless it `holds`, or one of the `keys` it is about is wrong anyway."""
        if not holds and not self.wrong.intersection(keys):
            self.problems.append(problem)

    def finish(self) -> None:
        """Raise what was found: faults first, then what starquill does not implement."""
        if self.problems:
            raise CheckpointError(f"{self.name}: {listing(self.problems)}")
        if self.unsupported:
            raise UnsupportedError(f"{self.name} asks for {listing(self.unsupported)}")


def read_rope(reader: ConfigReader, head_dim: int, context: int) -> RopeConfig:
    """Read both forms: `rope_theta` beside `rope_scaling`, and the newer `rope_parameters`."""
    # Where a config has both, transformers takes the older one.
    key = "rope_scaling" if reader.raw.get("rope_scaling") else "rope_parameters"
    nested = reader.raw.get(key) or {}
    if not isinstance(nested, dict):
        reader.problems.append(f"{key} is {nested!r:.60} (expected an object)")
        nested = {}
    outer = {key: reader.raw.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    # transformers takes 0 for "not given" in these.
    unset = {
        k for k in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow") if nested.get(k) == 0
    }
    values = outer | {k: v for k, v in nested.items() if v is not None and k not in unset}
    if values.get("rope_type") is None:
        values["rope_type"] = values.get("type")  # the key's name before transformers 4.45
    rope = ConfigReader(values, f"{reader.name} rope parameters")
    kind = rope.choice("rope_type", ROPE_TYPES, default="default")
    theta = rope.positive_float("rope_theta")
    if rope.positive_float("partial_rotary_factor", 1.0) != 1.0:
        rope.unsupported.append("partial_rotary_factor other than 1")
    scaling = _read_scaling(rope, kind, context, reader) if kind != "default" else {}
    too_small = kind == "dynamic" and head_dim <= 2
    reader.require(not too_small, f"head_dim {head_dim} is too small for dynamic rope", "head_dim")
    reader.problems.extend(rope.problems)
    reader.unsupported.extend(rope.unsupported)
    return RopeConfig(theta=theta, head_dim=head_dim, type=kind, **scaling)  # type: ignore[arg-type]


def _read_scaling(
    rope: ConfigReader, kind: str, context: int, model: ConfigReader
) -> dict[str, Any]:
    """The keys that one scaling type uses. `context` is `max_position_embeddings`."""
    if kind == "linear":
        return {"factor": _bounded(rope, "factor")}
    if kind == "dynamic":
        factor = _bounded(rope, "factor")
        rope.require(factor >= 1, f"factor is {factor} (expected 1 or more)", "factor")
        return {"factor": factor, "original_context": context}
    original = model.positive_int("original_max_position_embeddings", None)
    original = original or rope.positive_int("original_max_position_embeddings", context)
    theta = rope.raw["rope_theta"]
    rope.require(theta != 1, "rope_theta is 1, which leaves yarn nothing to scale", "rope_theta")
    factor = _bounded(rope, "factor", context / original)
    mscale = rope.positive_float("mscale", None) or 0.0
    mscale_all_dim = rope.positive_float("mscale_all_dim", None) or 0.0
    attention = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return {
        "factor": factor,
        "original_context": original,
        "attention_factor": rope.positive_float("attention_factor", attention),
        "beta_fast": _bounded(rope, "beta_fast", 32.0),
        "beta_slow": _bounded(rope, "beta_slow", 1.0),
        "truncate": rope.boolean("truncate", True),
    }


def _bounded(rope: ConfigReader, key: str, default: Any = _REQUIRED) -> float:
    value = rope.positive_float(key, default)
    rope.require(
        1 / MOST_ROPE <= value <= MOST_ROPE,
        f"{key} is {value} (expected at most {MOST_ROPE:g} and no less than its inverse)",
        key,
    )
    return value
