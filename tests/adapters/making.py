"""Adapters that PEFT itself makes, random all over, and what it computes with them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from starquill.adapters.store import AdapterStore
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.loading import load
from starquill.nn.cache import blocks_for
from starquill.nn.linear import Embedding, Linear
from tests import tiny

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"]
IDS = tiny.random_ids(20)
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def base(folder: Path, **options: Any) -> LoadedModel:
    """A tied model; `peft_folder` makes adapters for it."""
    return load(tiny.write_checkpoint(folder / "base"), **options)


def weights_of(loaded: LoadedModel) -> dict[str, Tensor]:
    """The model's tensors, written out where they are quantized."""
    state = {name: value.data for name, value in loaded.model.named_parameters()}
    for path, module in loaded.model.named_modules():
        if isinstance(module, Linear | Embedding) and path != "lm_head":
            state[f"{path}.weight"] = module.weight.dequantize()
    return state


def randomize(parameters: Mapping[str, Tensor], seed: int) -> None:
    """What an adapter learns, so far from its beginning that nothing of it goes unseen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in parameters.items():
            noise = torch.randn(value.shape, generator=generator)
            if "magnitude" in name:
                value.mul_(1 + 0.3 * noise.abs())
            elif "lora_" in name:
                value.copy_(0.3 * noise)
            else:
                value.add_(0.2 * noise)


def peft_model(state: Mapping[str, Tensor] | None, seed: int, options: Mapping[str, Any]) -> Any:
    import peft

    raw = tiny.config()
    model = tiny.reference_model(raw, dict(state or tiny.weights(raw)))
    config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": ALL, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, config).eval()
    randomize({n: p for n, p in wrapped.named_parameters() if p.requires_grad}, seed)
    return wrapped


def save(model: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def peft_folder(
    folder: Path, seed: int = 0, state: Mapping[str, Tensor] | None = None, **options: Any
) -> tuple[Path, Tensor]:
    """An adapter's folder, and PEFT's logits `[T, V]` for `IDS` with it."""
    model = peft_model(state, seed, options)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return save(model, folder), logits


def logits(
    loaded: LoadedModel,
    store: AdapterStore | None = None,
    adapters: Mapping[str, float] | None = None,
    ids: Sequence[int] = IDS,
) -> Tensor:
    """Ours `[T, V]`, the prompt in one piece."""
    runner = Runner(loaded, blocks_for(len(ids)))
    place = runner.cache.place(len(ids))
    if store is None:
        return runner.all_logits(runner.advance(place, ids))
    with store.lease(adapters or {}) as lease:
        mix = store.mix_of([lease], [1])
        return runner.all_logits(runner.advance(place, ids, mix), mix)


def decoded(
    loaded: LoadedModel, store: AdapterStore, adapters: Mapping[str, float], ids: Sequence[int]
) -> Tensor:
    """Ours `[T, V]`, token by token."""
    runner = Runner(loaded, blocks_for(len(ids)))
    place = runner.cache.place(len(ids))
    with store.lease(adapters) as lease:
        mix = store.mix_of([lease], [1])
        return torch.cat([runner.decode([place], [[token]], mix) for token in ids])


def change_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / CONFIG).read_text())
    tiny.write_json(folder / CONFIG, {**raw, **changes})


def change_tensors(
    folder: Path, change: Callable[[dict[str, Tensor]], Any], file: str = FILE
) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
