"""Experts: the MLPs of other checkpoints, or of the base with a LoRA, read matrix by matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from starquill.adapters.adapter import BaseModules, is_adapter
from starquill.adapters.fitting import fit
from starquill.adapters.opening import open_adapter
from starquill.checkpoint.build import build, renamed
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import Checkpoint, open_checkpoint
from starquill.checkpoint.source import Stored
from starquill.errors import AdapterError, CheckpointError, UnsupportedError, listing
from starquill.kernels.native import is_finite
from starquill.models.causal import PlainMlp
from starquill.models.spec import ArchSpec
from starquill.models.starcoder2 import Starcoder2Config
from starquill.nn.linear import Linear
from starquill.nn.lora import LoraPart
from starquill.quant.affine import AffineWeight
from starquill.quant.weight import Computing, DenseWeight, PermutedWeight

MATRICES = ("c_fc", "c_proj")
_SAME = ("num_hidden_layers", "hidden_size", "intermediate_size", "hidden_act", "use_bias")


@dataclass(frozen=True, eq=False)
class Part:
    """A matrix of an MLP as it is stored, and its bias."""

    weight: Tensor | AffineWeight
    bias: Tensor | None

    def dense(self) -> Tensor:
        return self.weight if isinstance(self.weight, Tensor) else self.weight.dequantize()


class Expert(Protocol):
    """The MLPs of one expert."""

    @property
    def name(self) -> str: ...

    def read(self, layer: int, matrix: str) -> Part:
        """`matrix` is one of `MATRICES`."""
        ...


@dataclass(frozen=True, eq=False)
class Whole:
    """An expert that is a checkpoint."""

    name: str
    checkpoint: Checkpoint
    names: Mapping[str, str]  # ours -> the checkpoint's

    def read(self, layer: int, matrix: str) -> Part:
        path = mlp_path(self.checkpoint.spec, layer, matrix)
        weight = plain(self._tensor(f"{path}.weight"))
        bias = self._tensor(f"{path}.bias") if f"{path}.bias" in self.names else None
        return Part(weight, bias if isinstance(bias, Tensor) else None)

    def _tensor(self, ours: str) -> Stored:
        value = self.checkpoint.source.read(self.names[ours])
        for tensor in _tensors(value):
            if not is_finite(tensor):
                raise CheckpointError(
                    f"expert {self.name}: {ours} has values that are not finite: the file is "
                    "damaged"
                )
        return value


@dataclass(frozen=True, eq=False)
class Adapted:
    """An expert that is a LoRA over the base's MLPs."""

    name: str
    base: Whole
    parts: Mapping[str, LoraPart]
    warnings: tuple[str, ...] = ()

    def part(self, layer: int, matrix: str) -> LoraPart | None:
        return self.parts.get(mlp_path(self.base.checkpoint.spec, layer, matrix))

    def read(self, layer: int, matrix: str) -> Part:
        own, lora = self.base.read(layer, matrix), self.part(layer, matrix)
        return own if lora is None else merged(own, lora)


def mlp_path(spec: ArchSpec, layer: int, matrix: str) -> str:
    return f"{spec.layer_prefix}{layer}.mlp.{matrix}"


def plain(value: Stored) -> Tensor | AffineWeight:
    """What can be written: GPTQ's order of columns cannot, so such a weight becomes dense."""
    return value.dequantize() if isinstance(value, PermutedWeight) else value


def _tensors(value: Stored) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    inner = value.inner if isinstance(value, PermutedWeight) else value
    return (inner.scales, inner.biases)


def merged(own: Part, lora: LoraPart) -> Part:
    """`own` with what a LoRA adds, in the type that it is stored in; float32 if quantized."""
    if lora.whole is not None:
        weight, whole_bias = lora.whole
        return Part(weight.dequantize(), whole_bias)
    kept = own.weight.dtype if isinstance(own.weight, Tensor) else torch.float32
    weight32, bias = own.dense().float(), own.bias
    changed = weight32 if lora.gain is None else weight32 * (1 + lora.gain)[:, None]
    if lora.a is not None and lora.b is not None:
        changed = changed + lora.scale * (lora.b.float().T @ lora.a.float())
    if lora.shift is not None:
        shifted = lora.shift if bias is None else bias.float() + lora.shift
        bias = shifted if bias is None else shifted.to(bias.dtype)
    return Part(changed.to(kept), bias)


@dataclass(frozen=True, eq=False)
class Base:
    """The base model, built, and its checkpoint; as `adapters` want to see a model too."""

    checkpoint: Checkpoint
    model: Any
    whole: Whole
    name: str

    @property
    def spec(self) -> ArchSpec:
        return self.checkpoint.spec

    @property
    def config(self) -> Starcoder2Config:
        config = self.checkpoint.config
        assert isinstance(config, Starcoder2Config)
        return config

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32


