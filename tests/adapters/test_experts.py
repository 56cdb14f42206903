"""Adapters of mixtures: on attention and router; on single experts they are refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from starquill.adapters.store import AdapterStore
from starquill.errors import UnsupportedError
from starquill.loading import load
from starquill.merging import merge_checkpoint
from tests import moe
from tests.adapters import making

FAMILY = "starcoder2_moe"


def adapted(top: Path, **options: Any) -> tuple[Path, Path, Tensor]:
    """A base, an adapter for it, and PEFT's logits `[T, V]`."""
    raw = moe.config(FAMILY)
    model = moe.reference(raw)
    base = moe.write(top / "base", raw, model)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, config).eval()
    making.randomize({n: p for n, p in wrapped.named_parameters() if p.requires_grad}, 1)
    logits = moe.logits(wrapped, making.IDS)
    return base, making.save(wrapped, top / "adapter"), logits


def test_attention_and_router(tmp_path: Path) -> None:
    """While it acts, and merged."""
    torch.set_num_threads(1)
    base, adapter, expected = adapted(tmp_path, target_modules=["q_proj", "o_proj", "gate"])
    loaded = load(base)
    store = AdapterStore(loaded)
    store.load("it", adapter)
    torch.testing.assert_close(making.logits(loaded, store, {"it": 1}), expected, rtol=0, atol=1e-4)
    merge_checkpoint(base, {str(adapter): 1.0}, tmp_path / "merged")
    merged = making.logits(load(tmp_path / "merged"))
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-4)


def test_single_experts_are_refused_by_name(tmp_path: Path) -> None:
    base, adapter, _ = adapted(tmp_path, target_modules=["q_proj", "c_fc"])
    store = AdapterStore(load(base))
    with pytest.raises(UnsupportedError, match=r"single experts \(.*\.experts\.0\.c_fc\.lora_A"):
        store.load("it", adapter)
    assert store.list() == ()
