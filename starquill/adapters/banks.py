"""Putting what adapters do into a model's banks, by slot, and taking it out again.

A bank's parts are replaced as a whole: a step that runs goes on with what it began with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from starquill.adapters.adapter import BaseModules
from starquill.adapters.fitting import Part
from starquill.checkpoint.stacked import piece_of
from starquill.nn.experts import ExpertLinear
from starquill.nn.linear import Embedding, Linear
from starquill.nn.lora import LoraBank, LoraPart, RowsBank, RowsPart
from starquill.nn.lora_experts import ExpertBank
from starquill.nn.norm import LayerNorm, NormBank, NormPart, RMSNorm
from starquill.quant.weight import moved, tensors_of

Held = TypeVar("Held", LoraPart, RowsPart, NormPart)


def put(base: BaseModules, slot: int, parts: Mapping[str, Part]) -> None:
    """Let adapter `slot` act as `parts` say; they go to the device of what they act on."""
    numbers = {path: number for number, path in enumerate(base.modules)}
    experts: dict[str, dict[int, LoraPart]] = defaultdict(dict)
    for path, part in parts.items():
        if path in base.norms:
            assert isinstance(part, NormPart)
            _put_norm(base.norms[path], slot, part)
        elif path in base.modules:
            _put_product(base.modules[path], numbers[path], slot, part)
        else:
            piece = piece_of(path)
            assert piece is not None
            assert isinstance(part, LoraPart)
            experts[piece[0]][piece[1]] = _beside(base.stacks[piece[0]].weight, part)
    for path, own in experts.items():
        stack = base.stacks[path]
        bank = stack.lora or ExpertBank()
        bank.parts = {**bank.parts, slot: own}
        stack.lora = bank


def take_out(model: nn.Module, slot: int) -> None:
    """Forget what adapter `slot` does."""
    for module in model.modules():
        bank: Any = None
        if isinstance(module, Linear | Embedding | ExpertLinear):
            bank = module.lora
        elif isinstance(module, LayerNorm | RMSNorm):
            bank = module.bank
        if bank is not None and slot in bank.parts:
            bank.parts = {s: p for s, p in bank.parts.items() if s != slot}


def _put_product(module: Linear | Embedding, number: int, slot: int, part: Part) -> None:
    if isinstance(module, Embedding):
        assert isinstance(part, RowsPart)
        rows = module.lora or RowsBank(number)
        rows.parts = {**rows.parts, slot: _beside(module.weight, part)}
        module.lora = rows
    else:
        assert isinstance(part, LoraPart)
        bank = module.lora or LoraBank(number)
        bank.parts = {**bank.parts, slot: _beside(module.weight, part)}
        module.lora = bank


def _put_norm(norm: LayerNorm | RMSNorm, slot: int, part: NormPart) -> None:
    bank = norm.bank or NormBank()
    bank.parts = {**bank.parts, slot: _beside(norm.weight, part)}
    norm.bank = bank


def _beside(weight: Any, part: Held) -> Held:
    device = next(tensors_of(weight)).device
    return part if device.type == "cpu" else moved(part, str(device))
