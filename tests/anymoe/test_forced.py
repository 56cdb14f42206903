"""With one expert forced, a mixture is that expert's model in its layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from starquill.anymoe.config import AnyMoeConfig
from starquill.anymoe.experts import open_base
from starquill.anymoe.training import write
from starquill.errors import AdapterError
from starquill.loading import load
from starquill.nn.experts import DeltaExperts
from starquill.quantizing import QuantOptions, quantize_checkpoint
from tests import tiny
from tests.adapters.making import weights_of
from tests.anymoe import making

IDS = tiny.random_ids(20)
SUBSETS = [(0, 1, 2), (1,), (0, 2), (2,)]


def mixture(
    tmp_path: Path, base: Path, experts: dict[str, Path], layers: Sequence[int], chosen: int,
    lora_experts: str = "merge",
) -> Path:  # fmt: skip
    config = AnyMoeConfig(lora_experts=lora_experts)  # type: ignore[arg-type]
    gates = making.forced(layers, chosen, len(experts) + 1)
    return write(open_base(base), experts, gates, tmp_path / f"mix{chosen}", config)


def reference(folder: Path, state: dict[str, torch.Tensor]) -> torch.Tensor:
    raw = tiny.config(num_hidden_layers=3)
    return tiny.our_logits(load(tiny.write_checkpoint(folder, raw, state)), IDS)


@pytest.mark.parametrize("layers", SUBSETS, ids=str)
def test_full_and_lora_experts(tmp_path: Path, layers: tuple[int, ...]) -> None:
    base = making.checkpoint(tmp_path / "base", 0)
    other = making.checkpoint(tmp_path / "other", 1)
    lora = making.lora(tmp_path / "lora", 2)
    own, full = (load_file(p / "model.safetensors") for p in (base, other))
    models = [own, full, making.with_lora(own, lora)]
    for chosen, state in enumerate(models):
        made = mixture(tmp_path, base, {"other": other, "lora": lora}, layers, chosen)
        ours = tiny.our_logits(load(made), IDS)
        theirs = reference(tmp_path / f"ref{chosen}", making.spliced(own, state, layers))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
        if chosen:
            assert not torch.allclose(ours, tiny.our_logits(load(base), IDS), atol=1e-2)


@pytest.mark.parametrize("layers", SUBSETS, ids=str)
def test_deltas_over_one_shared_mlp(tmp_path: Path, layers: tuple[int, ...]) -> None:
    base = making.checkpoint(tmp_path / "base", 0)
    loras = {name: making.lora(tmp_path / name, seed, rank=2 + seed) for seed, name in
             enumerate(("one", "two"))}  # fmt: skip
    own = load_file(base / "model.safetensors")
    models = [own, *(making.with_lora(own, path) for path in loras.values())]
    for chosen, state in enumerate(models):
        loaded = load(mixture(tmp_path, base, loras, layers, chosen, "delta"))
        theirs = reference(tmp_path / f"ref{chosen}", making.spliced(own, state, layers))
        torch.testing.assert_close(tiny.our_logits(loaded, IDS), theirs, atol=1e-5, rtol=1e-5)
        one_by_one = tiny.our_logits(loaded, IDS, chunk=1)
        torch.testing.assert_close(one_by_one, theirs, atol=1e-5, rtol=1e-5)
        assert isinstance(loaded.model.model.layers[layers[0]].mlp.experts, DeltaExperts)


@pytest.mark.parametrize("form", ["merge", "delta"])
def test_quantized_base_and_experts(tmp_path: Path, form: str) -> None:
    """Quantized weights stay as they are where all are alike; a LoRA makes them dense."""
    layers = (0, 2)
    base = making.checkpoint(tmp_path / "base", 0)
    other = making.checkpoint(tmp_path / "other", 1)
    small = {}
    for name, folder in (("base", base), ("other", other)):
        small[name] = tmp_path / f"{name}-4"
        quantize_checkpoint(folder, small[name], QuantOptions("4"))
    lora = making.lora(tmp_path / "lora", 2)
    own = {k: v.float() for k, v in weights_of(load(small["base"])).items()}
    full = {k: v.float() for k, v in weights_of(load(small["other"])).items()}
    experts = {"other": small["other"]} if form == "merge" else {"lora": lora}
    model = full if form == "merge" else making.with_lora(own, lora)
    made = mixture(tmp_path, small["base"], experts, layers, 1, form)
    loaded = load(made, exact=True)
    theirs = reference(tmp_path / "ref", making.spliced(own, model, layers))
    torch.testing.assert_close(tiny.our_logits(loaded, IDS), theirs, atol=1e-5, rtol=1e-5)
    experts_module = loaded.model.model.layers[0].mlp.experts
    weight = experts_module.c_fc.weight if form == "merge" else experts_module.c_fc.base.weight
    assert weight.scheme == "q4-g64"


def test_experts_of_different_kinds_become_dense(tmp_path: Path) -> None:
    base = making.checkpoint(tmp_path / "base", 0)
    quantize_checkpoint(base, tmp_path / "base-4", QuantOptions("4"))
    lora = making.lora(tmp_path / "lora", 2)
    own = {k: v.float() for k, v in weights_of(load(tmp_path / "base-4")).items()}
    made = mixture(tmp_path, tmp_path / "base-4", {"lora": lora}, (1,), 1)
    loaded = load(made, exact=True)
    state = making.spliced(own, making.with_lora(own, lora), (1,))
    theirs = reference(tmp_path / "ref", state)
    torch.testing.assert_close(tiny.our_logits(loaded, IDS), theirs, atol=1e-5, rtol=1e-5)
    assert loaded.model.model.layers[1].mlp.experts.c_fc.weight.scheme == "float32"


def test_deltas_take_little_more_than_the_adapters(tmp_path: Path) -> None:
    base = making.checkpoint(tmp_path / "base", 0)
    loras = {f"e{seed}": making.lora(tmp_path / f"e{seed}", seed) for seed in range(4)}
    layers = (0, 1, 2)
    loaded = load(mixture(tmp_path, base, loras, layers, 0, "delta"))

    def held(model: torch.nn.Module) -> int:
        return sum(m.weight.nbytes for m in model.modules() if hasattr(m, "weight"))

    stacks = [m for n, m in loaded.model.named_modules() if n.endswith((".a", ".b"))]
    size = sum(m.weight.nbytes for m in stacks)
    files = sum((path / "adapter_model.safetensors").stat().st_size for path in loras.values())
    assert len(stacks) == 12
    assert size <= 1.3 * files
    gates = sum(layer.mlp.gate.weight.nbytes for layer in loaded.model.model.layers)
    assert held(loaded.model) - held(load(base).model) == size + gates


def test_delta_refuses_what_it_cannot_hold(tmp_path: Path) -> None:
    base = making.checkpoint(tmp_path / "base", 0)
    other = making.checkpoint(tmp_path / "other", 1)
    with pytest.raises(AdapterError, match="whole checkpoint, which cannot be kept as a delta"):
        mixture(tmp_path, base, {"other": other}, (0,), 0, "delta")
    assert not list(tmp_path.glob("*mix*"))


def test_what_is_not_an_expert_is_the_base_to_the_bit(tmp_path: Path) -> None:
    base = making.checkpoint(tmp_path / "base", 0)
    before = (base / "model.safetensors").read_bytes()
    other = making.checkpoint(tmp_path / "other", 1)
    made = mixture(tmp_path, base, {"other": other}, (1,), 1)
    own, mixed = (load_file(p / "model.safetensors") for p in (base, made))
    kept = [name for name in own if not name.startswith("model.layers.1.mlp.")]
    assert len(kept) == len(own) - 4
    assert all(torch.equal(own[name], mixed[name]) for name in kept)
    full = load_file(other / "model.safetensors")
    stack = mixed["model.layers.1.mlp.switch_mlp.c_fc.weight"]
    assert torch.equal(stack[0], own["model.layers.1.mlp.c_fc.weight"])
    assert torch.equal(stack[1], full["model.layers.1.mlp.c_fc.weight"])
    assert (base / "model.safetensors").read_bytes() == before
