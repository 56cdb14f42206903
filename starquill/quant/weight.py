"""`Weight`: what a `Linear` multiplies with, however it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Weight(Protocol):
    """A matrix `[out, in]` that can be multiplied with, looked up by row, or written out whole."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def scheme(self) -> str:
        """How it is stored, for people: `float32`, `bfloat16`..."""
        ...

    @property
    def nbytes(self) -> int: ...

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[..., in] -> [..., out]`, plus `bias` `[out]`."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Row lookup, as an embedding does: `[...] -> [..., in]`."""
        ...

    def dequantize(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A plain tensor `[out, in]` in the dtype that is computed in."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def scheme(self) -> str:
        return str(self.data.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.data, bias)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.data)

    def dequantize(self) -> Tensor:
        return self.data