def open_base(model: str | Path) -> Base:
    """Read the base model into memory, its weights as they are stored."""
    checkpoint = open_checkpoint(locate(model))
    if checkpoint.spec.model_type != "starcoder2":
        raise UnsupportedError(
            f"{model} is a {checkpoint.spec.model_type} model (a mixture is made of starcoder2)"
        )
    if checkpoint.tokenizer is None:
        raise UnsupportedError(f"{checkpoint.folder} has no tokenizer.json to read prompts with")
    computing = Computing(torch.float32, as_stored=True)
    built = build(checkpoint.spec, checkpoint.config, checkpoint.source, computing)
    names = renamed(checkpoint.spec, checkpoint.source.infos)
    return Base(checkpoint, built.model, Whole("base", checkpoint, names), str(model))


def open_experts(
    base: Base, experts: Mapping[str, str | Path], layers: Sequence[int]
) -> tuple[Expert, ...]:
    """The base's own MLPs and then `experts`, each a checkpoint or a LoRA's folder."""
    found: list[Expert] = [base.whole]
    for name, path in experts.items():
        folder = Path(path).expanduser()
        if folder.is_dir() and is_adapter(folder):
            found.append(_open_adapted(base, name, folder, layers))
        else:
            found.append(_open_whole(base, name, path, layers))
    return tuple(found)


def _open_adapted(base: Base, name: str, folder: Path, layers: Sequence[int]) -> Adapted:
    modules = BaseModules.of(base)
    adapter = open_adapter(folder, modules)
    wanted = {mlp_path(base.spec, layer, m) for layer in layers for m in MATRICES}
    parts = {p: part for p, part in fit(adapter, modules).items() if p in wanted}
    loras = {path: part for path, part in parts.items() if isinstance(part, LoraPart)}
    if not loras:
        raise AdapterError(
            f"expert {name}: {folder} changes no MLP of the layers that become mixtures "
            f"({listing(sorted({p.rpartition('.')[2] for p in adapter.parts}))} alone)"
        )
    left = sum(".mlp." not in path for path in adapter.parts)
    warnings = (
        (f"expert {name}: of its LoRA only MLPs count; {left} other modules are left out",)
        if left
        else ()
    )
    return Adapted(name, base.whole, loras, warnings)


def _open_whole(base: Base, name: str, path: str | Path, layers: Sequence[int]) -> Whole:
    """Only what the file says is read here, and held against the base."""
    checkpoint = open_checkpoint(locate(path))
    spec = checkpoint.spec
    if spec.model_type != base.spec.model_type:
        raise CheckpointError(
            f"expert {name}: {path} is a {spec.model_type} model (expected {base.spec.model_type})"
        )
    if differ := [
        f"{key} {getattr(checkpoint.config, key)} (expected {getattr(base.config, key)})"
        for key in _SAME
        if getattr(checkpoint.config, key) != getattr(base.config, key)
    ]:
        raise CheckpointError(
            f"expert {name}: {path} is not of the base's shape: {', '.join(differ)}"
        )
    names = renamed(spec, checkpoint.source.infos)
    problems = []
    kinds = ("weight", "bias") if base.config.use_bias else ("weight",)
    for layer in layers:
        for matrix in MATRICES:
            out, width = _shape(base.config, matrix)
            for kind in kinds:
                ours = f"{mlp_path(spec, layer, matrix)}.{kind}"
                shape = (out, width) if kind == "weight" else (out,)
                if ours not in names:
                    problems.append(f"{ours} is missing")
                elif checkpoint.source.infos[names[ours]].shape != shape:
                    shown = list(checkpoint.source.infos[names[ours]].shape)
                    problems.append(f"{ours} is {shown} (expected {list(shape)})")
    if problems:
        raise CheckpointError(f"expert {name}: {path}: {listing(problems, 4)}")
    return Whole(name, checkpoint, names)


def _shape(config: Starcoder2Config, matrix: str) -> tuple[int, int]:
    outer, inner = config.hidden_size, config.intermediate_size
    return (inner, outer) if matrix == "c_fc" else (outer, inner)


def mlp_of(expert: Expert, config: Starcoder2Config, layer: int) -> PlainMlp:
    """An expert's MLP of one layer, to compute with."""
    mlp = PlainMlp(config)
    for matrix in MATRICES:
        part, linear = expert.read(layer, matrix), mlp.get_submodule(matrix)
        assert isinstance(linear, Linear)
        weight = part.weight
        linear.weight = (
            DenseWeight(weight) if isinstance(weight, Tensor)
            else weight.computing(torch.float32, False)
        )  # fmt: skip
        bias = None if part.bias is None else part.bias.float()
        linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return mlp
