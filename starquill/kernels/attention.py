"""Attention over the key/value cache, in native code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from starquill.kernels.native import as_rows, native, serves
from starquill.kernels.program import empty, keep

MOST_HEAD_DIM = 256  # as in csrc/kernels.h
BLOCK = 64  # positions of a cache that lie together; kBlock in csrc/kernels.h
_FOREVER = 2**62  # a window without end


@dataclass(frozen=True)
class Paged:
    """Where the new tokens of each row go in a cache of blocks, and how far back they see.

    `tables` `[B, W]` and `starts` `[B]` int64: row b's first new token is at position `starts[b]`;
    position p lies in block `tables[b, p // BLOCK]`. A token sees the last `window` positions, its
    own included; all of them where None.
    """

    tables: Tensor
    starts: Tensor
    window: int | None


def attends(cache: Tensor) -> bool:
    """Whether the native kernels can work on this cache `[blocks, Hk, BLOCK, Dh]`."""
    head_dim = cache.shape[-1]
    fits = head_dim % 2 == 0 and head_dim <= MOST_HEAD_DIM
    return fits and serves(cache) and cache.dtype == torch.float32


def attend_one(
    q: Tensor,
    new: tuple[Tensor, Tensor],
    rope: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    at: Paged,
) -> Tensor:
    """Rotate, store the `new` key and value `[B, Hk, 1, Dh]`, attend with `q` `[B, Hq, 1, Dh]`.

    `rope` is cos and sin `[B, 1, 1, Dh]`: dimension i pairs with i + Dh/2. `cache` is k and v
    `[blocks, Hk, BLOCK, Dh]`. Several rows may be of one sequence: each sees those before it.
    Softmax with scale 1/√Dh. Returns `[B, 1, Hq·Dh]`.
    """
    assert native is not None
    batch, heads, _, head_dim = q.shape
    queries, keys, values, cos, sin = (as_rows(part) for part in (q, *new, *rope))
    out = empty((batch, 1, heads * head_dim))
    keep(*cache)
    tensors = (queries, keys, values, cos, sin, *cache, at.tables, at.starts, out)
    native.attend_at(
        [tensor.data_ptr() for tensor in tensors],
        [batch, heads, new[0].shape[1], at.tables.shape[1], head_dim, at.window or _FOREVER],
        1 / math.sqrt(head_dim),
        torch.get_num_threads(),
    )
    return out


def store(new: Tensor, cache: Tensor, at: Paged) -> None:
    """`new` keys or values `[B, Hk, T, Dh]` to their places in `cache`."""
    assert native is not None
    batch, heads, tokens, head_dim = new.shape
    if new.dtype is not torch.float32 or new.stride(3) != 1:
        new = as_rows(new)
    native.store_at(
        [part.data_ptr() for part in (new, cache, at.tables, at.starts)],
        [batch, heads, tokens, at.tables.shape[1], head_dim, *new.stride()[:3]],
        torch.get_num_threads(),
    )


def attend_many(q: Tensor, cache: tuple[Tensor, Tensor], at: Paged) -> Tensor:
    """Attend with `q` `[B, Hq, T, Dh]` to what `store` has put into `cache`, k and v.

    Softmax with scale 1/√Dh. Returns `[B, T, Hq·Dh]`.
    """
    assert native is not None
    batch, heads, tokens, head_dim = q.shape
    out = empty((batch, tokens, heads * head_dim))
    queries = as_rows(q)
    native.flash_at(
        [part.data_ptr() for part in (queries, *cache, at.tables, at.starts, out)],
        [
            batch,
            heads,
            cache[0].shape[1],
            tokens,
            at.tables.shape[1],
            head_dim,
            at.window or _FOREVER,
        ],
        1 / math.sqrt(head_dim),
        torch.get_num_threads(),
    )
    return out
