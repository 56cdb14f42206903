"""`LoadedModel.requantize`: the same bits as loading so, matrix by matrix, none half-changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from starquill import requantizing
from starquill.checkpoint.source import SafetensorsSource
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError, NumericsError, UnsupportedError
from starquill.loading import load
from starquill.nn.linear import Embedding, Linear
from starquill.quantizing import QuantOptions, quantize_checkpoint
from tests import tiny


def _weights(loaded: LoadedModel) -> dict[str, Any]:
    modules = loaded.model.named_modules()
    return {path: m.weight for path, m in modules if isinstance(m, Linear | Embedding)}


def _assert_same(one: LoadedModel, other: LoadedModel) -> None:
    for name, weight in _weights(one).items():
        theirs = _weights(other)[name]
        assert weight.scheme == theirs.scheme, name
        assert torch.equal(weight.dequantize(), theirs.dequantize()), name
    ids = tiny.random_ids(9)
    assert torch.equal(tiny.our_logits(one, ids), tiny.our_logits(other, ids))


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "own head"])
def test_it_equals_loading_so(tmp_path: Path, tie: bool) -> None:
    raw = tiny.config(tie_word_embeddings=tie)
    folder = tiny.write_checkpoint(tmp_path, raw, tiny.weights(raw, head=not tie))
    loaded = load(folder)
    for quant in (
        "4",
        "mixed-2-6",
        QuantOptions("3", (r"q_proj=8", r"c_fc=dense")),
        None,
        "q8-g32",
    ):
        report = loaded.requantize(quant)
        _assert_same(loaded, load(folder, quant=quant))
        assert report.kept == {}
        assert report.changed == 2 * 6 + 1 + (not tie)
        assert bool(report.summary) == (quant is not None)
        head, embedding = _weights(loaded)["lm_head"], _weights(loaded)["model.embed_tokens"]
        assert (head is embedding) == tie


@pytest.mark.parametrize("error", [NumericsError("odd"), OSError("gone"), MemoryError()])
def test_a_matrix_that_fails_keeps_its_old_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    loaded = load(tiny.write_checkpoint(tmp_path), quant="8")
    before = _weights(loaded)
    plain = requantizing.apply_isq

    def fails(plan: Any, name: str, value: Any) -> Any:
        if "layers.1.mlp" in name:
            raise error
        return plain(plan, name, value)

    monkeypatch.setattr(requantizing, "apply_isq", fails)
    report = loaded.requantize("4")
    names = {"model.layers.1.mlp.c_fc.weight", "model.layers.1.mlp.c_proj.weight"}
    assert report.kept.keys() == names
    assert all(report.kept.values())
    for name, weight in _weights(loaded).items():
        kept = f"{name}.weight" in names
        assert (weight is before[name]) == kept
        assert weight.scheme.startswith("q8" if kept else ("q4", "q6"))
    assert bool(tiny.our_logits(loaded, tiny.random_ids(5)).isfinite().all())


def test_a_file_that_is_gone_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny.write_checkpoint(tmp_path))
    before = _weights(loaded)

    def gone(*_: Any) -> Any:
        raise FileNotFoundError("model.safetensors")

    monkeypatch.setattr(SafetensorsSource, "read", gone)
    report = loaded.requantize("4")
    assert report.changed == 0
    assert set(report.kept.values()) == {"model.safetensors"}
    assert _weights(loaded) == before


def test_what_makes_no_sense_is_refused_before_anything_changes(tmp_path: Path) -> None:
    source = tiny.write_checkpoint(tmp_path / "m")
    loaded = load(source)
    before = _weights(loaded)
    with pytest.raises(BadRequestError, match="unknown quantization scheme"):
        loaded.requantize("7")
    with pytest.raises(BadRequestError, match="finds no weight"):
        loaded.requantize(QuantOptions("4", ("nothing=8",)))
    assert _weights(loaded) == before
    quantize_checkpoint(source, tmp_path / "q", QuantOptions("4"))
    with pytest.raises(UnsupportedError, match="quantized already"):
        load(tmp_path / "q").requantize("3")
