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


@dataclass(frozen=True)
class ManyTokens:
    """Where new tokens go, and which positions are whose; int64.

    `slots` `[B]`, `places` `[B, kept]` in the ring, positions of `queries` `[B, T]`, ascending,
    and of `keys` `[B, S]`, negative where there is none.
    """

    slots: Tensor
    places: Tensor
    queries: Tensor
    keys: Tensor


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


def store(new: Tensor, cache: Tensor, slots: Tensor, places: Tensor) -> None:
    """The last of `new` `[B, Hk, T, Dh]` to `places` `[B, kept]` of `slots` `[B]` in `cache`."""
    assert native is not None
    batch, heads, tokens, head_dim = new.shape
    slots, places = slots.contiguous(), places.contiguous()
    if new.dtype is not torch.float32 or new.stride(3) != 1:
        new = as_rows(new)
    native.store_at(
        [part.data_ptr() for part in (new, cache, slots, places)],
        [batch, heads, tokens, places.shape[1], cache.shape[2], head_dim, *new.stride()[:3]],
        torch.get_num_threads(),
    )


def attend_many(
    q: Tensor, cached: tuple[Tensor, Tensor], at: ManyTokens, window: int | None
) -> Tensor:
    """Attend with `q` `[B, Hq, T, Dh]` to the keys and values `cached`, `[B, Hk, S, Dh]` each.

    A query sees keys that are not after it and, with a `window`, less than that before it. Softmax
    with scale 1/√Dh. Returns `[B, T, Hq·Dh]`.
    """
    assert native is not None
    batch, heads, tokens, head_dim = q.shape
    keys, values = (_dense_rows(part) for part in cached)
    if keys.stride() != values.stride():
        keys, values = keys.contiguous(), values.contiguous()
    out = torch.empty(batch, tokens, heads * head_dim)
    asked, known = at.queries.contiguous(), at.keys.contiguous()
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
