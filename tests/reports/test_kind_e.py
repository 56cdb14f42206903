"""Kind e: experts. Each docstring names the report and the fault that users of others met."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from starquill import requantizing
from starquill.calibration import second_moments
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError
from starquill.loading import load
from starquill.nn.linear import Linear
from starquill.quant.affine import AffineWeight
from starquill.quantizing import QuantOptions, plan_checkpoint, quantize_checkpoint
from starquill.types import SamplingParams
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


@pytest.mark.parametrize("family", FAMILIES)
def test_b58_moqe_quantizes_experts_and_nothing_else(tmp_path: Path, family: str) -> None:
    """B58: by the organization of that name; the rest is the source to the byte, and the report
    counts what was quantized and what was left, by class."""
    folder, out = _source(tmp_path, family), tmp_path / "out"
    options = QuantOptions("2", organization="moqe")
    result = quantize_checkpoint(folder, out, options)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    kept = [n for n in before if ".experts." not in n]
    assert [n for n in kept if ".gate." in n or "router" in n]
    for name in kept:
        found = after.get(name, after.get(name.replace("block_sparse_moe", "mlp")))
        assert found is not None, name
        assert torch.equal(found, before[name]), name
    routers = [n for n in _routers(load(out)) if ".mlp.gate" in n]
    assert len(routers) == 2
    experts = 4 if family == "starcoder2_moe" else 6
    assert f"; experts {experts};" in result.summary
    assert "left as they are: attention 8, embedding 1" in result.summary


def test_b58_moqe_of_a_dense_model(tmp_path: Path) -> None:
    """B58: experts only, of a model that has none, is refused and no quiet nothing."""
    folder = tiny.write_checkpoint(tmp_path / "m")
    with pytest.raises(BadRequestError, match="has no experts"):
        quantize_checkpoint(folder, tmp_path / "out", QuantOptions("2", organization="moqe"))
    assert not (tmp_path / "out").exists()


def test_b58_experts_of_a_dense_model(tmp_path: Path) -> None:
    """B58: where there are none, to ask for them is an error and no quiet nothing."""
    folder = tiny.write_checkpoint(tmp_path)
    with pytest.raises(BadRequestError, match=r"'experts' finds no weight"):
        load(folder, quant=QuantOptions("4", overrides=("experts=2",)))


# --- B59: experts that saw no calibration tokens, or one ---


def _routed(tmp_path: Path, text: str, experts: int = 4) -> tuple[Path, Path]:
    """A mixture, and a text to calibrate it with."""
    folder = _source(tmp_path, "starcoder2_moe", num_local_experts=experts, num_experts_per_tok=1)
    data = tmp_path / "code.py"
    data.write_text(text)
    return folder, data


@pytest.mark.parametrize("text", ["a", "ab", "def f(x):\n    return x\n" * 3])
@pytest.mark.parametrize("quant", ["2", "3", "4-rtn"])
def test_b59_experts_without_tokens_are_quantized_without(
    tmp_path: Path, text: str, quant: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B59: some saw none, some one. They fall back to what needs no data and are listed; others
    are calibrated; nothing is NaN, and the result loads back to the same bits."""
    folder, data = _routed(tmp_path, text)
    options = QuantOptions(quant, organization="moqe", calibrate=data)
    result = quantize_checkpoint(folder, tmp_path / "out", options)
    plan = plan_checkpoint(open_checkpoint(locate(folder)), options)
    assert plan.unseen
    blind = _weights(load(folder, quant=QuantOptions(_method(quant), organization="moqe")))
    told, saved = _weights(load(folder, quant=options)), _weights(load(tmp_path / "out"))
    for name, few in plan.unseen.items():
        assert few
        mixture = name.partition(".experts.")[0]
        assert f"{mixture}.experts {', '.join(map(str, few))}" in caplog.text
        path = name.removesuffix(".weight")
        for expert in range(4):
            for part in ("packed", "scales", "biases"):
                one, none = (getattr(w[path], part)[expert] for w in (told, blind))
                assert expert not in few or torch.equal(one, none)
                assert torch.equal(one, getattr(saved[path], part)[expert])
                assert bool(one.float().isfinite().all())
    assert "too few tokens to calibrate" in result.summary


def _method(quant: str) -> str:
    """With calibration the method is hqq unless another is named."""
    return quant if "-" in quant else f"{quant}-hqq"


def test_b59_one_token_keeps_its_shape(tmp_path: Path) -> None:
    """B59: one token's input is `[1, d]` and counts as one; squeezed, it would count as d."""
    checkpoint = open_checkpoint(locate(_routed(tmp_path, "a")[0]))
    moments = second_moments(checkpoint, [[5]], {"model.layers.0.mlp.experts.c_fc.weight"})
    name = "model.layers.0.mlp.experts.c_fc.weight"
    assert moments.squares[name].shape == (4, 64)
    assert moments.unseen[name] == [0, 1, 2, 3]
    assert moments.products[name].shape == (4, 1, 64, 64)
    # Exactly one expert saw exactly one token: its products are x xᵀ, of rank 1 and that trace.
    traces = moments.products[name].diagonal(dim1=-2, dim2=-1).sum((-2, -1))
    assert int((traces > 0).sum()) == 1
    one = moments.products[name][int(traces.argmax()), 0]
    torch.testing.assert_close(one @ one, one * traces.max(), rtol=1e-3, atol=1e-2)


# --- B61: a layer left in a pending state after quantization ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["while loading", "from a folder", "at run time"])
def test_b61_the_first_forward_works(tmp_path: Path, family: str, how: str) -> None:
    """B61: right after loading, whatever way it was quantized, the first request is answered as
    all later ones are."""
    folder, options = _source(tmp_path, family), QuantOptions("2", organization="moqe")
    if how == "while loading":
        loaded = load(folder, quant=options)
    elif how == "from a folder":
        quantize_checkpoint(folder, tmp_path / "out", options)
        loaded = load(tmp_path / "out")
    else:
        loaded = load(folder)
        loaded.requantize(options)
    params = SamplingParams(max_tokens=6, logit_bias={0: -100.0})
    engine = Engine(loaded)
    texts = [engine.complete("def f(x):", params) for _ in range(3)]
    assert len(set(texts)) == 1
    assert texts[0]


def test_b61_again_after_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B61: quantization that fails half-way leaves every layer usable; so does a step that fails,
    and the next request is answered."""
    folder = _source(tmp_path, "starcoder2_moe")
    loaded, options = load(folder), QuantOptions("2", organization="moqe")
    inner = requantizing.apply_isq

    def fails(plan: Any, name: str, value: Any) -> Any:
        if "layers.1.mlp.experts.c_fc" in name:
            raise MemoryError
        return inner(plan, name, value)

    monkeypatch.setattr(requantizing, "apply_isq", fails)
    report = loaded.requantize(options)
    assert list(report.kept) == [
        n for n in report.kept if n.startswith("model.layers.1.mlp.experts.c_fc")
    ]
    assert report.kept
    engine, params = Engine(loaded), SamplingParams(max_tokens=4, logit_bias={0: -100.0})
    before = engine.complete("def f", params)
    experts = loaded.model.model.layers[1].mlp.experts
    forward = experts.forward
    experts.forward = _broken
    with pytest.raises(RuntimeError, match="experts"):
        engine.complete("def g", params)
    experts.forward = forward
    assert engine.complete("def f", params) == before


def _broken(*_: Any) -> Any:
    raise RuntimeError("the experts are not there")
