"""Grouped affine quantization: `w = scale·q + bias`, q of 2 to 8 bits, one scale per group.

The layout is MLX's: a row is one stream of bits, least significant first, so element k takes
bits k·b to k·b+b of it. Groups run along the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from starquill.kernels.matmul import AffineKernel
from starquill.kernels.memory import for_weights
from starquill.kernels.native import serves
from starquill.quant.bands import each_expert, in_bands

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (16, 32, 64, 128)


def pack(q: Tensor, bits: int) -> Tensor:
    """Integers `[..., in]` uint8 below 2^bits to a bit stream `[..., in·bits/8]` uint8.

    `in` is a multiple of 8: eight values fill `bits` whole bytes.
    """
    words = q.unflatten(-1, (-1, 8)).to(torch.int64)
    shifts = torch.arange(8, device=q.device) * bits
    word = (words << shifts).sum(-1, keepdim=True)  # [..., in/8, 1]
    places = torch.arange(bits, device=q.device) * 8
    return ((word >> places) & 0xFF).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The integers of `pack`, `[..., in]` uint8."""
    places = torch.arange(bits, device=packed.device) * 8
    octets = packed.unflatten(-1, (-1, bits)).to(torch.int64)
    word = (octets << places).sum(-1, keepdim=True)  # [..., in/8, 1]
    shifts = torch.arange(8, device=packed.device) * bits
    return ((word >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


@dataclass(frozen=True, eq=False)
class AffineWeight:
    """A quantized matrix `[out, in]` or stack of matrices `[E, out, in]`.

    `packed` `[..., out, in·bits/8]` uint8; `scales` and `biases` `[..., out, in/group]` of any
    floating type. `dtype` is what it is dequantized to and multiplied in. On the CPU products
    round activations to int8 for each group, unless `exact` (see `kernels.matmul`).
    """

    packed: Tensor
    scales: Tensor
    biases: Tensor
    bits: int
    group: int
    dtype: torch.dtype = torch.float32
    exact: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group)

    @property
    def scheme(self) -> str:
        return f"q{self.bits}-g{self.group}"

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.packed, self.scales, self.biases))

    def computing(self, dtype: torch.dtype, exact: bool) -> AffineWeight:
        """The same weight, computing in `dtype`, exactly or not."""
        return replace(self, dtype=dtype, exact=exact)

    def __getitem__(self, index: int | slice | Tensor) -> AffineWeight:
        """A view of some experts or rows."""
        parts = (self.packed[index], self.scales[index], self.biases[index])
        return AffineWeight(*parts, self.bits, self.group, self.dtype, self.exact)

    def of_height(self, lead: tuple[int, ...]) -> AffineWeight:
        """The same rows as a matrix `[out]` high, or as a stack of `[E, out]`."""
        parts = (part.reshape(*lead, -1) for part in (self.packed, self.scales, self.biases))
        packed, scales, biases = parts
        return replace(self, packed=packed, scales=scales, biases=biases)

    def integers(self) -> Tensor:
        return unpack(self.packed, self.bits)

    @cached_property
    def _kernel(self) -> AffineKernel | None:
        """The matrix, or a stack of experts one behind the other."""
        if not serves(self.packed):
            return None
        dtype = torch.promote_types(self.scales.dtype, self.biases.dtype)
        packed, scales, biases = (
            part.flatten(0, -2).contiguous()
            for part in (self.packed, self.scales.to(dtype), self.biases.to(dtype))
        )
        return AffineKernel(packed, scales, biases, self.bits, self.group)

    @property
    def rounding(self) -> AffineKernel | None:
        """The native matrix, or stack, where products round activations; None where they do not."""
        return None if self.exact else self._kernel

    def dequantize(self) -> Tensor:
        if self._kernel is not None:
            return self._kernel.dequantize().view(self.shape).to(self.dtype)
        q = self.integers().unflatten(-1, (-1, self.group)).float()
        values = q * self.scales.float()[..., None] + self.biases.float()[..., None]
        return values.flatten(-2).to(self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        if self._kernel is not None and ids.dtype is torch.int64:
            return self._kernel.rows(ids).to(self.dtype)
        return self[ids.flatten()].dequantize().unflatten(0, ids.shape)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`[..., in] -> [..., out]`."""
        if self._kernel is not None and serves(x):
            return self._kernel.matmul(x, bias, self.exact)
        return self._in_bands(x, bias)

    def _in_bands(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product in plain torch."""
        return in_bands(self.shape[0], x, bias, lambda start, end: self[start:end].dequantize())

    def matmul_experts(self, x: Tensor, experts: Tensor, *, one: bool = False) -> Tensor:
        """Each row of `x` `[N, in]` times the matrix of its expert, `experts` `[N]` int64.

        Of a stack `[E, out, in]`; see `matmul_grouped`. Returns `[N, out]`.
        """
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=self.shape[0])
        y = self.matmul_grouped(x[order], counts, one=one)
        return torch.empty_like(y).index_copy_(0, order, y)

    def matmul_grouped(self, x: Tensor, counts: Tensor, *, one: bool = False) -> Tensor:
        """Rows `x` `[N, in]` in the order of their experts, of which each has `counts` `[E]`.

        Of a stack `[E, out, in]`: weights are read where they lie, and only those of experts with
        rows. `one` is for rows that are single tokens of several sequences (see
        `kernels.matmul`). Returns `[N, out]`.
        """
        if self._kernel is not None and serves(x):
            return self._kernel.matmul_experts(x, counts, one, self.exact)
        return each_expert(x, counts, self.shape[1], lambda e, rows: self[e].matmul(rows))


def stack(experts: Sequence[AffineWeight]) -> AffineWeight:
    """Matrices of one shape and packing, `[out, in]`, as `[E, out, in]`."""
    packed, scales, biases = (
        _stacked(parts)
        for parts in zip(*((e.packed, e.scales, e.biases) for e in experts), strict=True)
    )
    return replace(experts[0], packed=packed, scales=scales, biases=biases)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    wide = reduce(torch.promote_types, (part.dtype for part in parts))
    if not all(part.is_cpu for part in parts):
        return torch.stack([part.to(wide) for part in parts])
    whole = for_weights((len(parts), *parts[0].shape), wide)
    return torch.stack([part.to(wide) for part in parts], out=whole)
