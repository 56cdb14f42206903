"""PEFT's adapters: `adapter_config.json` and `adapter_model.safetensors`.

The tensors decide which modules an adapter acts on; the config gives their scales, and must not
say otherwise.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from starquill.adapters.adapter import (
    CONFIG,
    PEFT_FILE,
    Adapter,
    AdapterPart,
    BaseModules,
    Problems,
    check_base_weight,
    check_part,
    read_tensors,
    unknown_modules,
    without_unchanged,
)
from starquill.adapters.peft_config import PeftConfig, read_peft_config
from starquill.adapters.stacks import Stacks
from starquill.checkpoint.hub import PICKLE_REFUSED
from starquill.errors import AdapterError, UnsupportedError, listing
from starquill.models.spec import rewritten

Say = Callable[[str], str]  # what a module's path was where the adapter was trained

_PREFIX = "base_model.model."
_NAMES = {
    r"lora_A(\.default)?\.weight": "a",
    r"lora_B(\.default)?\.weight": "b",
    r"lora_B(\.default)?\.bias": "b_bias",
    r"lora_embedding_A(\.default)?": "a",
    r"lora_embedding_B(\.default)?": "b",
    r"lora_magnitude_vector(\.default)?(\.weight)?": "magnitude",
    r"base_layer\.weight": "base_weight",
    r"base_layer\.bias": "bias",
    r"(modules_to_save(\.default)?\.)?weight": "weight",
    r"(modules_to_save(\.default)?\.)?bias": "bias",
}


def read_peft(folder: Path, raw: Mapping[str, Any], base: BaseModules) -> Adapter:
    """Read a folder whose config is `raw`; raises all problems in one AdapterError."""
    problems = Problems(folder)
    config = read_peft_config(raw, problems)
    if problems.unsupported:
        problems.finish()
    tensors = _tensors(folder)
    problems.require(bool(tensors), f"{PEFT_FILE} has no tensors")
    stacks = Stacks(base)
    parts, say = _parts(tensors, base, stacks, problems)
    scaled = {path: _scaled(say(path), part, config, problems) for path, part in parts.items()}
    for path, part in scaled.items():
        check_part(path, part, base, problems)
        _check_config(path, part, config, (base, say), problems)
    _check_targets(scaled, config, (base, say), problems)
    scaled |= stacks.parts(config, say, problems)
    problems.finish()
    for path, part in scaled.items():
        check_base_weight(path, part, base, problems)
    problems.finish()
    _warn_of_base(raw.get("base_model_name_or_path"), base, problems)
    if raw.get("fan_in_fan_out"):
        problems.warnings.append("fan_in_fan_out has no meaning for this model's products: ignored")
    if config.ties_head and base.tied:
        scaled = with_tied_head(scaled, base)
    scaled = without_unchanged(scaled, base)
    return Adapter(folder.name, "PEFT", scaled, tuple(problems.warnings))


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / PEFT_FILE
    if not path.exists():
        if (pickle := folder / "adapter_model.bin").exists():
            raise UnsupportedError(PICKLE_REFUSED.format(pickle))
        raise AdapterError(f"{folder} has {CONFIG} of PEFT and no {PEFT_FILE}")
    return read_tensors(path)


def _parts(
    tensors: Mapping[str, Tensor], base: BaseModules, stacks: Stacks, problems: Problems
) -> tuple[dict[str, AdapterPart], Say]:
    """Every tensor is of a part, of a stack, or a problem."""
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    unknown, theirs = [], {}
    for name, tensor in tensors.items():
        stored = name.removeprefix(_PREFIX)
        ours = base.spec.rename(stored) or stored
        path, field = _split(ours)
        if field is not None and (path in base.norms or path in base.products):
            problems.require(field not in found[path], f"{path} has {field} more than once")
            found[path][field] = tensor
            theirs[path] = _split(stored)[0]
        elif not stacks.takes(path, field, tensor):
            unknown.append(stored)
    unknown_modules(unknown, base, problems)
    ordered = [path for path in (*base.products, *base.norms) if path in found]
    return {path: AdapterPart.of(found[path]) for path in ordered}, _naming(theirs, base)


def _naming(theirs: Mapping[str, str], base: BaseModules) -> Say:
    """From our paths to those that the adapter's tensors have, `theirs` being some of them."""
    ways = ((),) if base.spec.experts is None else base.spec.experts.modules
    fits = (way for way in ways if all(rewritten(p, way) == said for p, said in theirs.items()))
    return partial(rewritten, renames=next(fits, ways[0]))


