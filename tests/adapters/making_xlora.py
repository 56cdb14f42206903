"""X-LoRA as PEFT computes it, and its tensors in both published forms."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from starquill.checkpoint.files import read_json
from tests import tiny
from tests.adapters import making

COUNT = 3
HEAD = "internal_xlora_classifier.layers."
FORMS = ("xlora", "peft")
Acting = tuple[Tensor, Tensor]


def adapters(top: Path, state: Mapping[str, Tensor] | None = None) -> list[Path]:
    """Folders "0", "1", "2": ranks, and modules, differ."""
    targets = (["q_proj", "c_fc"], making.ALL, ["c_fc", "v_proj"])
    return [
        making.peft_folder(top / str(i), i, state, r=2 + i, target_modules=targets[i])[0]
        for i in range(COUNT)
    ]


def reference(
    folders: Sequence[Path], state: Mapping[str, Tensor] | None = None, **options: Any
) -> Any:
    """PEFT's `XLoraModel` over them, its classifier random and far from even."""
    import peft

    raw = tiny.config(use_cache=False)
    model = tiny.reference_model(raw, dict(state or tiny.weights(raw)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.XLoraConfig(
            task_type="CAUSAL_LM",
            hidden_size=64,
            adapters={str(i): str(folder) for i, folder in enumerate(folders)},
            **{"xlora_size": 16, **options},
        )
        wrapped = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            if HEAD in name:
                value.copy_(0.4 * torch.randn(value.shape, generator=generator))
    return wrapped


def computed(model: Any, ids: Sequence[int] = making.IDS) -> Acting:
    """PEFT's logits `[T, V]`, and its scalings as they act, `[T, M, K]`."""
    from peft.tuners.xlora.layer import XLoraLayer

    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    scalings = model.get_latest_scalings()
    config = model.base_model.xlora_config
    layers = [XLoraLayer(None, None, None, n, config) for n in range(scalings.shape[2])]
    acting = [layer.get_maybe_topk_scalings(scalings)[0] for layer in layers]
    return logits, torch.stack(acting, 1)


def write(folder: Path, model: Any, folders: Sequence[Path], form: str) -> Path:
    """The same X-LoRA in one of the two forms."""
    folder.mkdir(parents=True)
    config = model.base_model.xlora_config
    if form == "peft":
        return _write_peft(folder, model)
    names = [f"adapter_{8 + i}" for i in range(len(folders))]
    for name, source in zip(names, folders, strict=True):
        shutil.copytree(source, folder / name)
    _write_xlora(folder, model, names)
    assert config.xlora_depth == read_json(folder / "xlora_config.json")["xlora_depth"]
    return folder


def _write_xlora(folder: Path, model: Any, names: Sequence[str]) -> None:
    config = model.base_model.xlora_config
    keys = [
        *("hidden_size", "enable_softmax", "enable_softmax_topk", "layerwise_scalings"),
        *("xlora_depth", "xlora_size", "xlora_dropout_p", "softmax_temperature", "top_k_lora"),
        *("scaling_pass_value", "global_scaling_weight", "use_trainable_adapters"),
    ]
    raw = {key: getattr(config, key) for key in keys}
    tiny.write_json(folder / "xlora_config.json", {**raw, "adapters": list(names)})
    last = f"{HEAD}{(config.xlora_depth - 1) * 3}."
    tensors = {}
    for name, value in model.state_dict().items():
        if HEAD in name:
            own = name[name.index(HEAD) :]
            own = own.replace(last, "last.") if last in own else own.replace(HEAD, "inner.")
            tensors[own] = value.clone()
    save_file(tensors, folder / "xlora_classifier.safetensors")


def _write_peft(folder: Path, model: Any) -> Path:
    """PEFT's save, with the tensors that it leaves out."""
    making.save(model, folder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({n: v for n, v in state.items() if HEAD in n}, folder / making.FILE)
    for i in range(COUNT):
        own = {}
        for name, value in state.items():
            if f".{i}.weight" in name and ".lora_" in name:
                own[name.replace(f".{i}.weight", ".weight")] = value
            elif ".lora_" not in name and "embed" not in name:
                own[name] = value
        save_file(own, folder / str(i) / making.FILE)
    return folder


def change(folder: Path, **changes: Any) -> None:
    """In whichever config the folder has."""
    path = folder / "xlora_config.json"
    path = path if path.exists() else folder / making.CONFIG
    raw = {**json.loads(path.read_text()), **changes}
    tiny.write_json(path, {key: value for key, value in raw.items() if value is not ...})
