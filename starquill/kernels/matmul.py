"""Products with quantized and two-byte matrices: the one door to the native kernels for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from starquill.kernels.native import FLOAT_TYPES, as_rows, is_float, native, serves
from starquill.kernels.program import empty, keep

# As in csrc/ops.h. Each row of x comes out the same in any company, but not the same both ways.
_ROWS, _BANDS, _EXACT = 0, 1, 2
# Rows of a matrix `[N, in]` from which on unpacking the weights once for all of them is faster.
_BANDS_FROM = 12


def way(x: Tensor, exact: bool) -> int:
    """How to go over `x`: by its shape alone, so that results do not depend on the batch.

    `[B, 1, in]`, a step of B sequences, goes row by row however many they are; `[B, T, in]`, a
    piece of a prompt, never does.
    """
    if exact:
        return _EXACT
    if x.dim() > 2:
        return _ROWS if x.shape[-2] == 1 else _BANDS
    return _ROWS if x.numel() < _BANDS_FROM * x.shape[-1] else _BANDS


class AffineKernel:
    """A matrix `[out, in]` of grouped affine integers, as the native kernels see it.

    Keeps the buffers; makes no copy. `packed` `[out, in·bits/8]` uint8, `scales` and `biases`
    `[out, in/group]` float16, bfloat16 or float32, all contiguous and on the CPU.
    """

    def __init__(self, packed: Tensor, scales: Tensor, biases: Tensor, bits: int, group: int):
        assert native is not None
        self._shape = (scales.shape[0], scales.shape[1] * group)
        self._native = native.Affine(packed, scales, biases, bits, group)
        self._bias: Tensor | None = None  # the last one, known to fit

    @property
    def handle(self) -> Any:
        """For native operations on several matrices."""
        return self._native

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def matmul(self, x: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
        """`[..., in] -> [..., out]` in x's dtype, computed in float32.

        Activations are rounded to int8 with a scale per group of inputs, so that an output is off
        by at most Σ_groups max|x|/254 · Σ|w|; `exact` keeps them as they are.
        NaN and infinity come through as NaN.
        """
        outputs, inputs = self._shape
        *lead, width = x.shape
        if width != inputs:
            raise ValueError(f"x {list(x.shape)} does not fit a weight {list(self._shape)}")
        rows = as_rows(x)
        if bias is not None and bias is not self._bias:
            if bias.shape != (outputs,):
                raise ValueError(f"bias {list(bias.shape)} does not fit a weight {outputs} high")
            bias = as_rows(bias)
            self._bias = bias
        out = empty((*lead, outputs))
        keep(self, bias)
        self._native.matmul_at(
            rows.data_ptr(),
            math.prod(lead),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            way(x, exact),
            torch.get_num_threads(),
        )
        return out if x.dtype is torch.float32 else out.to(x.dtype)

    def matmul_experts(self, x: Tensor, counts: Tensor, one: bool, exact: bool) -> Tensor:
        """The matrix as a stack of experts, each times its own rows of `x` `[N, in]`.

        `one` says that they come from a step of one token a sequence, as `[B, 1, in]` does.
        `counts` `[E]` int64 says how many rows each has; they lie in the experts' order. Returns
        `[N, out/E]` in x's dtype.
        """
        outputs, inputs = self._shape
        experts, rows = counts.numel(), as_rows(x)
        if x.shape[1] != inputs or int(counts.sum()) != x.shape[0]:
            raise ValueError(f"x {list(x.shape)} does not fit experts {list(self._shape)}")
        counts = counts.contiguous()
        out = torch.empty(x.shape[0], outputs // experts)
        self._native.experts_at(
            [rows.data_ptr(), counts.data_ptr(), 0, out.data_ptr()],
            [experts, x.shape[0]],
            _EXACT if exact else _ROWS if one else _BANDS,
            torch.get_num_threads(),
        )
        return out if x.dtype is torch.float32 else out.to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` int64 `[...]`, as `[..., in]` float32; IndexError for one not there."""
        ids = ids.contiguous()
        out = empty((*ids.shape, self._shape[1]))
        keep(self)
        self._native.rows_at(ids.data_ptr(), ids.numel(), out.data_ptr(), torch.get_num_threads())
        return out

    def dequantize(self) -> Tensor:
        """The matrix `[out, in]` in float32."""
        out = torch.empty(self._shape)
        self._native.dequantize(out, torch.get_num_threads())
        return out


# Rows of a matrix `[N, in]` from which on torch's float32 product wins over reading row by row.
_FEW_ROWS = 8


def takes_dense(weight: Tensor, x: Tensor) -> bool:
    """Whether `dense_matmul` is the way to multiply `weight` `[out, in]` with `x`."""
    few = x.shape[-2] == 1 if x.dim() > 2 else x.numel() <= _FEW_ROWS * x.shape[-1]
    return few and is_float(weight) and serves(weight) and serves(x) and is_float(x)


def dense_matmul(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """`weight` `[out, in]` times `x` `[..., in]`, both of any float type, in float32.

    Returns x's dtype. Each row of `x` comes out the same in any company.
    """
    assert native is not None
    outputs, inputs = weight.shape
    *lead, width = x.shape
    if width != inputs or (bias is not None and bias.shape != (outputs,)):
        raise ValueError(f"x {list(x.shape)} does not fit a weight {list(weight.shape)}")
    matrix, rows = weight.contiguous(), as_rows(x)
    float_bias = None if bias is None else as_rows(bias)
    bias_at = 0 if float_bias is None else float_bias.data_ptr()
    out = empty((*lead, outputs))
    keep(matrix, float_bias)
    native.dense_matmul_at(
        [
            matrix.data_ptr(),
            rows.data_ptr(),
            bias_at,
            out.data_ptr(),
        ],
        [outputs, inputs, math.prod(lead)],
        FLOAT_TYPES[weight.dtype],
        torch.get_num_threads(),
    )
    return out if x.dtype is torch.float32 else out.to(x.dtype)
