"""mlx-lm's adapters: `adapter_config.json` with `lora_parameters`, and `adapters.safetensors`.

Beside PEFT's, A and B are the other way round, the scale is as it stands, and an embedding's
adapter acts on the head that is tied to it too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from starquill.adapters.adapter import (
    CONFIG,
    MLX_FILE,
    Adapter,
    AdapterPart,
    BaseModules,
    Problems,
    check_part,
    read_tensors,
    unknown_modules,
    without_unchanged,
)
from starquill.adapters.peft import with_tied_head
from starquill.checkpoint.stacked import piece_name
from starquill.errors import AdapterError

_KINDS = ("lora", "dora", "full")
_FIELDS = {"lora_a": "a", "lora_b": "b", "m": "magnitude"}
_WHOLE = {"weight": "weight", "bias": "bias"}


def read_mlx(folder: Path, raw: Mapping[str, Any], base: BaseModules) -> Adapter:
    """Read a folder whose config is `raw`; raises all problems in one AdapterError."""
    problems = Problems(folder)
    kind = raw.get("fine_tune_type", "lora")
    if kind not in _KINDS:
        problems.unsupported.append(
            f"fine_tune_type {kind!r:.40} (implemented: {', '.join(_KINDS)})"
        )
        problems.finish()
    scale, rank = (1.0, None) if kind == "full" else _parameters(raw, problems)
    if not (folder / MLX_FILE).exists():
        raise AdapterError(f"{folder} has {CONFIG} of MLX and no {MLX_FILE}")
    parts = _parts(read_tensors(folder / MLX_FILE), kind, base, problems)
    problems.require(bool(parts) or bool(problems.found), f"{MLX_FILE} has no tensors")
    first = _first_layer(raw, base, problems)
    turned = {path: _turned(part, scale) for path, part in parts.items()}
    for path, part in turned.items():
        check_part(path, part, base, problems)
        _check_config(path, part, (kind, rank, first), base, problems)
    problems.finish()
    if raw.get("model") and Path(str(raw["model"])).name.lower() != Path(base.name).name.lower():
        problems.warnings.append(f"was made for {raw['model']}, and this is {base.name}")
    turned = without_unchanged(turned, base)
    if base.tied:
        turned = with_tied_head(turned, base)
    return Adapter(folder.name, "MLX", turned, tuple(problems.warnings))


def _parameters(raw: Mapping[str, Any], problems: Problems) -> tuple[float, int | None]:
    """The scale, and the rank if it is told."""
    said = raw.get("lora_parameters")
    if not isinstance(said, Mapping):
        problems.add(f"lora_parameters is {said!r:.40} (expected an object with rank and scale)")
        return 1.0, None
    scale, rank = said.get("scale"), said.get("rank")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) < 1e30:
        hint = "; MLX has no alpha" if "alpha" in said else ""
        problems.add(f"lora_parameters.scale is {scale!r:.40} (expected a number{hint})")
        scale = 1.0
    return float(scale), rank if isinstance(rank, int) else None


def _parts(
    tensors: Mapping[str, Tensor], kind: str, base: BaseModules, problems: Problems
) -> dict[str, AdapterPart]:
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    stacked: dict[str, dict[str, Tensor]] = defaultdict(dict)
    fields, unknown = _WHOLE if kind == "full" else _FIELDS, []
    for name, tensor in tensors.items():
        path, _, leaf = (base.spec.rename(name) or name).rpartition(".")
        known = path in base.modules or (kind == "full" and path in base.norms)
        if known and leaf in fields:
            found[path][fields[leaf]] = tensor
        elif path in base.stacks and leaf in fields and tensor.dim() > 1:
            stacked[path][fields[leaf]] = tensor
        else:
            unknown.append(name)
    unknown_modules(unknown, base, problems)
    for path, tensors_of_all in stacked.items():
        found.update(_by_expert(path, tensors_of_all, base, problems))
    ordered = [path for path in (*base.products, *base.norms) if path in found]
    return {path: AdapterPart.of(found[path]) for path in ordered}


def _by_expert(
    path: str, tensors: Mapping[str, Tensor], base: BaseModules, problems: Problems
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each expert's of a stack: A `[E, R, in]` and B `[E, out, R]` are not the other way round."""
    count = base.stacks[path].weight.shape[0]
    for field, tensor in tensors.items():
        if tensor.shape[0] != count or tensor.dim() != (2 if field == "bias" else 3):
            problems.add(f"{path}: {field} is {list(tensor.shape)} (expected {count} experts')")
            return
    for expert in range(count):
        own = {name: tensor[expert] for name, tensor in tensors.items()}
        turned = {name: one.T if name in ("a", "b") else one for name, one in own.items()}
        yield piece_name(path, expert), turned


def _turned(part: AdapterPart, scale: float) -> AdapterPart:
    """As PEFT has it: A `[R, in]`, B `[out, R]`; an embedding's are `[V, R]` and `[R, D]`."""
    turned = {
        name: tensor.T.contiguous() if name in ("a", "b") and tensor.dim() == 2 else tensor
        for name, tensor in part.tensors.items()
    }
    return AdapterPart.of(turned, scale)


def _first_layer(raw: Mapping[str, Any], base: BaseModules, problems: Problems) -> int:
    """`num_layers` counts from the end; 0 and less stand for all."""
    count = raw.get("num_layers", base.layers)
    if isinstance(count, bool) or not isinstance(count, int):
        problems.add(f"num_layers is {count!r:.40} (expected a whole number)")
        return 0
    return max(base.layers - count, 0) if count > 0 else 0


def _check_config(
    path: str,
    part: AdapterPart,
    said: tuple[str, int | None, int],
    base: BaseModules,
    problems: Problems,
) -> None:
    kind, rank, first = said
    layer = base.layer_of(path)
    problems.require(
        layer is None or layer >= first,
        f"{path} is in a layer before {first}, the first of the last ones that num_layers says",
    )
    if kind == "full":
        return
    if part.a is not None and part.a.dim() == 2 and rank is not None:
        found = part.a.shape[0]
        problems.require(found == rank, f"{path}: rank {found}, and lora_parameters says {rank}")
    problems.require(
        (part.magnitude is not None) == (kind == "dora"),
        f"{path} has {'no' if part.magnitude is None else 'an'} m, and fine_tune_type is {kind}",
    )
    if part.magnitude is not None and path == base.spec.embedding:
        problems.unsupported.append(f"DoRA on {path}, whose magnitudes MLX has by token")
