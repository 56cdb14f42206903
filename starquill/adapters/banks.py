"""Adapters' parts in the banks of a model's modules, by slot."""

from __future__ import annotations

from collections.abc import Mapping

from starquill.adapters.adapter import BaseModules
from starquill.nn.linear import Embedding
from starquill.nn.lora import LoraBank, LoraPart, RowsBank, RowsPart
from starquill.quant.weight import moved, tensors_of


def fill_banks(base: BaseModules, slot: int, parts: Mapping[str, LoraPart | RowsPart]) -> None:
    """Put fitted `parts`, by their modules' paths, into `slot`; where what they act on is."""
    numbers = {path: number for number, path in enumerate(base.modules)}
    for path, part in parts.items():
        module = base.modules[path]
        device = next(tensors_of(module.weight)).device
        if device.type != "cpu":
            part = moved(part, str(device))
        if isinstance(module, Embedding):
            assert isinstance(part, RowsPart)
            rows = module.lora or RowsBank(numbers[path])
            rows.parts = {**rows.parts, slot: part}
            module.lora = rows
        else:
            assert isinstance(part, LoraPart)
            bank = module.lora or LoraBank(numbers[path])
            bank.parts = {**bank.parts, slot: part}
            module.lora = bank


def empty_banks(base: BaseModules, slot: int) -> None:
    """Take away what `slot` has; a step that runs goes on with it."""
    for module in base.modules.values():
        if module.lora is not None and slot in module.lora.parts:
            kept = {s: p for s, p in module.lora.parts.items() if s != slot}
            module.lora.parts = kept  # type: ignore[assignment]
