"""All experts of a layer in one native operation, and how they are chosen; csrc/experts.cpp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starquill.kernels.elementwise import ACTS
from starquill.kernels.matmul import AffineKernel, way
from starquill.kernels.native import as_rows, native
from starquill.kernels.program import empty, keep


@dataclass(frozen=True)
class ExpertMatrix:
    """A stack of E matrices, one behind the other, and their biases `[E, out]` or None."""

    kernel: AffineKernel
    bias: Tensor | None


def weighted(
    x: Tensor,
    routes: tuple[Tensor, Tensor],
    stacks: tuple[ExpertMatrix | None, ExpertMatrix, ExpertMatrix],
    count: int,
    act: str,
) -> Tensor:
    """For each token of `x` `[B, T, D]` the weighted sum of what its experts make of it.

    `routes` are the chosen experts, int64, and their weights, `[B, T, A]` both; `stacks` are gate
    (or None), up and down of `count` experts, each of which is `down(act(gate x)·up x)` or
    `down(act(up x))`. float32, with activations rounded as in `AffineKernel.matmul`. Rows of a
    step, `[B, 1, D]`, come out the same in any company. IndexError for an expert not there.
    """
    assert native is not None
    chosen, weights = routes[0].contiguous(), as_rows(routes[1])
    rows, width = as_rows(x), x.shape[-1]
    top = chosen.shape[-1]
    if stacks[1].kernel.shape[1] != width or chosen.shape != (*x.shape[:-1], top):
        raise ValueError(f"x {list(x.shape)} does not fit experts {list(stacks[1].kernel.shape)}")
    if chosen.dtype is not torch.int64 or weights.shape != chosen.shape:
        raise ValueError(f"weights {list(weights.shape)} do not fit routes {list(chosen.shape)}")
    biases = [None if s is None or s.bias is None else as_rows(s.bias) for s in stacks]
    for stack, bias in zip(stacks, biases, strict=True):
        if bias is not None and stack is not None and bias.numel() != stack.kernel.shape[0]:
            raise ValueError(f"bias {list(bias.shape)} does not fit {list(stack.kernel.shape)}")
    out = empty(x.shape)
    keep(*stacks, *biases)
    gate, up, down = (None if stack is None else stack.kernel.handle for stack in stacks)
    addresses = (*biases, rows, chosen, weights, out)
    native.mixture_at(
        gate,
        up,
        down,
        [0 if part is None else part.data_ptr() for part in addresses],
        [count, rows.numel() // width, top],
        ACTS[act],
        way(x, exact=False),
        torch.get_num_threads(),
    )
    return out


def top_of_softmax(logits: Tensor, top: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The `top` likeliest of `logits` `[..., E]` float32 and their chances, `[..., top]`.

    The best first, of equals the first; with `normalise` chances sum to 1.
    """
    assert native is not None
    logits = logits.contiguous()
    count = logits.shape[-1]
    chosen = empty((*logits.shape[:-1], top), torch.int64)
    weights = empty(chosen.shape)
    native.route_at(
        [logits.data_ptr(), chosen.data_ptr(), weights.data_ptr()],
        [logits.numel() // count, count, top],
        normalise,
        torch.get_num_threads(),
    )
    return chosen, weights


def sparsemixer(logits: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Two experts of `logits` `[..., E]` float32 and their weights, as `nn.router` says."""
    assert native is not None
    logits = logits.contiguous()
    count = logits.shape[-1]
    chosen = empty((*logits.shape[:-1], 2), torch.int64)
    weights = empty(chosen.shape)
    native.sparsemixer_at(
        [logits.data_ptr(), chosen.data_ptr(), weights.data_ptr()],
        [logits.numel() // count, count],
        jitter,
        torch.get_num_threads(),
    )
    return chosen, weights
