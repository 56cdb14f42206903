"""GPTQ and AWQ: packed here as AutoGPTQ and AutoAWQ pack, read to the same weights."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from starquill import loading
from starquill.errors import CheckpointError, UnsupportedError
from tests import tiny

load = functools.partial(loading.load, exact=True)  # to compare closely

GROUP = 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's order_map
FC = "model.layers.0.mlp.c_fc"


def _as_int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _stream(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of integers as rows of 32-bit words, one bit after another."""
    places = (values[..., None] >> np.arange(bits)) & 1
    flat = places.reshape(len(values), -1, 32).astype(np.uint64)
    return (flat << np.arange(32, dtype=np.uint64)).sum(-1)


def _parts(out: int, width: int, bits: int, rng: np.random.Generator) -> tuple[Any, ...]:
    groups = width // GROUP
    q = rng.integers(0, 2**bits, (out, width))
    zeros = rng.integers(1, 2**bits, (groups, out))
    scales = torch.from_numpy(rng.uniform(0.005, 0.02, (groups, out))).half()
    return q, zeros, scales


def _gptq(out: int, width: int, bits: int, rng: np.random.Generator, act_order: bool) -> Any:
    """The tensors of one GPTQ module, and the weights they stand for."""
    q, zeros, scales = _parts(out, width, bits, rng)
    g_idx = np.arange(width) // GROUP
    if act_order:
        rng.shuffle(g_idx)
    weight = scales.float().numpy()[g_idx].T * (q - zeros[g_idx].T)
    tensors = {
        "qweight": _as_int32(_stream(q, bits).T),
        "qzeros": _as_int32(_stream(zeros - 1, bits)),
        "scales": scales,
        "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }
    return tensors, torch.from_numpy(weight).float()


def _awq(out: int, width: int, rng: np.random.Generator) -> Any:
    q, zeros, scales = _parts(out, width, 4, rng)
    group_of = np.arange(width) // GROUP
    weight = scales.float().numpy()[group_of].T * (q - zeros[group_of].T)

    def packed(values: np.ndarray) -> Tensor:
        blocks = values.reshape(len(values), -1, 8)[..., AWQ_ORDER].astype(np.uint64)
        return _as_int32((blocks << (4 * np.arange(8, dtype=np.uint64))).sum(-1))

    tensors = {"qweight": packed(q.T), "qzeros": packed(zeros), "scales": scales}
    return tensors, torch.from_numpy(weight).float()


def _checkpoint(folder: Path, method: dict[str, Any], make: Any) -> tuple[Path, dict[str, Tensor]]:
    """A tiny checkpoint whose layers' matrices are packed; and its weights, dense."""
    raw = tiny.config(quantization_config=method)
    dense = tiny.weights(tiny.config())
    stored = dict(dense)
    for name in [n for n in dense if ".layers." in n and dense[n].ndim == 2]:
        module = name.removesuffix(".weight")
        tensors, weight = make(*dense[name].shape)
        del stored[name]
        stored |= {f"{module}.{part}": t.contiguous() for part, t in tensors.items()}
        dense[name] = weight
    tiny.write_checkpoint(folder, raw, stored)
    return folder, dense


def _same_logits(folder: Path, dense: dict[str, Tensor]) -> None:
    ids = tiny.random_ids(20)
    ours = tiny.our_logits(load(folder), ids)
    expected = tiny.reference_logits(tiny.config(), dense, ids)
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(tmp_path: Path, bits: int, act_order: bool) -> None:
    rng = np.random.default_rng(bits)
    method = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order}
    folder, dense = _checkpoint(tmp_path, method, lambda o, i: _gptq(o, i, bits, rng, act_order))
    weight = load(folder).model.model.layers[0].mlp.c_fc.weight
    torch.testing.assert_close(weight.dequantize(), dense[f"{FC}.weight"], atol=1e-5, rtol=0)
    _same_logits(folder, dense)


def test_awq(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    method = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    folder, dense = _checkpoint(tmp_path, method, lambda o, i: _awq(o, i, rng))
    _same_logits(folder, dense)


@pytest.mark.parametrize(
    "method",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
        {"quant_method": "awq", "bits": 3, "group_size": 32},
        {"quant_method": "gptq", "bits": 5, "group_size": 32},
        {"quant_method": "gptq", "bits": 4, "group_size": 48},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ],
    ids=lambda m: f"{m['quant_method']}-{m.get('bits')}",
)
def test_other_methods_are_named(tmp_path: Path, method: dict[str, Any]) -> None:
    tiny.write_checkpoint(tmp_path, tiny.config(quantization_config=method))
    with pytest.raises(UnsupportedError, match=r"implemented: "):
        load(tmp_path)


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_parts_that_do_not_fit_are_named(tmp_path: Path, part: str) -> None:
    rng = np.random.default_rng(0)
    method = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}

    def make(out: int, width: int) -> Any:
        tensors, weight = _gptq(out, width, 4, rng, act_order=False)
        return {**tensors, part: tensors[part][:1]}, weight

    folder, _ = _checkpoint(tmp_path, method, make)
    with pytest.raises(CheckpointError, match=rf"{FC} has {part} \[1, \d+\]"):
        load(folder)
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == method
