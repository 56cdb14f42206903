"""StarCoder2 against transformers, over what its config can say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from starquill.engine.runner import Runner
from starquill.loading import load
from tests import tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "as published": {},
    "no window": {"sliding_window": None},
    "window key absent": {"sliding_window": ...},
    "window longer than text": {"sliding_window": 64},
    "window of one": {"sliding_window": 1},
    "no biases": {"use_bias": False},
    "one KV head": {"num_key_value_heads": 1},
    "KV heads = heads": {"num_key_value_heads": 4},
    "head_dim given": {"head_dim": 32},
    "exact GELU": {"hidden_act": "gelu"},
    "SiLU": {"hidden_act": "silu"},
    "theta of the 3B": {"rope_theta": 999999.4420358813},
    "nested default": {
        "rope_theta": ...,
        "rope_parameters": {"rope_type": "default", "rope_theta": 12345.0},
    },
    "nested linear": {
        "rope_theta": ...,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    },
    "old linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic within context": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "dynamic past context": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 16,
    },
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn with everything": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e4,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
        }
    },
}


@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, name: str, head: bool) -> None:
    raw = tiny.config(**VARIANTS[name], tie_word_embeddings=not head)
    state = tiny.weights(raw, head)
    ids = tiny.random_ids(40)
    loaded = load(tiny.write_checkpoint(tmp_path, raw, state))
    ours = tiny.our_logits(loaded, ids)
    torch.testing.assert_close(ours, tiny.reference_logits(raw, state, ids), atol=1e-4, rtol=0)
    for chunk in (1, 5, 8, 13):
        torch.testing.assert_close(tiny.our_logits(loaded, ids, chunk), ours, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [True, False])
def test_logits_equal_the_fixture(tmp_path: Path, window: bool) -> None:
    import json
    import shutil

    data = tiny.DATA / "starcoder2-tiny"
    folder = tmp_path / "model"
    shutil.copytree(data, folder)
    raw = json.loads((folder / "config.json").read_text())
    if not window:
        tiny.write_json(folder / "config.json", {**raw, "sliding_window": None})
    ids = np.load(data / "ids.npy").tolist()
    expected = np.load(data / f"logits-hf-f32{'' if window else '-nowindow'}.npy")
    loaded = load(folder)
    for chunk in (None, 1, 7, 16, 17):
        ours = tiny.our_logits(loaded, ids, chunk).numpy()
        assert np.abs(ours - expected).max() < 1e-4


def test_rows_of_a_batch_do_not_touch(tmp_path: Path) -> None:
    """Rows of different lengths, past the window, each equal to running alone."""
    loaded = tiny.load_tiny(tmp_path)
    texts = [tiny.random_ids(n, seed=n) for n in (3, 9, 20)]
    runner = Runner(loaded, 6)
    places = [runner.cache.place(64) for _ in texts]
    for place, ids in zip(places, texts, strict=True):
        runner.prefill(place, ids[:-1])
    together = runner.decode(places[::-1], [ids[-1:] for ids in texts[::-1]]).flip(0)
    for row, ids in zip(together, texts, strict=True):
        torch.testing.assert_close(row, tiny.our_logits(loaded, ids)[-1], atol=2e-5, rtol=0)
