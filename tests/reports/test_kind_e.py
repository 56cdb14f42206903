"""Kind e: experts. Each docstring names the report and the fault that users of others met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError
from starquill.loading import load
from starquill.nn.linear import Linear
from starquill.quant.affine import AffineWeight
from starquill.quantizing import QuantOptions, quantize_checkpoint
from tests import moe, tiny

FAMILIES = tuple(moe.RAW)


def _source(folder: Path, family: str, **changes: Any) -> Path:
    raw = moe.config(family, **changes)
    return moe.write(folder / "source", raw, moe.reference(raw).to(torch.bfloat16))


def _weights(loaded: LoadedModel) -> dict[str, Any]:
    return {n: m.weight for n, m in loaded.model.named_modules() if hasattr(m, "weight")}


def _routers(loaded: LoadedModel) -> dict[str, Any]:
    return {n: w for n, w in _weights(loaded).items() if n.endswith(".mlp.gate")}


# --- B58: router quantized with the experts ---

# Every way to ask for few bits of everything, and patterns around the router that do not name it.
REQUESTS: dict[str, dict[str, Any]] = {
    "a scheme": {},
    "a recipe": {"scheme": "mixed-2-6"},
    "all by regex": {"overrides": (".*=4",)},
    "the MLPs by regex": {"overrides": (r"\.mlp\.=2",)},
    "whole layers by regex": {"overrides": (r"layers\.\d\.=3",)},
    "every weight by regex": {"overrides": (r"\.weight$=3",)},
}


@pytest.mark.parametrize("experts", [3, 8])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", REQUESTS)
def test_b58_routers_stay_as_they_are(tmp_path: Path, name: str, family: str, experts: int) -> None:
    """B58: a router at 2 bits chooses other experts. Here it stays, to the byte, whatever is asked
    for the rest; 3 experts, because others told routers by a height of 8."""
    key = "num_local_experts" if "num_local_experts" in moe.RAW[family] else "num_experts"
    folder = _source(tmp_path, family, **{key: experts})
    options = QuantOptions(**{"scheme": "2", **REQUESTS[name]})
    plain, loaded = load(folder), load(folder, quant=options)
    result = quantize_checkpoint(folder, tmp_path / "out", options)
    for found in (loaded, load(tmp_path / "out")):
        assert len(_routers(found)) == 2
        for path, weight in _routers(found).items():
            assert weight.data.dtype == torch.bfloat16
            assert torch.equal(weight.data, _routers(plain)[path].data)
        others = {n: w for n, w in _weights(found).items() if ".experts." in n}
        assert others
        assert all(isinstance(w, AffineWeight) for w in others.values())
    # The report counts what was quantized by its class, and says that routers were not.
    assert f"experts {len(others)}" in result.summary
    assert "attention 8" in result.summary
    assert "mlp.gate.weight (a router)" in result.summary
    assert not any(part.startswith("router") for part in result.summary.split("; ")[1].split(", "))


def test_b58_routers_stay_by_a_topology_of_layers(tmp_path: Path) -> None:
    """B58: layers are named, not the routers in them."""
    folder, topology = _source(tmp_path, "qwen3_moe"), tmp_path / "topology.yaml"
    topology.write_text('"0-1": {quant: 2}\n"/experts/": {quant: 3}\n')
    loaded = load(folder, quant=QuantOptions("8", topology=topology))
    assert {w.scheme for w in _routers(loaded).values()} == {"bfloat16"}
    bits = {n: w.bits for n, w in _weights(loaded).items() if isinstance(w, AffineWeight)}
    assert {b for n, b in bits.items() if ".experts." in n} == {3}
    assert {b for n, b in bits.items() if ".self_attn." in n} == {2}


def test_b58_a_router_that_is_named_is_quantized(tmp_path: Path) -> None:
    """B58: who names it, means it."""
    folder = _source(tmp_path, "mixtral")
    options = QuantOptions("2", overrides=(r"layers\.1\.mlp\.gate\.=8",))
    first, second = _routers(load(folder, quant=options)).values()
    assert (first.scheme, second.scheme) == ("bfloat16", "q8-g64")


def test_b58_experts_alone(tmp_path: Path) -> None:
    """B58: attention and embedding asked to stay do so to the byte, beside 2-bit experts."""
    folder, out = _source(tmp_path, "starcoder2_moe"), tmp_path / "out"
    overrides = ("^((?!experts).)*$=dense",)
    result = quantize_checkpoint(folder, out, QuantOptions("2", overrides=overrides))
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    kept = [n for n in before if ".experts." not in n]
    assert {n for n in after if "switch_mlp" not in n} == set(kept)
    for name in kept:
        assert torch.equal(after[name], before[name]), name
    assert result.summary.split("; ")[2].startswith("experts 4")
    loaded = load(out)
    assert {m.weight.scheme for m in loaded.model.modules() if isinstance(m, Linear)} == {
        "bfloat16"
    }


def test_b58_experts_of_a_dense_model(tmp_path: Path) -> None:
    """B58: where there are none, to ask for them is an error and no quiet nothing."""
    folder = tiny.write_checkpoint(tmp_path)
    with pytest.raises(BadRequestError, match=r"'experts' finds no weight"):
        load(folder, quant=QuantOptions("4", overrides=("experts=2",)))
