"""`Weight`: what a `Linear` multiplies with, however it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starquill.kernels.matmul import dense_matmul, takes_dense
from starquill.quant.affine import AffineWeight
from starquill.quant.bands import each_expert, in_bands

Held = TypeVar("Held")


class Weight(Protocol):
    """A matrix `[out, in]` that can be multiplied with, looked up by row, or written out whole.

    Or a stack of them, `[E, out, in]`, which is multiplied with by `matmul_grouped`.
    """

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

    def matmul_grouped(self, x: Tensor, counts: Tensor, *, one: bool = False) -> Tensor:
        """Rows `x` `[N, in]` in the order of their experts, of which each has `counts` `[E]`.

        `one` says that they are single tokens of several sequences, so that each comes out the
        same in any company. Returns `[N, out]`.
        """
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Row lookup, as an embedding does: `[...] -> [..., in]`."""
        ...

    def dequantize(self) -> Tensor: ...


@dataclass(frozen=True)
class Computing:
    """How a model computes.

    `dtype` is that of activations. With `as_stored` dense matrices keep the dtype that they are
    stored in; without, they are converted once. `exact` keeps activations as they are in products
    with quantized weights.
    """

    dtype: torch.dtype = torch.float32
    as_stored: bool = False
    exact: bool = False


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A plain tensor `[out, in]` or `[E, out, in]`, in the dtype computed in or a narrower one.

    bfloat16 and float16 weights are multiplied with float32 activations in float32: half the
    memory, and for few rows half the time.
    """

    data: Tensor
    dtype: torch.dtype = torch.float32

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
        if takes_dense(self.data, x):
            return dense_matmul(self.data, x, bias)
        if self.data.dtype == self.dtype:
            return F.linear(x, self.data, bias)
        return in_bands(self.shape[0], x, bias, lambda start, end: self.data[start:end].to(x.dtype))

    def __getitem__(self, expert: int) -> DenseWeight:
        """A view of one expert."""
        return DenseWeight(self.data[expert], self.dtype)

    def matmul_grouped(self, x: Tensor, counts: Tensor, *, one: bool = False) -> Tensor:
        # The shape says which way to go: `[N, 1, in]` is a step of N sequences.
        between = 1 if one else 0

        def product(expert: int, rows: Tensor) -> Tensor:
            return self[expert].matmul(rows.unsqueeze(between)).squeeze(between)

        return each_expert(x, counts, self.shape[1], product)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.data).to(self.dtype)

    def dequantize(self) -> Tensor:
        return self.data.to(self.dtype)


@dataclass(frozen=True, eq=False)
class PermutedWeight:
    """A weight whose columns are in another order than its input: `y = W x[order]`.

    GPTQ's act-order needs it: groups are of inputs that matter alike, not of neighbours.
    """

    inner: AffineWeight
    order: Tensor

    def computing(self, dtype: torch.dtype, exact: bool) -> PermutedWeight:
        """The same weight, computing in `dtype`, exactly or not."""
        return replace(self, inner=self.inner.computing(dtype, exact))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def scheme(self) -> str:
        return f"{self.inner.scheme} (act-order)"

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.order.numel() * self.order.element_size()

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.inner.matmul(x[..., self.order], bias)

    def matmul_grouped(self, x: Tensor, counts: Tensor, *, one: bool = False) -> Tensor:
        return self.inner.matmul_grouped(x[..., self.order], counts, one=one)

    def rows(self, ids: Tensor) -> Tensor:
        return self._in_order(self.inner.rows(ids))

    def dequantize(self) -> Tensor:
        return self._in_order(self.inner.dequantize())

    def _in_order(self, columns: Tensor) -> Tensor:
        return columns[..., self.order.argsort()]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in a weight, or in anything else that is a dataclass or a tuple."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def moved(value: Held, device: str) -> Held:
    """The same with all its tensors on `device`."""
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.data.to(device), requires_grad=False)  # type: ignore[return-value]
    if isinstance(value, Tensor):
        return value.to(device)  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)  # type: ignore[return-value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    own = {field.name: getattr(value, field.name) for field in fields(value)}
    return replace(value, **{name: moved(part, device) for name, part in own.items()})
