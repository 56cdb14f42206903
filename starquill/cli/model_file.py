"""The file of `serve --ray --models FILE`: several models, each with options of its own.

coder:                    # the name by which requests ask for it
  model: bigcode/starcoder2-7b
  quant: 4
  stages: 2
small:
  model: default
  autoscale: 1-4
  lora: [sql=/models/sql-lora]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from starquill.checkpoint.files import read_text
from starquill.cli.options import ModelOptions, QuantizeOptions, XLoraOptions
from starquill.cli.ray_options import RayOptions, SplitOptions
from starquill.cli.serve import ListenOptions, LoraOptions, WorkOptions
from starquill.errors import BadRequestError, listing

_GROUPS = (ModelOptions, QuantizeOptions, XLoraOptions, LoraOptions, WorkOptions, RayOptions)
# These are about the server or the cluster, which all models share.
_SHARED = {"ray", "ray_address", "allow_lora_updates", "lora_root"}
G = TypeVar("G")


def read_models(path: Path) -> dict[str, dict[str, Any]]:
    """The options of each model by their fields' names; BadRequestError with all that is wrong."""
    raw = _parsed(path)
    known, problems = _known(), []
    found: dict[str, dict[str, Any]] = {}
    for name, settings in raw.items():
        own = found[str(name)] = {}
        if not isinstance(settings, Mapping) or "model" not in settings:
            problems.append(f"{name} is {settings!r:.60} (expected options, model among them)")
            continue
        for option, value in settings.items():
            field = str(option).replace("-", "_")
            if field not in known:
                problems.append(f"{name} has {option!r:.60} (expected {listing(_told(known), 60)})")
            elif (read := _read(value, known[field])) is None:
                problems.append(
                    f"{name}: {option} is {value!r:.60} (expected {_kind(known[field])})"
                )
            else:
                own[field] = read
    if problems:
        raise BadRequestError(f"{path}: {'; '.join(problems)}")
    return found


def changed(group: G, own: Mapping[str, Any]) -> G:
    """A group of options with those of its fields that are among `own`."""
    names = {field.name for field in fields(group)}  # type: ignore[arg-type]  # a dataclass
    return replace(group, **{name: own[name] for name in names & own.keys()})  # type: ignore[type-var]


def _parsed(path: Path) -> dict[Any, Any]:
    try:
        raw = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise BadRequestError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(raw, dict) or not raw:
        raise BadRequestError(f"{path} holds a {type(raw).__name__} (expected models by name)")
    return raw


def _known() -> dict[str, Any]:
    """Options that a model may have, with the types of their values."""
    found = {"fim_order": get_type_hints(ListenOptions)["fim_order"]}
    found["stages"] = get_type_hints(SplitOptions)["stages"]
    for group in _GROUPS:
        found |= get_type_hints(group)
    return {name: kind for name, kind in found.items() if name not in _SHARED}


def _told(known: Mapping[str, Any]) -> list[str]:
    return sorted(name.replace("_", "-") for name in known)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """What a value may be, besides nothing at all."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for kind in get_args(hint) if kind is not type(None))
    return (hint,)


def _read(value: Any, hint: Any) -> Any:
    """`value` as an option's field has it; None for one that it cannot have."""
    for kind in _kinds(hint):
        if get_origin(kind) is Literal:
            return value if value in get_args(kind) else None
        if get_origin(kind) is list:
            items = value if isinstance(value, list) else [value]
            return items if all(isinstance(item, str) for item in items) else None
        if kind is bool or isinstance(value, bool):
            return value if kind is bool and isinstance(value, bool) else None
        if kind is float and isinstance(value, int | float):
            return float(value)
        if kind is int and isinstance(value, int):
            return value
        if kind in (str, Path) and isinstance(value, str | int):
            return kind(str(value))
    return None


def _kind(hint: Any) -> str:
    kind = _kinds(hint)[0]
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is list:
        return "a list of texts"
    names = {bool: "true or false", int: "a whole number", float: "a number"}
    return names.get(kind, "a text")
