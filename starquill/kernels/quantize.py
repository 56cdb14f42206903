"""Range search and hqq of `starquill.quant.quantize`, in native code on all threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from starquill.kernels.memory import for_weights
from starquill.kernels.native import native


def fit_groups(
    weight: Tensor,
    settings: tuple[int, int, bool],
    shares: Sequence[float],
    importance: Tensor | None,
    unit: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `[out, in]` to packed integers, scales and biases.

    `settings` are bits, group and whether to go on from the range search to hqq; each of `shares`
    of a group's range is tried and refitted by least squares, weighted by `importance` `[in]`. With
    a `unit` weights are divided by it while fitting, and scales and biases are float32; without,
    they are float16.
    """
    assert native is not None
    bits, group, hqq = settings
    out, width = weight.shape
    packed = for_weights((out, width * bits // 8), torch.uint8)
    dtype = torch.float16 if unit is None else torch.float32
    scales, biases = (for_weights((out, width // group), dtype) for _ in range(2))
    native.quantize(
        weight.detach().contiguous(),
        (bits, group, int(hqq)),
        list(shares),
        importance,
        unit or 1.0,
        packed,
        scales,
        biases,
        torch.get_num_threads(),
    )
    return packed, scales, biases
