"""Products with quantized and two-byte matrices: the one door to the native kernels for them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from starquill.kernels.native import as_rows, native, serves


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
        out = torch.empty((*lead, outputs))
        self._native.matmul_at(
            rows.data_ptr(),
            math.prod(lead),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            exact,
            torch.get_num_threads(),
        )
        return out if x.dtype is torch.float32 else out.to(x.dtype)

    def matmul_experts(self, x: Tensor, counts: Tensor, exact: bool) -> Tensor:
        """The matrix as a stack of experts, each times its own rows of `x` `[N, in]`.

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
            exact,
            torch.get_num_threads(),
        )
        return out if x.dtype is torch.float32 else out.to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` int64 `[...]`, as `[..., in]` float32; IndexError for one not there."""
        ids = ids.contiguous()
        out = torch.empty((*ids.shape, self._shape[1]))
        self._native.rows_at(ids.data_ptr(), ids.numel(), out.data_ptr(), torch.get_num_threads())
        return out

    def dequantize(self) -> Tensor:
        """The matrix `[out, in]` in float32."""
        out = torch.empty(self._shape)
        self._native.dequantize(out, torch.get_num_threads())
        return out


# From this many rows on torch's float32 product wins over reading the weights row by row.
_FEW_ROWS = 8


def takes_dense(weight: Tensor, x: Tensor) -> bool:
    """Whether `dense_matmul` is the way to multiply a two-byte `weight` `[out, in]` with `x`."""
    few = x.numel() <= _FEW_ROWS * x.shape[-1]
    return few and serves(weight) and serves(x) and x.dtype is torch.float32


def dense_matmul(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """bfloat16 or float16 `weight` `[out, in]` times float32 `x` `[..., in]`, in float32."""
    assert native is not None
    outputs, inputs = weight.shape
    *lead, width = x.shape
    if width != inputs or (bias is not None and bias.shape != (outputs,)):
        raise ValueError(f"x {list(x.shape)} does not fit a weight {list(weight.shape)}")
    matrix, rows = weight.contiguous(), as_rows(x)
    float_bias = None if bias is None else as_rows(bias)
    bias_at = 0 if float_bias is None else float_bias.data_ptr()
    out = torch.empty((*lead, outputs))
    native.dense_matmul_at(
        [
            matrix.data_ptr(),
            rows.data_ptr(),
            bias_at,
            out.data_ptr(),
        ],
        [outputs, inputs, math.prod(lead)],
        weight.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return out
