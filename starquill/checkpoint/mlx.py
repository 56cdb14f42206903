"""Checkpoints in MLX's affine layout: `PATH.weight` packed, with `PATH.scales` and `.biases`.

The layout is that of mlx-lm's `save`: see `quant.affine` for the bit stream; the settings are
`quantization` in config.json, with overrides by module path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from starquill.checkpoint.source import DenseSource, TensorInfo
from starquill.errors import CheckpointError, UnsupportedError, listing
from starquill.quant.affine import BITS, GROUPS, AffineWeight

# MLX's words; bytes where a row does not fill whole ones, which MLX cannot express.
_WORD = {"U32": 32, "U8": 8}


@dataclass(frozen=True)
class Packing:
    """How one module is stored."""

    bits: int
    group: int


class MlxSource:
    """Shows each packed triplet of a safetensors checkpoint as one quantized tensor."""

    def __init__(self, files: DenseSource, quantization: Mapping[str, Any]) -> None:
        self._files = files
        modules = {
            name.removesuffix(end)
            for name in files.infos
            for end in (".scales", ".biases")
            if name.endswith(end)
        }
        overrides = {k: v for k, v in quantization.items() if isinstance(v, Mapping | bool)}
        self._packings = _packings(files, modules, quantization, overrides)
        unused = sorted(k for k, v in overrides.items() if v is not False and k not in modules)
        self.warnings = [
            f"quantization in config.json names modules that are not quantized: {listing(unused)}"
        ] * bool(unused)
        hidden = {f"{m}.{part}" for m in modules for part in ("weight", "scales", "biases")}
        self.infos = {name: i for name, i in files.infos.items() if name not in hidden}
        for module, packing in self._packings.items():
            self.infos[f"{module}.weight"] = self._info(module, packing)

    def _info(self, module: str, packing: Packing) -> TensorInfo:
        scales = self._files.infos[f"{module}.scales"]
        shape = (*scales.shape[:-1], scales.shape[-1] * packing.group)
        parts = [self._files.infos[f"{module}.{p}"] for p in ("weight", "scales", "biases")]
        nbytes = sum(part.nbytes for part in parts)
        return TensorInfo(f"q{packing.bits}-g{packing.group}", shape, nbytes)

    def read(self, name: str) -> Tensor | AffineWeight:
        module = name.removesuffix(".weight")
        packing = self._packings.get(module) if name.endswith(".weight") else None
        if packing is None:
            return self._files.read(name)
        weight = self._files.map(f"{module}.weight")  # the kernels read it as it is stored
        scales, biases = (self._files.read(f"{module}.{part}") for part in ("scales", "biases"))
        packed = weight.view(torch.uint8)
        return AffineWeight(packed, scales, biases, packing.bits, packing.group)


def _packings(
    files: DenseSource,
    modules: set[str],
    quantization: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> dict[str, Packing]:
    """Bits and group of every module, checked against its tensors; all faults at once."""
    packings, problems = {}, []
    for module in sorted(modules):
        settings = overrides.get(module, {})
        if settings is False:
            problems.append(f"{module} has scales, but config.json says it is not quantized")
            continue
        merged = {**quantization, **(settings if isinstance(settings, Mapping) else {})}
        mode = merged.get("mode", "affine")
        if mode != "affine":
            raise UnsupportedError(f"{module} is quantized in mode {mode!r} (implemented: affine)")
        packing = Packing(merged.get("bits", 4), merged.get("group_size", 64))
        if problem := _problem(files, module, packing):
            problems.append(problem)
        packings[module] = packing
    if problems:
        raise CheckpointError(f"quantized tensors contradict config.json: {listing(problems)}")
    return packings


def _problem(files: DenseSource, module: str, packing: Packing) -> str | None:
    """Why `module`'s three tensors cannot be what `packing` says, or None."""
    parts = [files.infos.get(f"{module}.{part}") for part in ("weight", "scales", "biases")]
    absent = [p for p, i in zip(("weight", "scales", "biases"), parts, strict=True) if i is None]
    if absent:
        return f"{module} lacks {' and '.join(absent)}"
    weight, scales, biases = (part for part in parts if part is not None)
    if not all(isinstance(n, int) for n in (packing.bits, packing.group)) or (
        packing.bits not in BITS or packing.group not in GROUPS
    ):
        return f"{module} has {packing.bits} bits and group {packing.group}"
    if not all(info.shape for info in (weight, scales, biases)):
        return f"{module} has a part without rows"
    odd = [f"{i.dtype}" for i in (scales, biases) if i.dtype not in ("F16", "BF16", "F32")]
    if odd or weight.dtype not in _WORD:
        return f"{module} is stored as {', '.join([weight.dtype, *odd])}"
    words, groups = weight.shape[-1], scales.shape[-1]
    told = f"{packing.bits} bits and group {packing.group}"
    if words * _WORD[weight.dtype] != groups * packing.group * packing.bits:
        return f"{module} has {words} words and {groups} groups a row, which is not {told}"
    if scales.shape != biases.shape or scales.shape[:-1] != weight.shape[:-1]:
        return f"{module} has scales {list(scales.shape)} for weights {list(weight.shape)}"
    return None
