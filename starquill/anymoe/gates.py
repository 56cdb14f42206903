"""Gates: one linear map with bias for each layer, trained all at once, and mistral.rs's file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from starquill.checkpoint.files import write_atomically
from starquill.checkpoint.source import SafetensorsSource, read_header
from starquill.errors import CheckpointError, listing

GATE_FILE = "gate.safetensors"


@dataclass(frozen=True, eq=False)
class Gates:
    """Of each of L layers a weight `[E, D]` and a bias `[E]`, float32."""

    layers: tuple[int, ...]
    weight: Tensor  # [L, E, D]
    bias: Tensor  # [L, E]

    def scores(self, x: Tensor) -> Tensor:
        """`[L, N, D] -> [L, E, N]`: few experts in the last place would make what follows slow."""
        return torch.baddbmm(self.bias[:, :, None], self.weight, x.transpose(1, 2))


def write_gates(gates: Gates, path: Path) -> None:
    """As mistral.rs names them, with the model's own numbers of layers."""
    tensors = {}
    for place, layer in enumerate(gates.layers):
        tensors[f"moe_gate.{layer}.weight"] = gates.weight[place].contiguous()
        tensors[f"moe_gate.{layer}.bias"] = gates.bias[place].contiguous()
    write_atomically(path, save(tensors))


def read_gates(path: Path, layers: Sequence[int], experts: int, width: int) -> Gates:
    """The gates in `path`, which may count only the layers that have one."""
    header = read_header(path)
    numbers = sorted({int(m[1]) for n in header if (m := re.match(r"moe_gate\.(\d+)\.", n))})
    if numbers not in (sorted(layers), list(range(len(layers)))):
        raise CheckpointError(
            f"{path} has gates for layers {listing(list(map(str, numbers)), 8) or 'none'} "
            f"(expected {listing(list(map(str, layers)), 8)}, as moe_gate.LAYER.weight and .bias)"
        )
    source = SafetensorsSource(dict.fromkeys(header, path), {path: header})
    found: dict[str, list[Tensor]] = {"weight": [], "bias": []}
    for number in numbers:
        for kind, shape in (("weight", (experts, width)), ("bias", (experts,))):
            name = f"moe_gate.{number}.{kind}"
            if name not in header:
                raise CheckpointError(f"{path} has no {name}")
            tensor = source.read(name).float()
            if tuple(tensor.shape) != shape:
                raise CheckpointError(
                    f"{path}: {name} is {list(tensor.shape)} (expected {list(shape)}: {experts} "
                    f"experts with the base, and the model's width)"
                )
            if not bool(tensor.isfinite().all()):
                raise CheckpointError(f"{path}: {name} has values that are not finite")
            found[kind].append(tensor)
    ordered = tuple(sorted(layers))
    return Gates(ordered, torch.stack(found["weight"]), torch.stack(found["bias"]))
