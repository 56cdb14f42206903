"""`Linear` and `Embedding`: the two modules that hold a `Weight`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from starquill.nn.lora import AdapterMix, LoraBank, RowsBank
from starquill.quant.weight import DenseWeight, Weight


def _unloaded(rows: int, columns: int) -> Weight:
    """A placeholder that has a shape and no memory, until a checkpoint fills it."""
    return DenseWeight(torch.empty(rows, columns, device="meta"))


class Linear(nn.Module):
    """`y = x Wᵀ + b` with any `Weight`, and what adapters add. `bias` is `[out]` or None."""

    weight: Weight
    bias: nn.Parameter | None
    lora: LoraBank | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = _unloaded(out_features, in_features)
        empty = torch.empty(out_features, device="meta")
        self.bias = nn.Parameter(empty, requires_grad=False) if bias else None

    def __call__(self, x: Tensor, mix: AdapterMix | None = None) -> Tensor:
        # Past torch's hooks, and its slow look-up of parameters: a step has hundreds of products.
        bias = self._parameters.get("bias")
        y = self.weight.matmul(x, bias)
        if mix is None or self.lora is None:
            return y
        return self.lora.add_to(y, x, mix, bias)


class Embedding(nn.Module):
    """Rows of a `Weight` `[V, D]` by token id, and what adapters add."""

    weight: Weight
    lora: RowsBank | None = None

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = _unloaded(vocab_size, hidden_size)

    def forward(self, ids: Tensor, mix: AdapterMix | None = None) -> Tensor:
        y = self.weight.rows(ids)
        if mix is None or self.lora is None:
            return y
        return self.lora.add_to(y, ids, mix)
