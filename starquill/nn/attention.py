"""Grouped-query attention over what the cache makes visible."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from starquill.kernels.attention import attend_one
from starquill.nn.cache import CacheStep, KvCache


def attend_cached(
    q: Tensor, new: tuple[Tensor, Tensor], cache: KvCache, layer: int, step: CacheStep
) -> Tensor:
    """Store the `new` keys and values `[B, Hk, T, Dh]` and attend with `q` to all it may see.

    Returns `[B, T, Hq·Dh]`.
    """
    if step.one is not None:
        return attend_one(q, new, cache.layer(layer), step.one)
    k, v = cache.update(layer, *new, step)  # [B, Hk, S, Dh]
    return attend(q, k, v, step)


def attend(q: Tensor, k: Tensor, v: Tensor, step: CacheStep) -> Tensor:
    """Softmax attention with scale 1/√Dh, softmax in float32.

    `q` `[B, Hq, T, Dh]`, `k` and `v` `[B, Hk, S, Dh]`; query head h reads KV head h // (Hq/Hk).
    Returns `[B, T, Hq·Dh]`.
    """
    if q.dtype == torch.float16 and not bool(q.isfinite().all() and k.isfinite().all()):
        # Overflowed; torch's kernel would turn it into zeros, and the model would go on.
        return torch.full_like(q, math.nan).transpose(1, 2).flatten(2)
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
