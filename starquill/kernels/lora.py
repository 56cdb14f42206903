"""Low-rank products of many adapters at once: the one door to the native kernel for them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from starquill.kernels.native import FLOAT_TYPES, native, serves

# `LoraEntry` in csrc/kernels.h.
_ENTRY = struct.Struct("=5Q4q2id")


@dataclass(frozen=True, eq=False)
class LoraTerm:
    """What one adapter adds to rows `first` to `first + rows` of a product `y` `[N, out]`.

    `weight·(scale·(x Aᵀ) B + gain·(y - bias) + shift)`; `a` `[R, in]` and `b` `[R, out]` are
    float32, float16 or bfloat16, or both None; `gain` and `shift` `[out]` float32.
    `weights` float32 has one value for each row, `stride` apart, from `offset` on. All are
    contiguous.
    """

    first: int
    rows: int
    a: Tensor | None
    b: Tensor | None
    scale: float
    gain: Tensor | None
    shift: Tensor | None
    weights: Tensor
    offset: int = 0
    stride: int = 0

    def row_weights(self) -> Tensor:
        """`[rows]`."""
        at = self.offset + self.stride * torch.arange(self.rows)
        return self.weights.flatten()[at]


def takes(x: Tensor, terms: Iterable[LoraTerm]) -> bool:
    """Whether the native kernel can add `terms`: everything is on the CPU."""
    return serves(x) and all(
        part is None or serves(part)
        for term in terms
        for part in (term.a, term.b, term.gain, term.shift, term.weights)
    )


def pack(terms: Iterable[LoraTerm]) -> bytes:
    """`terms` as native code reads them; their tensors must outlive it.

    Terms of the same rows lie one behind the other; rows of others do not overlap with theirs.
    """
    return b"".join(_packed(term) for term in terms)


def _packed(term: LoraTerm) -> bytes:
    at = (_address(part) for part in (term.a, term.b, term.gain, term.shift))
    weights = term.weights.data_ptr() + 4 * term.offset
    rank = 0 if term.a is None else term.a.shape[0]
    types = (0 if part is None else FLOAT_TYPES[part.dtype] for part in (term.a, term.b))
    return _ENTRY.pack(*at, weights, term.stride, term.first, term.rows, rank, *types, term.scale)


def _address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def add_packed(y: Tensor, x: Tensor, bias: Tensor | None, packed: bytes) -> None:
    """Add what was packed to `y` `[..., out]`, for `x` `[..., in]`; `bias` is `y`'s, `[out]`.

    All contiguous float32. Each row comes out the same in any company.
    """
    assert native is not None
    native.lora_at(
        [x.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr()],
        [x.shape[-1], y.shape[-1]],
        packed,
        torch.get_num_threads(),
    )
