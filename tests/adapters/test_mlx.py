"""MLX's adapters: turned round, scaled as they say, and nothing taken that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from starquill.adapters.store import AdapterStore
from starquill.errors import AdapterError, UnsupportedError
from tests import tiny
from tests.adapters import making

FILE = "adapters.safetensors"
NAMES = {
    "lora_A.weight": "lora_a",
    "lora_B.weight": "lora_b",
    "lora_embedding_A": "lora_a",
    "lora_embedding_B": "lora_b",
    "lora_magnitude_vector": "m",
}


def as_mlx(peft: Path, folder: Path, kind: str = "lora", **parameters: Any) -> Path:
    """The same adapter as MLX saves it, from one that PEFT made."""
    folder.mkdir()
    turned: dict[str, Tensor] = {}
    for name, tensor in load_file(peft / making.FILE).items():
        ours = name.removeprefix("base_model.model.")
        for theirs, mlx in NAMES.items():
            if ours.endswith(theirs):
                path = ours.removesuffix(theirs)
                turned[path + mlx] = tensor if mlx == "m" else tensor.T.contiguous()
    save_file(turned, folder / FILE)
    config = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters}
    tiny.write_json(folder / making.CONFIG, config)
    return folder


@pytest.mark.parametrize("dora", [False, True])
def test_same_logits_as_pefts_form(tmp_path: Path, dora: bool) -> None:
    """q_proj and o_proj are square, and their A and B at rank 64 too: a turn missed would load."""
    folder, expected = making.peft_folder(tmp_path / "peft", r=64, lora_alpha=32, use_dora=dora)
    mlx = as_mlx(folder, tmp_path / "mlx", "dora" if dora else "lora", rank=64, scale=0.5)
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded)
    assert store.load("it", mlx).form == "MLX"
    torch.testing.assert_close(making.logits(loaded, store, {"it": 1}), expected, rtol=0, atol=1e-4)


def test_an_embeddings_adapter_acts_on_the_tied_head_too(tmp_path: Path) -> None:
    options = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "r": 4}
    folder, expected = making.peft_folder(tmp_path / "peft", lora_alpha=8, **options)
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded)
    store.load("it", as_mlx(folder, tmp_path / "mlx", rank=4, scale=2.0))
    torch.testing.assert_close(making.logits(loaded, store, {"it": 1}), expected, rtol=0, atol=1e-4)


def test_full_fine_tunes_hold_whole_weights(tmp_path: Path) -> None:
    """The last layer's, its norms too."""
    raw, folder = tiny.config(), tmp_path / "mlx"
    state = tiny.weights(raw)
    generator = torch.Generator().manual_seed(3)
    tuned = {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in state.items()
        if ".layers.1." in name
    }
    folder.mkdir()
    save_file(tuned, folder / FILE)
    tiny.write_json(folder / making.CONFIG, {"fine_tune_type": "full", "num_layers": 1})
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded)
    store.load("it", folder)
    expected = tiny.reference_logits(raw, {**state, **tuned}, making.IDS)
    torch.testing.assert_close(making.logits(loaded, store, {"it": 1}), expected, rtol=0, atol=1e-4)
    norm = "model.layers.1.input_layernorm.weight"
    making.change_tensors(folder, lambda t: t.update({norm: t[norm][1:].clone()}), file=FILE)
    with pytest.raises(AdapterError, match=rf"{norm} is \[63\] \(expected \[64\]\)"):
        store.load("it", folder)


def test_layers_count_from_the_end(tmp_path: Path) -> None:
    folder, expected = making.peft_folder(tmp_path / "peft", layers_to_transform=[1])
    mlx = as_mlx(folder, tmp_path / "mlx", rank=8, scale=1.0)
    making.change_config(mlx, num_layers=1)
    loaded = making.base(tmp_path)
    store = AdapterStore(loaded)
    store.load("it", mlx)
    torch.testing.assert_close(making.logits(loaded, store, {"it": 1}), expected, rtol=0, atol=1e-4)
    first, _ = making.peft_folder(tmp_path / "first", layers_to_transform=[0])
    wrong = as_mlx(first, tmp_path / "wrong", rank=8, scale=1.0)
    making.change_config(wrong, num_layers=1)
    with pytest.raises(AdapterError, match="layer before 1"):
        store.load("it", wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_parameters": {"rank": 8, "alpha": 16}}, "MLX has no alpha"),
        ({"lora_parameters": {"rank": 4, "scale": 1.0}}, "rank 8, and lora_parameters says 4"),
        ({"lora_parameters": [8]}, "lora_parameters"),
        ({"num_layers": "all"}, "num_layers"),
        ({"fine_tune_type": "dora"}, "no m"),
    ],
    ids=str,
)
def test_contradictions_are_errors(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder, _ = making.peft_folder(tmp_path / "peft")
    mlx = as_mlx(folder, tmp_path / "mlx", rank=8, scale=1.0)
    making.change_config(mlx, **changes)
    with pytest.raises(AdapterError, match=said):
        AdapterStore(making.base(tmp_path)).load("it", mlx)


def test_other_kinds_are_named(tmp_path: Path) -> None:
    folder, _ = making.peft_folder(tmp_path / "peft")
    mlx = as_mlx(folder, tmp_path / "mlx", rank=8, scale=1.0)
    making.change_config(mlx, fine_tune_type="galore")
    with pytest.raises(UnsupportedError, match="galore"):
        AdapterStore(making.base(tmp_path)).load("it", mlx)
