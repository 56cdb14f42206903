"""Merging adapters into a model's weights, and writing the result as a checkpoint."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from starquill.adapters.adapter import BaseModules
from starquill.adapters.fitting import Part, fit
from starquill.adapters.opening import open_adapter
from starquill.checkpoint.build import build
from starquill.checkpoint.hub import locate, locate_adapter
from starquill.checkpoint.opening import Checkpoint, open_checkpoint
from starquill.checkpoint.source import Stored, TensorInfo
from starquill.checkpoint.stacked import piece_name, piece_of
from starquill.errors import AdapterError, BadRequestError, NumericsError
from starquill.isq import IsqPlan
from starquill.kernels.native import is_finite
from starquill.models.spec import ArchSpec
from starquill.nn.experts import ExpertLinear, OneExpert
from starquill.nn.linear import Embedding, Linear
from starquill.nn.lora import LoraPart, RowsPart
from starquill.nn.norm import NormPart
from starquill.quant.affine import AffineWeight
from starquill.quant.weight import Computing, DenseWeight, Weight
from starquill.quantizing import (
    OnProgress,
    QuantizeResult,
    QuantOptions,
    Reading,
    planned_bytes,
    write_checkpoint,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class MergeOptions:
    """How the merged weights are written.

    `dtype` `auto` keeps that of dense weights; weights that are quantized come out in float16.
    `quant` quantizes the result.
    """

    dtype: str = "auto"
    quant: QuantOptions | None = None


def merge_checkpoint(
    model: str | Path,
    adapters: Mapping[str, float],
    out: Path,
    options: MergeOptions = MergeOptions(),
    *,
    revision: str | None = None,
    on_progress: OnProgress | None = None,
) -> QuantizeResult:
    """Write `model` with `adapters` (paths or hub ids, each with its weight) merged into it.

    All of it or nothing. What no adapter changes is written as it is stored, so an adapter over a
    quantized model makes a mixture of both, unless `quant` says how all is to be. A head that is
    tied to the embedding becomes one of its own where an adapter changes one of the two.
    """
    if not adapters:
        raise BadRequestError("there is nothing to merge: name an adapter")
    if options.dtype not in ("auto", *DTYPES):
        raise BadRequestError(f"dtype is {options.dtype!r} (expected auto, {', '.join(DTYPES)})")
    checkpoint = open_checkpoint(locate(model, revision))
    computing = Computing(torch.float32, as_stored=True, exact=True)
    resident = planned_bytes(checkpoint, IsqPlan({}), computing)
    reading = Reading(checkpoint, IsqPlan({}), resident, resident, on_progress)
    built = build(
        checkpoint.spec, checkpoint.config, checkpoint.source, computing, on_read=reading.read
    )
    base = BaseModules.of(_Built(str(model), checkpoint.spec, built.model))
    parts: dict[str, list[tuple[Part, float]]] = {}
    for path, weight in adapters.items():
        for name, part in fit(open_adapter(locate_adapter(path), base), base).items():
            parts.setdefault(name, []).append((part, weight))
    source = MergedSource(checkpoint, base, parts, options)
    raw = dict(checkpoint.raw_config)
    if source.unties:
        raw["tie_word_embeddings"] = False
    merged = replace(
        checkpoint, source=source, raw_config=raw, config=checkpoint.spec.read_config(raw)
    )
    return write_checkpoint(merged, out, options.quant)


@dataclass(frozen=True, eq=False)
class _Built:
    """A model that adapters are read for."""

    name: str
    spec: ArchSpec
    model: Any
    dtype: torch.dtype = torch.float32


class MergedSource:
    """Shows the weights of a model with adapters in them, by our names; one at a time is made."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        base: BaseModules,
        parts: Mapping[str, Sequence[tuple[Part, float]]],
        options: MergeOptions,
    ) -> None:
        self.warnings: Sequence[str] = ()
        self._source, self._base, self._parts = checkpoint.source, base, parts
        self._experts: dict[str, list[str]] = defaultdict(list)  # of a stack, those that change
        for path in parts:
            if path in base.singles and (piece := piece_of(path)):
                self._experts[piece[0]].append(path)
        self._dtype, self._requantizes = options.dtype, options.quant is not None
        spec = checkpoint.spec
        self.unties = base.tied and any(path in parts for path in (spec.head, spec.embedding))
        self._stored = {spec.rename(name): name for name in checkpoint.source.infos}
        self.infos: dict[str, TensorInfo] = {}
        for name, stored in self._stored.items():
            if name is not None:
                self.infos[name] = self._info(name, checkpoint.source.infos[stored])
        for path in parts:
            self._check_bias(path)
        if self.unties:
            head = f"{spec.head}.weight"
            self.infos[head] = self._info(head, self.infos[f"{spec.embedding}.weight"])

    def read(self, name: str) -> Stored:
        path, _, field = name.rpartition(".")
        if path in self._base.norms and self._changes(path):
            return self._norm(path, field)
        if field == "bias" and self._changes_bias(path):
            return self._bias(path)
        if field == "weight" and (self._changes(path) or name not in self._stored):
            return self._converted(path)
        value = self._source.read(self._stored[name])
        if isinstance(value, Tensor) or (isinstance(value, AffineWeight) and not self._requantizes):
            return value
        return value.dequantize()

    def _info(self, name: str, info: TensorInfo) -> TensorInfo:
        """What is written for it; a whole plan to quantize needs all of it dense."""
        path, _, field = name.rpartition(".")
        count = math.prod(info.shape)
        is_norm = path in self._base.norms and self._changes(path)
        if is_norm or (field == "bias" and self._changes_bias(path)):
            return TensorInfo("F32", info.shape, count * 4)
        if field == "weight" and (self._changes(path) or name not in self._stored):
            dtype = self._dtype_of(path)
            return TensorInfo(_NAMES[dtype], info.shape, count * dtype.itemsize)
        if info.is_quantized and (self._requantizes or self._is_permuted(name)):
            return TensorInfo("F32", info.shape, count * 4)
        return info

    def _changes(self, path: str) -> bool:
        return path in self._parts or path in self._experts

    def _changes_bias(self, path: str) -> bool:
        if path in self._experts:
            return any(map(self._changes_bias, self._experts[path]))
        return any(
            isinstance(part, LoraPart)
            and (part.shift is not None or (part.whole is not None and part.whole[1] is not None))
            for part, _ in self._parts.get(path, ())
        )

    def _is_permuted(self, name: str) -> bool:
        path = name.rpartition(".")[0]
        module = self._base.modules.get(path)
        return module is not None and module.weight.scheme.endswith("(act-order)")

    def _dtype_of(self, path: str) -> torch.dtype:
        if self._dtype != "auto":
            return DTYPES[self._dtype]
        weight = self._holder(path).weight
        return weight.data.dtype if isinstance(weight, DenseWeight) else torch.float16

    def _holder(self, path: str) -> Linear | Embedding | ExpertLinear:
        return self._base.stacks[path] if path in self._experts else self._base.modules[path]

    def _converted(self, path: str) -> Tensor:
        converted = self._weight(path).to(self._dtype_of(path))
        if not is_finite(converted):
            raise NumericsError(
                f"merged, {path} has values that {str(converted.dtype).removeprefix('torch.')} "
                "cannot hold; use --dtype float32, or lower weights"
            )
        return converted

    def _weight(self, path: str) -> Tensor:
        """In float32."""
        if path not in self._experts:
            return self._merged(path, self._base.modules[path].weight)
        stack = self._base.stacks[path]
        whole = torch.empty(stack.weight.shape)
        for expert in range(len(whole)):
            whole[expert] = self._merged(piece_name(path, expert), OneExpert(stack, expert).weight)
        return whole

    def _merged(self, path: str, weight: Weight) -> Tensor:
        own = weight.dequantize().float()
        merged = own.clone()
        for part, share in self._parts.get(path, ()):
            merged += share * _added(part, own)
        return merged

    def _bias(self, path: str) -> Tensor:
        """`[out]`, of a stack `[E, out]`."""
        module = self._holder(path)
        assert not isinstance(module, Embedding)
        assert module.bias is not None
        merged = module.bias.data.float().clone()
        if path not in self._experts:
            return self._add_shifts(path, merged)
        for single in self._experts[path]:
            self._add_shifts(single, merged[self._base.singles[single].expert])
        return merged

    def _add_shifts(self, path: str, bias: Tensor) -> Tensor:
        own = bias.clone()
        for part, share in self._parts[path]:
            assert isinstance(part, LoraPart)
            if part.whole is not None and part.whole[1] is not None:
                bias += share * (part.whole[1].float() - own)
            elif part.shift is not None:
                bias += share * part.shift
        return bias

    def _norm(self, path: str, field: str) -> Tensor:
        merged: Tensor = getattr(self._base.norms[path], field).data.float().clone()
        for part, share in self._parts[path]:
            added = getattr(part, field)
            if added is not None:
                merged += share * added
        return merged

    def _check_bias(self, path: str) -> None:
        """A bias has no place where the model's own module has none."""
        module = self._base.products.get(path)
        if module is None or isinstance(module, Embedding):
            return
        if module.bias is None and self._changes_bias(path):
            raise AdapterError(
                f"{path} has no bias, and an adapter adds one: it cannot be merged; pick it by "
                "request instead"
            )


def _added(part: Part, own: Tensor) -> Tensor:
    """What a part adds to a weight `[out, in]`, or to an embedding's rows `[V, D]`."""
    assert not isinstance(part, NormPart)
    if isinstance(part, RowsPart):
        if part.whole is not None:
            return part.whole.dequantize().float() - own
        added = torch.zeros_like(own)
        if part.a is not None and part.b is not None:
            added = part.scale * (part.a.float() @ part.b.float().T)
        return added if part.gain is None else added + own * part.gain
    if part.whole is not None:
        return part.whole[0].dequantize().float() - own
    added = torch.zeros_like(own)
    if part.a is not None and part.b is not None:
        added = part.scale * (part.b.float().T @ part.a.float())
    return added if part.gain is None else added + part.gain[:, None] * own
