"""Attention of one new token a row over the key/value cache, in native code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from starquill.kernels.native import as_rows, native, serves

MOST_HEAD_DIM = 256  # as in csrc/kernels.h
FOREVER = 2**62  # a window without end


@dataclass(frozen=True)
class OneToken:
    """Where the new token of each row goes, and how much of its slot it sees: `[B]` int64 each."""

    slots: Tensor
    places: Tensor
    counts: Tensor


def attends(cache: Tensor) -> bool:
    """Whether `attend_one` can work on this cache `[slots, Hk, S, Dh]`."""
    head_dim = cache.shape[-1]
    fits = head_dim % 2 == 0 and head_dim <= MOST_HEAD_DIM
    return fits and serves(cache) and cache.dtype == torch.float32


def attend_one(
    q: Tensor,
    new: tuple[Tensor, Tensor],
    rope: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    at: OneToken,
) -> Tensor:
    """Rotate, store the `new` key and value `[B, Hk, 1, Dh]`, attend with `q` `[B, Hq, 1, Dh]`.

    `rope` is cos and sin `[B, 1, 1, Dh]`: dimension i pairs with i + Dh/2. `cache` is k and v
    `[slots, Hk, S, Dh]`; row b sees the first `counts[b]` places of its slot. Softmax with scale
    1/√Dh. Returns `[B, 1, Hq·Dh]`.
    """
    assert native is not None
    batch, heads, _, head_dim = q.shape
    _, kv_heads, ring, _ = cache[0].shape
    queries, keys, values, cos, sin = (as_rows(part) for part in (q, *new, *rope))
    out = torch.empty(batch, 1, heads * head_dim)
    tensors = (queries, keys, values, cos, sin, *cache, at.slots, at.places, at.counts, out)
    native.attend_at(
        [tensor.data_ptr() for tensor in tensors],
        [batch, heads, kv_heads, ring, head_dim],
        1 / math.sqrt(head_dim),
        torch.get_num_threads(),
    )
    return out


def attend_many(
    q: Tensor, cached: tuple[Tensor, Tensor], positions: tuple[Tensor, Tensor], window: int | None
) -> Tensor:
    """Attend with `q` `[B, Hq, T, Dh]` to the keys and values `cached`, `[B, Hk, S, Dh]` each.

    `positions` are those of queries `[B, T]`, ascending, and of keys `[B, S]`, int64: a query sees
    keys that are not negative, not after it and, with a `window`, less than that before it.
    Softmax with scale 1/√Dh. Returns `[B, T, Hq·Dh]`.
    """
    assert native is not None
    batch, heads, tokens, head_dim = q.shape
    keys, values = (_dense_rows(part) for part in cached)
    if keys.stride() != values.stride():
        keys, values = keys.contiguous(), values.contiguous()
    out = torch.empty(batch, tokens, heads * head_dim)
    asked, known = (part.contiguous() for part in positions)
    queries = as_rows(q)
    native.flash_at(
        [part.data_ptr() for part in (queries, keys, values, asked, known, out)],
        [
            batch,
            heads,
            keys.shape[1],
            tokens,
            keys.shape[2],
            head_dim,
            *keys.stride()[:2],
            window or FOREVER,
        ],
        1 / math.sqrt(head_dim),
        torch.get_num_threads(),
    )
    return out


def _dense_rows(part: Tensor) -> Tensor:
    """`[B, Hk, S, Dh]` float32 whose last two dimensions are contiguous."""
    if part.dtype is not torch.float32 or part.stride()[2:] != (part.shape[3], 1):
        return as_rows(part)
    return part