def _split(name: str) -> tuple[str, str | None]:
    """A module's path, and which field of its part the tensor is."""
    for pattern, field in _NAMES.items():
        if match := re.fullmatch(rf"(.+?)\.{pattern}", name):
            return match[1], field
    return name, None


def _scaled(said: str, part: AdapterPart, config: PeftConfig, problems: Problems) -> AdapterPart:
    if part.a is None or part.a.dim() != 2:
        return part
    rank, expected = part.a.shape[0], config.rank_of(said)
    problems.require(rank == expected, f"{said}: A has rank {rank}, and {CONFIG} says {expected}")
    scale = config.scale_of(said, max(rank, 1))
    return AdapterPart.of(part.tensors, scale)


def _check_config(
    path: str,
    part: AdapterPart,
    config: PeftConfig,
    of: tuple[BaseModules, Say],
    problems: Problems,
) -> None:
    """What the config says against what is there."""
    base, say = of
    saved, has_lora = config.is_saved(say(path)), part.a is not None or part.b is not None
    targeted = path in base.products and config.is_target(path, base, say(path))
    problems.require(
        not has_lora or targeted or (config.ties_head and base.tied),
        f"{path} has A and B, and {CONFIG} does not target it",
    )
    problems.require(
        part.weight is None or saved or (config.ties_head and base.tied),
        f"{path} has a whole weight, and modules_to_save does not name it",
    )
    problems.require(
        not has_lora or part.weight is None, f"{path} has A and B beside a whole weight"
    )
    problems.require(
        (part.magnitude is not None) == (config.dora and has_lora),
        f"{path} has {'a' if part.magnitude is not None else 'no'} magnitude, and use_dora is "
        f"{str(config.dora).lower()}",
    )
    problems.require(
        (part.b_bias is not None) == (config.b_bias and has_lora),
        f"{path} has {'a' if part.b_bias is not None else 'no'} bias of B, and lora_bias is "
        f"{str(config.b_bias).lower()}",
    )
    problems.require(
        part.bias is None or saved or config.bias != "none",
        f"{path} has a bias, and bias is 'none'",
    )


def _check_targets(
    parts: Mapping[str, AdapterPart],
    config: PeftConfig,
    of: tuple[BaseModules, Say],
    problems: Problems,
) -> None:
    """Nothing that the config targets may be without tensors.

    Single experts count only where some have any: of stacks they are no modules, and no targets.
    """
    base, say = of
    products = base.products if any(p in base.singles for p in parts) else base.modules
    lacking = [
        path
        for path in products
        if config.is_target(path, base, say(path))
        and (path not in parts or parts[path].a is None)
        and not (path in parts and parts[path].b is not None)
    ]
    problems.require(
        not lacking, f"{CONFIG} targets modules without A and B: {listing(lacking, 8)}"
    )
    whole = [
        path
        for path in (*products, *base.norms)
        if config.is_saved(say(path)) and (path not in parts or parts[path].weight is None)
    ]
    problems.require(
        not whole, f"modules_to_save names modules without a weight: {listing(whole, 8)}"
    )


def _warn_of_base(said: Any, base: BaseModules, problems: Problems) -> None:
    """Only the last part of a name counts: copies lie in folders of all kinds."""
    if isinstance(said, str) and said and Path(said).name.lower() != Path(base.name).name.lower():
        problems.warnings.append(f"was made for {said}, and this is {base.name}")


def with_tied_head(parts: Mapping[str, AdapterPart], base: BaseModules) -> dict[str, AdapterPart]:
    """What an embedding's part does to the head that is tied to it, unless that has its own."""
    head, embedding = base.spec.head, base.spec.embedding
    part = parts.get(embedding)
    if part is None or head in parts:
        return dict(parts)
    if part.a is None or part.b is None:
        return {**parts, head: AdapterPart(weight=part.weight)}
    return {**parts, head: AdapterPart(part.b.T, part.a.T, part.scale)}
