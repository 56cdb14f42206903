"""Checkpoints quantized by GPTQ or AWQ: the same integers, in our layout.

Layouts as AutoGPTQ/GPTQModel and AutoAWQ write them. Both pack along the output or input into
int32 and keep a zero point per group: `w = scale·(q - zero)`, so `bias = -scale·zero`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from starquill.checkpoint.source import DenseSource, TensorInfo
from starquill.errors import CheckpointError, UnsupportedError, listing
from starquill.quant.affine import GROUPS, AffineWeight, pack, unpack
from starquill.quant.weight import PermutedWeight

_PARTS = ("qweight", "qzeros", "scales")
# AWQ's order of the eight nibbles of an int32: nibble k holds column _AWQ_ORDER[k].
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Method:
    """What `quantization_config` says."""

    name: str
    bits: int
    group: int
    zero_offset: int

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Method:
        name = settings.get("quant_method")
        bits = settings.get("bits", settings.get("w_bit"))
        group = settings.get("group_size", settings.get("q_group_size"))
        if name == "gptq" and bits in (2, 3, 4, 8):
            v2 = settings.get("checkpoint_format") == "gptq_v2"
            return cls(name, bits, _group(group), 0 if v2 else 1)
        version = str(settings.get("version", "gemm")).lower()
        if name == "awq" and bits == 4 and version == "gemm":
            return cls(name, bits, _group(group), 0)
        raise UnsupportedError(
            f"quantization_config is {name!r} of {bits} bits (implemented: gptq of 2, 3, 4, 8 "
            "bits, awq of 4 bits in gemm form, MLX's affine layout)"
        )


def _group(size: object) -> int:
    if size == -1:
        return -1  # one group for the whole input
    if size in GROUPS and isinstance(size, int):
        return size
    raise UnsupportedError(f"group_size {size!r} (implemented: {', '.join(map(str, GROUPS))}, -1)")


class PrequantizedSource:
    """Shows each packed module of a GPTQ or AWQ checkpoint as one quantized tensor."""

    def __init__(self, files: DenseSource, settings: Mapping[str, Any]) -> None:
        self._files = files
        self._method = Method.read(settings)
        self.warnings: tuple[str, ...] = ()
        self._modules = {
            name.removesuffix(".qweight") for name in files.infos if name.endswith(".qweight")
        }
        hidden = {f"{m}.{part}" for m in self._modules for part in (*_PARTS, "g_idx")}
        self.infos = {name: info for name, info in files.infos.items() if name not in hidden}
        problems = []
        for module in sorted(self._modules):
            try:
                self.infos[f"{module}.weight"] = self._info(module)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError(f"quantized tensors do not fit together: {listing(problems)}")

    def _info(self, module: str) -> TensorInfo:
        parts = {part: self._files.infos.get(f"{module}.{part}") for part in _PARTS}
        absent = [part for part, info in parts.items() if info is None]
        if absent:
            raise CheckpointError(f"{module} lacks {' and '.join(absent)}")
        shapes = {part: info.shape for part, info in parts.items() if info is not None}
        bits = self._method.bits
        rows, columns = shapes["qweight"]
        if self._method.name == "gptq":
            width, out = rows * 32 // bits, columns
        else:
            width, out = rows, columns * 32 // bits
        groups = 1 if self._method.group == -1 else width // self._method.group
        expected = {"qzeros": (groups, out * bits // 32), "scales": (groups, out)}
        wrong = [f"{p} {list(shapes[p])}" for p, shape in expected.items() if shapes[p] != shape]
        if wrong:
            raise CheckpointError(f"{module} has {', '.join(wrong)} for {out} x {width} weights")
        nbytes = sum(info.nbytes for info in parts.values() if info is not None)
        return TensorInfo(f"q{bits}-g{self._group_of(width)}", (out, width), nbytes)

    def _group_of(self, width: int) -> int:
        """The stored group, or for one group a row the largest of ours that divides it."""
        if self._method.group != -1:
            return self._method.group
        fitting = [group for group in GROUPS if width % group == 0]
        if not fitting:
            raise CheckpointError(f"no group divides a width of {width}")
        return max(fitting)

    def read(self, name: str) -> Tensor | AffineWeight | PermutedWeight:
        module = name.removesuffix(".weight")
        if module not in self._modules or not name.endswith(".weight"):
            return self._files.read(name)
        qweight, qzeros, scales = (self._files.read(f"{module}.{part}") for part in _PARTS)
        if self._method.name == "gptq":
            q = _along_rows(qweight, self._method.bits)  # [out, in]
            zeros = _along_columns(qzeros, self._method.bits)  # [groups, out]
        else:
            q = _awq_columns(qweight).T.contiguous()
            zeros = _awq_columns(qzeros)
        bias = -scales.float() * (zeros.float() + self._method.zero_offset)
        width = q.shape[1]
        group = self._group_of(width)
        repeat = width // group // len(scales)
        scale_rows = scales.T.repeat_interleave(repeat, 1)
        bias_rows = bias.T.repeat_interleave(repeat, 1)
        order = self._order(module, width)
        if order is not None:
            q = q[:, order]
        halves = bias_rows.half()
        exact = torch.equal(halves.float(), bias_rows)
        weight = AffineWeight(
            pack(q, self._method.bits),
            scale_rows.contiguous(),
            (halves if exact else bias_rows).contiguous(),
            self._method.bits,
            group,
        )
        return weight if order is None else PermutedWeight(weight, order)

    def _order(self, module: str, width: int) -> Tensor | None:
        """Act-order: which input comes where so that groups are contiguous; None if they are."""
        name = f"{module}.g_idx"
        if name not in self._files.infos or self._method.group == -1:
            return None
        groups = self._files.read(name).long()
        plain = torch.arange(width) // self._method.group
        if torch.equal(groups, plain):
            return None
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order], plain):
            raise CheckpointError(f"{name} does not put {self._method.group} inputs in each group")
        return order


def _along_rows(packed: Tensor, bits: int) -> Tensor:
    """int32 `[in·bits/32, out]`, each column one bit stream, as integers `[out, in]`."""
    return unpack(packed.T.contiguous().view(torch.uint8), bits)


def _along_columns(packed: Tensor, bits: int) -> Tensor:
    """int32 `[groups, out·bits/32]`, each row one bit stream, as integers `[groups, out]`."""
    return unpack(packed.contiguous().view(torch.uint8), bits)


def _awq_columns(packed: Tensor) -> Tensor:
    """int32 `[rows, out/8]` in AWQ's order of nibbles, as integers `[rows, out]`."""
    nibbles = _along_columns(packed, 4).unflatten(1, (-1, 8))
    result = torch.empty_like(nibbles)
    result[..., list(_AWQ_ORDER)] = nibbles
    return result.flatten(1)
