"""Grouped-query attention over what the cache makes visible."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from starquill.kernels.attention import attend_many, attend_one, store
from starquill.nn.cache import CacheStep, KvCache
from starquill.nn.lora import AdapterMix
from starquill.nn.rope import rotate
from starquill.nn.router import Routes


@dataclass(frozen=True)
class AttentionStep:
    """What every layer shares in one forward pass. `mix` says which adapters act on which row.

    `routes` `[B, layers, A]` are the experts of rows whose sequences have chosen them for good.
    """

    cos: Tensor  # [B, 1, T, Dh] float32
    sin: Tensor
    cache: KvCache
    plan: CacheStep
    mix: AdapterMix | None = None
    routes: Routes | None = None


def attend_cached(q: Tensor, k: Tensor, v: Tensor, layer: int, step: AttentionStep) -> Tensor:
    """Rotate `q` and `k`, store the new `k` and `v`, and attend to all that may be seen.

    `q` `[B, Hq, T, Dh]`, `k` and `v` `[B, Hk, T, Dh]`. Returns `[B, T, Hq·Dh]`.
    """
    cache, plan = step.cache, step.plan
    if plan.native and q.shape[2] == 1:
        return attend_one(q, (k, v), (step.cos, step.sin), cache.layer(layer), plan.paged)
    q, k = rotate(q, step.cos, step.sin), rotate(k, step.cos, step.sin)
    if plan.native:
        for new, kept in zip((k, v), cache.layer(layer), strict=True):
            store(new, kept, plan.paged)
        return attend_many(q, cache.layer(layer), plan.paged)
    if q.shape[2] == 1:
        # One by one: torch's sums depend on how long the longest row is.
        return torch.cat(
            [_attend_row(q, (k, v), layer, (cache, plan.row(row)), row) for row in range(len(q))]
        )
    keys, values = cache.update(layer, k, v, plan)  # [B, Hk, S, Dh]
    return attend(q, keys, values, plan)


def _attend_row(
    q: Tensor, new: tuple[Tensor, Tensor], layer: int, to: tuple[KvCache, CacheStep], row: int
) -> Tensor:
    cache, plan = to
    here = slice(row, row + 1)
    keys, values = cache.update(layer, new[0][here], new[1][here], plan)
    return attend(q[here], keys, values, plan)


def attend(q: Tensor, k: Tensor, v: Tensor, step: CacheStep) -> Tensor:
    """Softmax attention with scale 1/√Dh, softmax in float32.

    `q` `[B, Hq, T, Dh]`, `k` and `v` `[B, Hk, S, Dh]`; query head h reads KV head h // (Hq/Hk).
    Returns `[B, T, Hq·Dh]`.
    """
    out = _attend(q, k, v, step)
    if q.dtype == torch.float16:
        # What overflowed torch's kernel turns into zeros, and the model would go on.
        sound = q.isfinite().flatten(1).all(1) & k.isfinite().flatten(1).all(1)  # [B]
        out = out.masked_fill(~sound[:, None, None], math.nan)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, step: CacheStep) -> Tensor:
    batch, heads, tokens, head_dim = q.shape
    groups = heads // k.shape[1]
    mask = step.mask if step.mask is None else step.mask.to(q.dtype)
    if tokens == 1:
        # One KV head's query heads become the rows of one product: keys are read once, not
        # once per head.
        grouped = q.view(batch, heads // groups, groups, head_dim)  # [B, Hk, G, Dh]
        out = F.scaled_dot_product_attention(grouped, k, v, mask)
        return out.reshape(batch, 1, heads * head_dim)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=step.causal, enable_gqa=groups > 1
    )  # [B, Hq, T, Dh]
    return out.transpose(1, 2).reshape(batch, tokens, heads * head_dim)
