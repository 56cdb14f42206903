"""Experts that are stored one by one, or two stacks in one, shown as the stacks that we hold."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from starquill.checkpoint.source import SafetensorsSource, Stored, TensorInfo, WeightSource
from starquill.errors import UnsupportedError
from starquill.models.spec import ArchSpec
from starquill.quant.affine import AffineWeight
from starquill.quant.weight import PermutedWeight

_PIECE = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_FUSED = ".experts.gate_up_proj."
_HALVES = (".experts.gate_proj.", ".experts.up_proj.")


def piece_of(name: str) -> tuple[str, int] | None:
    """The stack that a single expert's tensor belongs to, and the expert's number."""
    match = _PIECE.fullmatch(name)
    return (f"{match[1]}.{match[3]}", int(match[2])) if match else None


def piece_name(stack: str, expert: int) -> str:
    """What an expert's part of `stack` is called where it is stored by itself."""
    return stack.replace(".experts.", f".experts.{expert}.", 1)


@dataclass(frozen=True)
class _Half:
    """The first or second half of the rows of each expert."""

    whole: str
    second: bool


class StackedSource:
    """Shows the tensors of `source` with every whole stack of experts as one tensor.

    A stack is whole if all of `count` experts are there and no other, in one shape and type. Those
    that are not are shown as they are stored, for `build` to say what is wrong.
    """

    def __init__(self, source: WeightSource, spec: ArchSpec, count: int) -> None:
        self._source = source
        self.warnings: Sequence[str] = source.warnings
        ours = {spec.rename(name) or name: name for name in source.infos}
        self._stacks: dict[str, list[str]] = {}
        self._halves: dict[str, _Half] = {}
        self.infos = dict(source.infos)
        for stack, pieces in _pieces(ours, count).items():
            infos = [source.infos[name] for name in pieces]
            if stack not in ours and len({(i.dtype, i.shape) for i in infos}) == 1:
                self._stacks[stack] = pieces
                nbytes = sum(info.nbytes for info in infos)
                self._show(stack, pieces, TensorInfo(infos[0].dtype, infos[0].shape, nbytes))
        for name, stored in ours.items():
            if _FUSED in name and len(source.infos[stored].shape) == 3:
                self._show_halves(name, stored)

    def _show(self, stack: str, pieces: Sequence[str], one: TensorInfo) -> None:
        for name in pieces:
            del self.infos[name]
        self.infos[stack] = replace(one, shape=(len(pieces), *one.shape))

    def _show_halves(self, name: str, stored: str) -> None:
        info = self.infos.pop(stored)
        experts, rows, width = info.shape
        for number, half in enumerate(_HALVES):
            ours = name.replace(_FUSED, half)
            self._halves[ours] = _Half(stored, second=number == 1)
            shape = (experts, rows // 2, width)
            self.infos[ours] = TensorInfo(info.dtype, shape, info.nbytes // 2)

    def read(self, name: str) -> Stored:
        """A stack is filled expert by expert: beside it, one expert is in memory."""
        if name in self._stacks:
            return self._stack(name)
        if name in self._halves:
            return self._half(self._halves[name])
        return self._source.read(name)

    def _stack(self, name: str) -> Tensor | AffineWeight:
        pieces = self._stacks[name]
        first = self._source.read(pieces[0])
        if isinstance(first, PermutedWeight):
            raise UnsupportedError(f"{name}: experts with GPTQ's act-order are not implemented")
        filled = _Filled(first, len(pieces))
        for number, piece in enumerate(pieces[1:], start=1):
            filled.put(number, self._source.read(piece))
        return filled.result()

    def _half(self, half: _Half) -> Tensor | AffineWeight:
        if isinstance(self._source, SafetensorsSource):
            whole: Stored = self._source.map(half.whole)  # only this half of it gets copied
        else:
            whole = self._source.read(half.whole)
        if isinstance(whole, Tensor):
            return whole.chunk(2, dim=1)[half.second].clone()
        assert isinstance(whole, AffineWeight), "GPTQ has no stacks"
        parts = (whole.packed, whole.scales, whole.biases)
        packed, scales, biases = (p.chunk(2, dim=1)[half.second].clone() for p in parts)
        return replace(whole, packed=packed, scales=scales, biases=biases)


class _Filled:
    """A stack in the making, of tensors or of quantized weights."""

    def __init__(self, first: Tensor | AffineWeight, count: int) -> None:
        self._first = first
        self._parts = [part.new_empty((count, *part.shape)) for part in _parts(first)]
        self.put(0, first)

    def put(self, number: int, value: Stored) -> None:
        assert not isinstance(value, PermutedWeight), "of one checkpoint all are alike"
        for place, part in enumerate(_parts(value)):
            whole = self._parts[place]
            # One expert may have wider scales than those before it.
            wider = torch.promote_types(whole.dtype, part.dtype)
            if wider != whole.dtype:
                whole = self._parts[place] = whole.to(wider)
            whole[number] = part

    def result(self) -> Tensor | AffineWeight:
        if isinstance(self._first, Tensor):
            return self._parts[0]
        packed, scales, biases = self._parts
        return replace(self._first, packed=packed, scales=scales, biases=biases)


def _parts(value: Tensor | AffineWeight) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else (value.packed, value.scales, value.biases)


def _pieces(ours: Mapping[str, str], count: int) -> dict[str, list[str]]:
    """The stored names of the experts of each stack, in order; only where all are there."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for name, stored in ours.items():
        if piece := piece_of(name):
            found[piece[0]][piece[1]] = stored
    return {
        stack: [pieces[e] for e in range(count)]
        for stack, pieces in found.items()
        if pieces.keys() == set(range(count))
    }
