"""A product with a matrix that is written out a band of rows at a time, or with a stack of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows that are written out at once: bounds the memory of it to a few megabytes.
ROWS_AT_ONCE = 1024


def in_bands(
    rows: int, x: Tensor, bias: Tensor | None, band: Callable[[int, int], Tensor]
) -> Tensor:
    """`[..., in] -> [..., rows]`; `band(start, end)` gives rows of the matrix in x's dtype."""
    starts = range(0, rows, ROWS_AT_ONCE)
    parts = [F.linear(x, band(start, min(start + ROWS_AT_ONCE, rows))) for start in starts]
    y = torch.cat(parts, dim=-1)
    return y if bias is None else y + bias


def each_expert(
    x: Tensor, counts: Tensor, outputs: int, product: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """`[N, in] -> [N, outputs]`: `product(e, rows)` for every expert that has any of them.

    Rows lie in the order of their experts; `counts` `[E]` says how many each has.
    """
    y = x.new_empty(len(x), outputs)
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            y[start : start + count] = product(expert, x[start : start + count])
            start += count
    return y
