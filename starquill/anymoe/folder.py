"""The mixture's folder: a starcoder2_moe checkpoint, or gates and where the experts are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from starquill.anymoe.config import AnyMoeConfig, Gate
from starquill.anymoe.experts import MATRICES, Adapted, Base, Expert, Part, plain
from starquill.anymoe.gates import GATE_FILE, Gates, write_gates
from starquill.anymoe.states import nothing
from starquill.checkpoint.files import read_json
from starquill.checkpoint.opening import Checkpoint
from starquill.checkpoint.save import ShardWriter, copy_companions
from starquill.errors import AdapterError, CheckpointError
from starquill.models.starcoder2_moe import SPEC
from starquill.quant.affine import AffineWeight, stack

REFERENCE = "anymoe.json"


@dataclass(frozen=True, eq=False)
class Mixture:
    """All that a mixture is made of. `sources` are the experts' places by name."""

    base: Base
    experts: Sequence[Expert]
    sources: Mapping[str, str]
    gates: Gates
    top_k: int
    delta: bool
    gate: str = "token"

    @property
    def names(self) -> list[str]:
        return [expert.name for expert in self.experts]

    def raw_config(self) -> dict[str, Any]:
        """The base's config with what makes it a mixture."""
        chosen = set(self.gates.layers)
        raw = {
            **self.base.checkpoint.raw_config,
            "model_type": SPEC.model_type,
            "architectures": ["Starcoder2MoeForCausalLM"],
            "num_local_experts": len(self.experts),
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "gate_bias": True,
            "gate_type": self.gate,
            "mlp_only_layers": [
                n for n in range(self.base.config.num_hidden_layers) if n not in chosen
            ],
            "anymoe_experts": self.names,
        }
        return {**raw, "expert_rank": self.rank} if self.delta else raw

    @property
    def rank(self) -> int:
        """The highest of all LoRAs; others are filled up with zeros."""
        loras = [e for e in self.experts if isinstance(e, Adapted)]
        return max(len(p.a) for e in loras for p in e.parts.values() if p.a is not None)


def check_delta(experts: Sequence[Expert]) -> None:
    """Raise AdapterError unless every expert but the base is nothing but `x A B`."""
    for expert in experts[1:]:
        if not isinstance(expert, Adapted):
            raise AdapterError(
                f"expert {expert.name} is a whole checkpoint, which cannot be kept as a delta; "
                "leave out --lora-experts delta"
            )
        for path, part in expert.parts.items():
            if part.a is None or part.whole or part.gain is not None or part.shift is not None:
                raise AdapterError(
                    f"expert {expert.name}: {path} has more than LoRA's A and B (DoRA, a bias or a "
                    "whole weight), which a delta cannot hold; use --lora-experts merge"
                )


def write_mixture(mixture: Mixture, folder: Path, on_layer: Callable[[], None] = nothing) -> None:
    """Write the whole model, one stack of experts in memory at a time."""
    base, spec = mixture.base, mixture.base.spec
    writer = ShardWriter(folder)
    replaced = tuple(f"{spec.layer_prefix}{n}.mlp." for n in mixture.gates.layers)
    for ours, theirs in base.whole.names.items():
        if not ours.startswith(replaced):
            writer.add(SPEC.saved(ours), plain(base.checkpoint.source.read(theirs)))
    for place, layer in enumerate(mixture.gates.layers):
        path = f"{spec.layer_prefix}{layer}.mlp"
        writer.add(f"{path}.gate.weight", mixture.gates.weight[place].detach().clone())
        writer.add(f"{path}.gate.bias", mixture.gates.bias[place].detach().clone())
        for matrix in MATRICES:
            parts = (
                _deltas(mixture, layer, matrix)
                if mixture.delta
                else _stacks(mixture, layer, matrix)
            )
            for name, value in parts.items():
                writer.add(SPEC.saved(f"{path}.experts.{matrix}.{name}"), value)
        on_layer()
    _write_companions(base.checkpoint, folder)
    writer.finish(mixture.raw_config())
    write_gates(mixture.gates, folder / GATE_FILE)


