"""The tiny StarCoder2 as ``tools/train_tiny.py`` trains it: fast on a CPU, named as transformers'.

Attention works on blocks of queries that never look past the sliding window, and the loss never
holds the logits of more than a slice of tokens; both have hand-written gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CONFIG: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"],
    "model_type": "starcoder2",
    "vocab_size": 5120,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "norm_type": "layer_norm",
    "mlp_type": "default",
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "sliding_window": 512,
    "use_bias": True,
    "tie_word_embeddings": True,
    "use_cache": True,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
HIDDEN, HEADS, KV_HEADS = 256, 4, 2
HEAD = HIDDEN // HEADS
BLOCK = 256


Block = tuple[int, int, int, Tensor]  # start, end, first key, mask


class BlockAttention(torch.autograd.Function):
    """Softmax attention of blocks of queries with the keys their windows can reach.

    Queries are (batch, kv heads, queries per kv head, tokens, head), scaled already; keys and
    values are (batch, kv heads, tokens, head).  Each block is (start, end, first key, mask).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[Block]) -> Tensor:
        """Attend; keep the probabilities for the backward pass."""
        out, kept = torch.empty_like(q), []
        for start, end, first, mask in blocks:
            queries = q[:, :, :, start:end].flatten(2, 3).flatten(0, 1)
            keys, values = k[:, :, first:end].flatten(0, 1), v[:, :, first:end].flatten(0, 1)
            scores = torch.bmm(queries, keys.transpose(1, 2))
            scores.unflatten(1, (-1, end - start)).add_(mask)
            weights = torch.softmax(scores, -1)
            out[:, :, :, start:end] = torch.bmm(weights, values).view_as(out[:, :, :, start:end])
            kept.append(weights)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the queries, keys and values."""
        q, k, v, *kept = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (start, end, first, _), weights in zip(ctx.blocks, kept, strict=True):
            queries = q[:, :, :, start:end].flatten(2, 3).flatten(0, 1)
            keys, values = k[:, :, first:end].flatten(0, 1), v[:, :, first:end].flatten(0, 1)
            grad = grads[0][:, :, :, start:end].flatten(2, 3).flatten(0, 1)
            part = dk[:, :, first:end]
            dv[:, :, first:end] += torch.bmm(weights.transpose(1, 2), grad).view_as(part)
            dweights = torch.bmm(grad, values.transpose(1, 2))
            dscores = torch._softmax_backward_data(dweights, weights, -1, weights.dtype)
            dq[:, :, :, start:end] = torch.bmm(dscores, keys).view_as(q[:, :, :, start:end])
            part += torch.bmm(dscores.transpose(1, 2), queries).view_as(part)
        return dq, dk, dv, None


class TiedLoss(torch.autograd.Function):
    """Mean cross entropy of ``hidden @ weight.T``, one slice of tokens at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, size: int) -> Tensor:
        """The loss; the gradients are formed here, while each slice's logits are in the cache."""
        count = len(targets)
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros(weight.shape, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32)
        for at in range(0, count, size):
            part, wanted = hidden[at : at + size], targets[at : at + size, None]
            logits = (part @ weight.T).float()
            norm = logits.logsumexp(-1, keepdim=True)
            total += (norm - logits.gather(1, wanted)).sum()
            grad = logits.sub_(norm).exp_()
            grad.scatter_add_(1, wanted, torch.full(wanted.shape, -1.0))
            grad = grad.div_(count).to(hidden.dtype)
            dhidden[at : at + size] = grad @ weight
            dweight += grad.T @ part
        ctx.save_for_backward(dhidden, dweight.to(weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that ``forward`` formed."""
        dhidden, dweight = ctx.saved_tensors
        return dhidden * grads[0], dweight * grads[0], None, None


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and a sliding window."""

    def __init__(self) -> None:
        """Make the four projections."""
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], blocks: list[Block]) -> Tensor:
        """Attend within each row."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        weight = torch.cat([p.weight for p in projections])
        bias = torch.cat([p.bias for p in projections])
        heads = functional.linear(x, weight, bias).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        rotated, v = heads[:, : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]
        low, high = rotated.chunk(2, -1)
        rotated = rotated * rope[0] + torch.cat((-high, low), -1) * rope[1]
        q = (rotated[:, :HEADS] * HEAD**-0.5).unflatten(1, (KV_HEADS, -1))
        k = rotated[:, HEADS:].contiguous()
        out = BlockAttention.apply(q.contiguous(), k, v.contiguous(), blocks)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The feed-forward part of a layer."""

    def __init__(self) -> None:
        """Make the two projections."""
        super().__init__()
        self.c_fc = nn.Linear(HIDDEN, CONFIG["intermediate_size"])
        self.c_proj = nn.Linear(CONFIG["intermediate_size"], HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self) -> None:
        """Make its parts."""
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN, CONFIG["norm_epsilon"])
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN, CONFIG["norm_epsilon"])
        self.mlp = Mlp()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], blocks: list[Block]) -> Tensor:
        """Apply it."""
        x = x + self.self_attn(self.input_layernorm(x), rope, blocks)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """StarCoder2 without its head, with transformers' parameter names below ``model.``."""

    def __init__(self, context: int) -> None:
        """Make and initialise it; projections into the residual stream start smaller."""
        super().__init__()
        depth, std = CONFIG["num_hidden_layers"], CONFIG["initializer_range"]
        self.context = context
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.LayerNorm(HIDDEN, CONFIG["norm_epsilon"])
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # The usual 0.02 belongs to widths of some thousands: scale it to this width.
                scale = HIDDEN**-0.5 if "layers" in name else std
                residual = name.endswith(("o_proj.weight", "c_proj.weight"))
                nn.init.normal_(parameter, std=scale / math.sqrt(2 * depth) if residual else scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def tables(self, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], list[Block]]:
        """Rotary tables, and for each block of queries the keys in reach and their mask."""
        exponent = torch.arange(0, HEAD, 2).float() / HEAD
        angles = torch.outer(torch.arange(self.context).float(), CONFIG["rope_theta"] ** -exponent)
        angles = torch.cat([angles, angles], -1)
        positions, window = torch.arange(self.context), CONFIG["sliding_window"]
        blocks: list[Block] = []
        for start in range(0, self.context, BLOCK):
            end = min(start + BLOCK, self.context)
            first = max(0, start - window)
            distance = positions[start:end, None] - positions[None, first:end]
            hidden = (distance < 0) | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            blocks.append((start, end, first, mask))
        return (angles.cos().to(dtype), angles.sin().to(dtype)), blocks

    def forward(self, ids: Tensor, rope: tuple[Tensor, Tensor], blocks: list[Block]) -> Tensor:
        """Final hidden states of rows of ``context`` tokens."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope, blocks)
        return self.norm(x)
