"""Tiny bases, experts and rows to make mixtures of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from starquill.anymoe.gates import Gates
from tests import tiny

PROMPTS = {0: "import os\nimport sys", 1: "0123456789 42", 2: "ZZZZ QQQQ XXXX"}


def checkpoint(folder: Path, seed: int, **changes: Any) -> Path:
    raw = tiny.config(num_hidden_layers=3, **changes)
    return tiny.write_checkpoint(folder, raw, tiny.weights(raw, seed=seed))


def rows(path: Path, each: int = 6) -> Path:
    """Labelled rows that a gate can tell apart, `each` per expert."""
    found = [
        {"prompt": f"{text} {number}", "expert": expert}
        for expert, text in PROMPTS.items()
        for number in range(each)
    ]
    tiny.write_json(path, {"rows": found})
    return path


def forced(layers: Sequence[int], expert: int, experts: int, width: int = 64) -> Gates:
    """Gates that always choose one."""
    bias = torch.zeros(len(layers), experts)
    bias[:, expert] = 5.0
    return Gates(tuple(layers), torch.zeros(len(layers), experts, width), bias)


def spliced(
    base: Mapping[str, Tensor], other: Mapping[str, Tensor], layers: Sequence[int]
) -> dict[str, Tensor]:
    """`base` with the MLPs of `other` in `layers`."""
    prefixes = tuple(f"model.layers.{layer}.mlp." for layer in layers)
    return {n: other[n] if n.startswith(prefixes) else t for n, t in base.items()}


def lora(folder: Path, seed: int, layers: int = 3, rank: int = 4, extra: bool = False) -> Path:
    """A PEFT folder for every MLP matrix, and with `extra` for q_proj."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"mlp.c_fc": (256, 64), "mlp.c_proj": (64, 256)}
    shapes |= {"self_attn.q_proj": (64, 64)} if extra else {}
    tensors = {}
    for layer in range(layers):
        for name, (out, width) in shapes.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, width, generator=generator) * 0.2
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.2
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.rpartition(".")[2] for name in shapes],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def only(name: str, folder: Path, seed: int) -> Path:
    """A PEFT folder for one matrix of every layer: q_proj, c_fc or c_proj."""
    lora(folder, seed, extra=True)
    path = folder / "adapter_model.safetensors"
    save_file({n: t * 2 for n, t in load_file(path).items() if f".{name}." in n}, path)
    raw = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**raw, "target_modules": [name]}))
    return folder


def with_lora(state: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """What the LoRA's definition makes of the MLPs: W + alpha/r · B A."""
    tensors, found = load_file(folder / "adapter_model.safetensors"), dict(state)
    for name, a in tensors.items():
        if ".mlp." in name and name.endswith("lora_A.weight"):
            ours = name.removeprefix("base_model.model.").replace("lora_A.", "")
            found[ours] = state[ours] + 2 * tensors[name.replace("lora_A", "lora_B")] @ a
    return found