def _stacks(mixture: Mixture, layer: int, matrix: str) -> dict[str, Tensor | AffineWeight]:
    parts = [expert.read(layer, matrix) for expert in mixture.experts]
    found: dict[str, Tensor | AffineWeight] = {"weight": _stacked(parts)}
    biases = [part.bias for part in parts if part.bias is not None]
    if biases:
        found["bias"] = _widened(biases)
    return found


def _stacked(parts: Sequence[Part]) -> Tensor | AffineWeight:
    """Quantized if all are quantized alike, else dense."""
    affine = [part.weight for part in parts if isinstance(part.weight, AffineWeight)]
    if len(affine) == len(parts) and len({(w.bits, w.group) for w in affine}) == 1:
        return stack(affine)
    return _widened([part.dense() for part in parts])


def _widened(tensors: Sequence[Tensor]) -> Tensor:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.stack([tensor.to(dtype) for tensor in tensors])


def _deltas(mixture: Mixture, layer: int, matrix: str) -> dict[str, Tensor | AffineWeight]:
    """The base's matrix once, and of each LoRA A `[R, in]` and B `[out, R]`, scaled."""
    own = mixture.experts[0].read(layer, matrix)
    out, width = own.weight.shape
    found: dict[str, Tensor | AffineWeight] = {"base.weight": own.weight}
    if own.bias is not None:
        found["base.bias"] = own.bias
    rows, columns = [], []
    for expert in mixture.experts[1:]:
        assert isinstance(expert, Adapted)
        part = expert.part(layer, matrix)
        dtype = torch.float32 if part is None or part.a is None else part.a.dtype
        a = torch.zeros(mixture.rank, width, dtype=dtype)
        b = torch.zeros(out, mixture.rank, dtype=dtype)
        if part is not None and part.a is not None and part.b is not None:
            a[: len(part.a)] = part.a
            b[:, : len(part.b)] = (part.scale * part.b.float().T).to(dtype)
        rows.append(a)
        columns.append(b)
    return {**found, "a.weight": _widened(rows), "b.weight": _widened(columns)}


def _write_companions(checkpoint: Checkpoint, folder: Path) -> None:
    if checkpoint.is_folder:  # what lies beside a GGUF file belongs to something else
        copy_companions(checkpoint.folder, folder)
    (folder / "README.md").unlink(missing_ok=True)  # it tells of the base
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    if not (folder / "tokenizer.json").exists():
        for name, value in (
            ("tokenizer.json", tokenizer.definition),
            ("tokenizer_config.json", tokenizer.config),
        ):
            (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_reference(mixture: Mixture, folder: Path) -> None:
    """Gates, and what they are for: `starquill anymoe join` makes a model of it."""
    value = {
        "base": _absolute(mixture.base.name),
        "experts": {name: _absolute(place) for name, place in mixture.sources.items()},
        "layers": list(mixture.gates.layers),
        "top_k": mixture.top_k,
        "lora_experts": "delta" if mixture.delta else "merge",
        "gate": mixture.gate,
    }
    text = json.dumps(value, indent=2, ensure_ascii=False)
    (folder / REFERENCE).write_text(f"{text}\n", encoding="utf-8")
    write_gates(mixture.gates, folder / GATE_FILE)


def _absolute(place: str) -> str:
    path = Path(place).expanduser()
    return str(path.resolve()) if path.exists() else place


@dataclass(frozen=True)
class Reference:
    """What `write_reference` wrote."""

    base: str
    experts: Mapping[str, str]
    config: AnyMoeConfig


def read_reference(folder: Path) -> Reference:
    raw = read_json(folder / REFERENCE)
    match raw:
        case {
            "base": str(base),
            "experts": dict(experts),
            "layers": list(layers),
            "top_k": int(top_k),
            "lora_experts": "merge" | "delta" as lora_experts,
        } if (
            raw.get("gate", "token") in get_args(Gate)
            and all(isinstance(place, str) for place in experts.values())
            and all(isinstance(layer, int) for layer in layers)
        ):
            config = AnyMoeConfig(
                layers=layers,
                top_k=top_k,
                lora_experts=lora_experts,
                gate=raw.get("gate", "token"),  # older ones choose for every token
            )
            return Reference(base, experts, config)
    raise CheckpointError(
        f"{folder / REFERENCE} is damaged (expected base, experts, layers, top_k, lora_experts)"
    )
