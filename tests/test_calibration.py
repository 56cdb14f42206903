"""Second moments of activations against a plain forward pass, and llama.cpp's imatrix."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from starquill.calibration import read_imatrix, second_moments
from starquill.errors import CheckpointError
from starquill.loading import load
from starquill.models.starcoder2 import GGUF
from starquill.quantizing import QuantOptions
from tests import tiny


def test_second_moments_equal_transformers(tmp_path: Path) -> None:
    """Of every Linear's input, over texts of several lengths, past the window."""
    raw = tiny.config()
    state = tiny.weights(raw)
    loaded = load(tiny.write_checkpoint(tmp_path, raw, state))
    texts = [tiny.random_ids(n, seed=n) for n in (5, 30)]
    ours = second_moments(loaded.model, loaded.config, texts, torch.float32)
    reference = tiny.reference_model(raw, state)
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str) -> None:
        def hook(_: object, inputs: tuple[torch.Tensor], __: object) -> None:
            square = inputs[0].flatten(0, -2).square().sum(0)
            sums[name] = sums.get(name, torch.zeros(())) + square

        reference.get_submodule(name).register_forward_hook(hook)

    names = [name.removesuffix(".weight") for name in ours]
    for name in names:
        watch(name)
    with torch.inference_mode():
        for ids in texts:
            reference(torch.tensor([ids]))
    assert len(names) == 13  # six a layer and the head
    for name in names:
        torch.testing.assert_close(ours[f"{name}.weight"], sums[name] / 35, atol=1e-4, rtol=1e-4)


def test_calibration_changes_the_integers_and_nothing_stays_behind(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    text = tmp_path / "code.py"
    text.write_text("def f(x):\n    return x\n")
    plain = load(folder, quant="2-rtn")
    calibrated = load(folder, quant=QuantOptions("2-rtn", calibrate=text))
    ours, theirs = (m.model.model.layers[0].mlp.c_proj.weight for m in (plain, calibrated))
    assert type(ours) is type(theirs)
    assert not torch.equal(ours.packed, theirs.packed)


def _imatrix(entries: dict[str, np.ndarray], calls: int = 2) -> bytes:
    data = struct.pack("<i", len(entries))
    for name, values in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", calls, len(values)) + values.astype(np.float32).tobytes()
    return data


def test_imatrix(tmp_path: Path) -> None:
    path = tmp_path / "code.imatrix"
    path.write_bytes(_imatrix({"blk.1.ffn_up.weight": np.arange(64)}))
    ((name, values),) = read_imatrix(path, GGUF).items()
    assert name == "model.layers.1.mlp.c_fc.weight"
    assert values.tolist() == [n / 2 for n in range(64)]


@pytest.mark.parametrize("cut", [1, 6, 20, 100])
def test_a_cut_imatrix_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "code.imatrix"
    path.write_bytes(_imatrix({"blk.1.ffn_up.weight": np.arange(64)})[:cut])
    with pytest.raises(CheckpointError, match="no imatrix file"):
        read_imatrix(path, GGUF)
