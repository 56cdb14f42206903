"""Typed reading of `config.json`: every problem of a file is told at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starquill.errors import CheckpointError, UnsupportedError, listing
from starquill.nn.rope import LongRope, RopeConfig, yarn_attention_factor

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
        if not _is_positive(value):
            return self._wrong(key, value, expected, 1.0)
        return float(value)

    def _wrong(self, key: str, value: object, expected: str, placeholder: Value) -> Value:
        self.wrong.add(key)
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        self.problems.append(f"{key} is {shown} (expected {expected})")
        return placeholder

    def whole_numbers(self, key: str, below: int) -> tuple[int, ...]:
        """A list of whole numbers from 0 on, each less than `below`; empty where it is missing."""
        value, expected = self.raw.get(key), f"a list of whole numbers below {below}"
        found = [] if value is None else value
        if not isinstance(found, list) or not all(
            isinstance(n, int) and not isinstance(n, bool) and 0 <= n < below for n in found
        ):
            return self._wrong(key, value, expected, ())
        return tuple(found)

    def positive_floats(self, key: str, count: int) -> tuple[float, ...]:
        value, expected = self.raw.get(key), f"a list of {count} positive numbers"
        if not isinstance(value, list) or len(value) != count or not all(map(_is_positive, value)):
            return self._wrong(key, value, expected, (1.0,) * count)
        return tuple(map(float, value))

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
        # What was read twice is told once.
        problems, unsupported = (list(dict.fromkeys(p)) for p in (self.problems, self.unsupported))
        if problems:
            raise CheckpointError(f"{self.name}: {listing(problems)}")
        if unsupported:
            raise UnsupportedError(f"{self.name} asks for {listing(unsupported)}")


def _is_positive(value: object) -> bool:
    """Whether it is a number above 0 that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= sys.float_info.max


@dataclass(frozen=True)
class Heads:
    """The shape of grouped-query attention."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int


def read_heads(reader: ConfigReader, kv_heads: int | None = None) -> Heads:
    """`hidden_size`, the numbers of heads, and `head_dim`, which else follows from them.

    `kv_heads` is for a config that does not say; 0 for as many as there are heads.
    """
    hidden, heads = reader.positive_int("hidden_size"), reader.positive_int("num_attention_heads")
    default = _REQUIRED if kv_heads is None else kv_heads or heads
    kv_heads = reader.positive_int("num_key_value_heads", default)
    head_dim = reader.positive_int("head_dim", None)
    if head_dim is None:
        reader.require(
            hidden % heads == 0,
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
            "hidden_size",
            "num_attention_heads",
        )
        head_dim = hidden // heads
    reader.require(
        heads % kv_heads == 0,
        f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
        "num_attention_heads",
        "num_key_value_heads",
    )
    reader.require(
        head_dim % 2 == 0, f"head_dim {head_dim} is odd; rotary pairs dimensions", "head_dim"
    )
    reader.require(
        heads * head_dim <= MOST,
        f"num_attention_heads {heads} times head_dim {head_dim} is more than {MOST}",
    )
    return Heads(hidden, heads, kv_heads, head_dim)


def read_rope(
    reader: ConfigReader, head_dim: int, context: int, types: tuple[str, ...] = ROPE_TYPES
) -> RopeConfig:
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
    kind = rope.choice("rope_type", types, default="default")
    theta = rope.positive_float("rope_theta")
    if rope.positive_float("partial_rotary_factor", 1.0) != 1.0:
        rope.unsupported.append("partial_rotary_factor other than 1")
    scaling: dict[str, Any] = {}
    if kind == "longrope":
        scaling = _read_longrope(rope, head_dim, context, reader)
    elif kind != "default":
        scaling = _read_scaling(rope, kind, context, reader)
    too_small = kind == "dynamic" and head_dim <= 2
    reader.require(not too_small, f"head_dim {head_dim} is too small for dynamic rope", "head_dim")
    reader.problems.extend(rope.problems)
    reader.unsupported.extend(rope.unsupported)
    return RopeConfig(theta=theta, head_dim=head_dim, type=kind, **scaling)  # type: ignore[arg-type]


def _read_longrope(
    rope: ConfigReader, head_dim: int, context: int, model: ConfigReader
) -> dict[str, Any]:
    """Factors and scales as phimoe has them. The trained length is here or there."""
    original = model.positive_int("original_max_position_embeddings", None)
    original = original or rope.positive_int("original_max_position_embeddings", context)

    def read(length: str) -> LongRope:
        factors = rope.positive_floats(f"{length}_factor", head_dim // 2)
        return LongRope(factors, rope.positive_float(f"{length}_mscale"))

    return {"original_context": original, "short": read("short"), "long": read("long")}


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
