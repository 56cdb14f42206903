"""From what an adapter holds to what its modules compute with: done once, when it is loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from starquill.adapters.adapter import Adapter, AdapterPart, BaseModules, Norm, bias_of
from starquill.errors import AdapterError
from starquill.nn.experts import OneExpert
from starquill.nn.linear import Embedding, Linear
from starquill.nn.lora import LoraPart, RowsPart
from starquill.nn.norm import NormPart
from starquill.quant.weight import DenseWeight, Weight, tensors_of

Part = LoraPart | RowsPart | NormPart
_BAND = 1024  # rows of a weight that are written out at once


@torch.inference_mode()
def fit(adapter: Adapter, base: BaseModules) -> dict[str, Part]:
    """The part of every module that the adapter changes.

    DoRA's norms are taken here, of the weights as they are now. Modules that are in another process
    are left out.
    """
    fitted: dict[str, Part] = {}
    for path, part in adapter.parts.items():
        if not base.is_here(path):
            continue
        if path in base.norms:
            fitted[path] = _fit_norm(part, base.norms[path])
            continue
        module = base.products[path]
        if isinstance(module, Embedding):
            rows = _fit_rows(path, part, module, base.dtype)
            if rows is not None:
                fitted[path] = rows
        else:
            fitted[path] = _fit_linear(path, part, module, base.dtype)
    return fitted


def _fit_norm(part: AdapterPart, norm: Norm) -> NormPart:
    """Differences: rows with several adapters have the sum of them."""

    def change(new: Tensor | None, own: Tensor | None) -> Tensor | None:
        return None if new is None or own is None else new.float() - own.data.cpu().float()

    return NormPart(change(part.weight, norm.weight), change(part.bias, bias_of(norm)))


def _fit_linear(
    path: str, part: AdapterPart, module: Linear | OneExpert, dtype: torch.dtype
) -> LoraPart:
    own = None if module.bias is None else module.bias.cpu()
    shift = None if part.bias is None or own is None else part.bias.float() - own.float()
    if part.weight is not None:
        if isinstance(module, OneExpert):  # whose bias comes after what adapters do
            return LoraPart(shift=shift, whole=(DenseWeight(part.weight, dtype), None))
        bias = own if part.bias is None else part.bias.to(dtype)
        return LoraPart(whole=(DenseWeight(part.weight, dtype), bias))
    if part.a is None or part.b is None:
        return LoraPart(shift=shift)
    if part.b_bias is not None:
        added = part.scale * part.b_bias.float()
        shift = added if shift is None else shift + added
    a, b, gain = part.a.contiguous(), part.b.T.contiguous(), None
    if part.magnitude is not None:
        norms = _row_norms(module.weight, a, part.b, part.scale)
        ratio = _ratio(path, part.magnitude, norms)
        b, gain = b.float() * ratio, ratio - 1
    return LoraPart(a, b, part.scale, gain, shift)


def _fit_rows(
    path: str, part: AdapterPart, module: Embedding, dtype: torch.dtype
) -> RowsPart | None:
    if part.weight is not None:
        return RowsPart(whole=DenseWeight(part.weight, dtype))
    if part.a is None or part.b is None:
        return None  # a copy of the base's weight alone
    a, b, gain = part.a.T.contiguous(), part.b.contiguous(), None
    if part.magnitude is not None:
        norms = _column_norms(module.weight, a, b, part.scale)
        ratio = _ratio(path, part.magnitude, norms)
        b, gain = b.float() * ratio[:, None], ratio - 1
    return RowsPart(a, b, part.scale, gain)


def _ratio(path: str, magnitude: Tensor, norms: Tensor) -> Tensor:
    if not bool((norms > 0).all()):
        raise AdapterError(f"{path}: DoRA divides by the norm of a row that is all zeros")
    return (magnitude.double() / norms).float()


def _rows(weight: Weight, ids: Tensor) -> Tensor:
    """Rows of a weight on any device, float32 on the CPU."""
    return weight.rows(ids.to(next(tensors_of(weight)).device)).cpu().float()


def _row_norms(weight: Weight, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """‖W + scale·B A‖ of each row, float64; `a` `[R, in]`, `b` `[out, R]`."""
    norms = []
    for start in range(0, weight.shape[0], _BAND):
        ids = torch.arange(start, min(start + _BAND, weight.shape[0]))
        rows = _rows(weight, ids) + scale * (b[ids].float() @ a.float())
        norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
    return torch.cat(norms)


def _column_norms(weight: Weight, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """‖E + scale·A Bᵀ‖ of each column, float64; `a` `[V, R]`, `b` `[D, R]`."""
    squares = torch.zeros(weight.shape[1], dtype=torch.float64)
    for start in range(0, weight.shape[0], _BAND):
        ids = torch.arange(start, min(start + _BAND, weight.shape[0]))
        rows = _rows(weight, ids) + scale * (a[ids].float() @ b.float().T)
        squares += rows.double().square().sum(0)
    return squares.sqrt()
