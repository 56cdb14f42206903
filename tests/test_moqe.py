"""Experts alone quantized: what stays, what it takes, how it is calibrated and distilled."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from starquill import distilling
from starquill.calibration import FEWEST_TOKENS, second_moments
from starquill.checkpoint.describe import describe
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import Checkpoint, open_checkpoint
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError
from starquill.isq import apply_isq
from starquill.loading import load
from starquill.nn.experts import ExpertLinear
from starquill.quant.affine import AffineWeight
from starquill.quant.quantize import quantize
from starquill.quant.schemes import parse_scheme
from starquill.quantizing import QuantOptions, plan_checkpoint, quantize_checkpoint
from starquill.types import SamplingParams
from tests import moe, tiny

MOQE = "moqe"
WORDS = ("return", "import", "self", "for", "in", "range(x)", "def f(a, b):", "x = [1, 2]", "None")


def _source(folder: Path, family: str = "starcoder2_moe", **changes: Any) -> Path:
    raw = moe.config(family, **changes)
    return moe.write(folder, raw, moe.reference(raw).to(torch.bfloat16))


def _code(path: Path, lines: int = 120) -> Path:
    generator = torch.Generator().manual_seed(3)
    picked = torch.randint(len(WORDS), (lines, 3), generator=generator).tolist()
    path.write_text("".join(" ".join(WORDS[i] for i in row) + "\n" for row in picked))
    return path


def _open(folder: Path) -> Checkpoint:
    return open_checkpoint(locate(folder))


def _schemes(loaded: LoadedModel) -> dict[str, str]:
    return {n: m.weight.scheme for n, m in loaded.model.named_modules() if _holds(m)}


def _holds(module: Any) -> bool:
    return hasattr(getattr(module, "weight", None), "scheme")


# --- the plan ---


@pytest.mark.parametrize("family", list(moe.RAW))
@pytest.mark.parametrize("trunk", [None, "8"])
def test_experts_alone(tmp_path: Path, family: str, trunk: str | None) -> None:
    folder = _source(tmp_path / "m", family)
    options = QuantOptions("3", organization=MOQE, trunk=trunk)
    result = quantize_checkpoint(folder, tmp_path / "out", options)
    for loaded in (load(folder, quant=options), load(tmp_path / "out")):
        found = _schemes(loaded)
        experts = {n: s for n, s in found.items() if ".experts." in n}
        routers = {n: s for n, s in found.items() if n.endswith(".mlp.gate")}
        rest = {s for n, s in found.items() if n not in experts and n not in routers}
        assert {s[:2] for s in experts.values()} == {"q3"}
        assert set(routers.values()) == {"bfloat16"}
        assert rest == ({"bfloat16"} if trunk is None else {"q8-g64"})
    assert f"experts {len(experts)}" in result.summary
    assert ("left as they are: attention 8, embedding 1" in result.summary) == (trunk is None)


def test_the_topology_says_it_too(tmp_path: Path) -> None:
    """Layers that it names are about their experts; what is named outright is meant."""
    folder, topology = _source(tmp_path / "m"), tmp_path / "t.yaml"
    topology.write_text('quant_organization: moqe\n"1": {quant: 3}\n"/k_proj/": {quant: 8}\n')
    found = _schemes(load(folder, quant=QuantOptions("2", topology=topology)))
    assert found["model.layers.0.mlp.experts.c_fc"] == "q2-g32"
    assert found["model.layers.1.mlp.experts.c_fc"] == "q3-g64"
    assert found["model.layers.1.self_attn.k_proj"] == "q8-g64"
    assert found["model.layers.1.self_attn.q_proj"] == found["model.embed_tokens"] == "bfloat16"
    # What is asked for beside it wins.
    whole = load(folder, quant=QuantOptions("2", topology=topology, organization="default"))
    assert _schemes(whole)["model.layers.0.self_attn.q_proj"] == "q2-g32"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"organization": "moe"}, r"'moe' \(expected default or moqe\)"),
        ({"trunk": "8"}, "needs the organization moqe"),
        ({"trunk": "8", "organization": "default"}, "needs the organization moqe"),
        ({"trunk": "7", "organization": MOQE}, "'7'"),
        ({"steps": 0}, "--steps is 0"),
    ],
)
def test_mistakes(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        load(_source(tmp_path), quant=QuantOptions("4", **options))


@pytest.mark.parametrize("mixture_without", [False, True])
def test_a_model_without_experts(tmp_path: Path, mixture_without: bool) -> None:
    if mixture_without:
        folder = _source(tmp_path, mlp_only_layers=[0, 1])
    else:
        folder = tiny.write_checkpoint(tmp_path)
    with pytest.raises(BadRequestError, match=r"has no experts.*leave out"):
        load(folder, quant=QuantOptions("4", organization=MOQE))


# --- sizes ---


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("family", ["starcoder2_moe", "qwen3_moe"])
def test_bytes_are_those_of_the_arithmetic(tmp_path: Path, family: str, bits: int) -> None:
    """On disk and in memory; `inspect` tells both."""
    folder, out = _source(tmp_path / "m", family, intermediate_size=128), tmp_path / "out"
    options = QuantOptions(f"q{bits}-g32", organization=MOQE)
    quantize_checkpoint(folder, out, options)
    source = load_file(folder / "model.safetensors")
    experts = {n: t for n, t in source.items() if ".experts." in n and t.dim() > 1}
    others = sum(2 * t.numel() for n, t in source.items() if n not in experts)
    quantized = sum(t.numel() for t in experts.values()) * (bits + 1) / 8
    size = (out / "model.safetensors").stat().st_size
    header = int.from_bytes((out / "model.safetensors").read_bytes()[:8], "little")
    assert size - header == pytest.approx(others + quantized, rel=0.02)
    facts = describe(out)
    assert sum(facts.bytes.values()) == pytest.approx(others + quantized, rel=0.02)
    vectors = sum(t.numel() for n, t in source.items() if n not in experts and t.dim() == 1)
    loaded = load(out)
    held = {id(m.weight): m.weight.nbytes for m in loaded.model.modules() if _holds(m)}
    resident = sum(held.values()) + sum(4 * p.numel() for p in loaded.model.parameters())
    assert resident == pytest.approx(others + quantized + 2 * vectors, rel=0.02)
    assert sum(facts.resident.values()) == pytest.approx(resident, rel=0.02)
    assert facts.bits["attention"] == facts.bits["router"] == facts.bits["embedding"] == 16
    assert facts.bits["experts"] == pytest.approx(bits + 1, abs=0.3)  # some have biases


_PEAK = """
import sys
from pathlib import Path
from starquill.loading import load
from starquill.quantizing import QuantOptions, quantize_checkpoint
options = QuantOptions("2-rtn", organization="moqe")
if sys.argv[2] == "load":
    load(sys.argv[1], quant=options)
else:
    quantize_checkpoint(sys.argv[1], Path(sys.argv[2]), options)
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""


def _write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Zeros in bf16 that take no room on disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to tell the peak")
@pytest.mark.parametrize("how", ["load", "write"])
def test_the_peak_is_the_result_and_a_layers_experts(tmp_path: Path, how: str) -> None:
    """Four layers of a quarter of Qwen3-30B-A3B's experts, one by one, in a file of holes."""
    raw = moe.config(
        "qwen3_moe",
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=32,
        num_hidden_layers=4,
        vocab_size=4096,
    )
    folder = tmp_path / "m"
    folder.mkdir()
    shapes = {}
    for name, shape in tiny.shapes(raw, head=True).items():
        if ".experts." in name:
            for expert in range(shape[0]):
                shapes[name.replace(".experts.", f".experts.{expert}.")] = shape[1:]
        else:
            shapes[name] = shape
    _write_sparse(folder / "model.safetensors", shapes)
    tiny.write_json(folder / "config.json", raw)
    experts = sum(math.prod(s) for n, s in shapes.items() if ".experts." in n)
    others = sum(math.prod(s) for n, s in shapes.items() if ".experts." not in n)
    place = "load" if how == "load" else str(tmp_path / "out")
    command = [sys.executable, "-c", _PEAK, str(folder), place]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    result, layer = experts * 3 / 8 + 2 * others, 2 * experts / 4
    assert peak < result + layer + 450e6
    assert peak < 2 * experts, "as much as the checkpoint itself"


# --- calibration ---


def test_moments_of_experts_are_those_of_the_tokens_they_got(tmp_path: Path) -> None:
    """Against the model's own router, expert by expert, over several texts."""
    checkpoint = _open(_source(tmp_path))
    texts = [tiny.random_ids(40, seed=1), tiny.random_ids(25, seed=2)]
    name = "model.layers.0.mlp.experts.c_fc.weight"
    found = second_moments(checkpoint, texts, {name})
    loaded = load(tmp_path)
    seen: list[list[Tensor]] = [[] for _ in range(3)]
    mlp = loaded.model.model.layers[0].mlp
    inner = type(mlp).forward

    def watch(x: Tensor, mix: Any) -> Tensor:
        for row, experts in zip(x[0], mlp.route(mlp.gate(x, mix)).experts[0].tolist(), strict=True):
            for expert in experts:
                seen[expert].append(row.clone())
        return inner(mlp, x, mix)

    mlp.forward = watch
    for ids in texts:
        tiny.our_logits(loaded, ids)
    assert all(len(rows) >= FEWEST_TOKENS for rows in seen)
    for expert, rows in enumerate(seen):
        x = torch.stack(rows)
        squares, products = found.squares[name][expert], found.products[name][expert, 0]
        torch.testing.assert_close(squares, x.square().mean(0), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(products, x.T @ x / len(x), rtol=1e-3, atol=1e-3)
    assert not found.unseen


def test_calibration_lowers_the_error_of_experts(tmp_path: Path) -> None:
    """Of what comes out, on the text that it was told about."""
    folder, data = _source(tmp_path / "m"), _code(tmp_path / "code.py")
    checkpoint = _open(folder)
    name = "model.layers.1.mlp.experts.c_fc.weight"
    dense = checkpoint.source.read(name)
    assert isinstance(dense, Tensor)
    options = QuantOptions("2-hqq", organization=MOQE, calibrate=data)
    told = plan_checkpoint(checkpoint, options)
    products = told.products[name]

    def error(made: Any) -> float:
        off = (made.dequantize() - dense.float()).unflatten(-1, (products.shape[1], -1))
        return float(torch.einsum("eogi,egij,eogj->", off, products, off))

    ours, blind = apply_isq(told, name, dense), quantize(dense, parse_scheme("2-hqq"))
    assert error(ours) < 0.8 * error(blind)


# --- distilling ---


def _distilled(folder: Path, data: Path, **more: Any) -> QuantOptions:
    return QuantOptions(**{"scheme": "2", "distill": data, "steps": 20, **more})


def _errors(summary: str) -> tuple[float, float]:
    told = summary.split("held-out text ")[1].split(";")[0]
    before, after = (float(part.rstrip("%")) for part in told.split(" -> "))
    return before, after


@pytest.mark.parametrize("family", ["starcoder2", *moe.RAW])
def test_distilling_brings_layers_nearer(tmp_path: Path, family: str) -> None:
    """Mixtures and a dense model; the integers stay, and what is saved is what is loaded."""
    dense = family == "starcoder2"
    folder = tiny.write_checkpoint(tmp_path / "m") if dense else _source(tmp_path / "m", family)
    data, organization = _code(tmp_path / "code.py"), None if dense else MOQE
    options = _distilled(folder, data, organization=organization)
    result = quantize_checkpoint(folder, tmp_path / "out", options)
    before, after = _errors(result.summary)
    assert after < 0.9 * before
    plain = load(folder, quant=QuantOptions("2", organization=organization))
    moved = 0
    for loaded in (load(tmp_path / "out"), load(folder, quant=options)):
        for path, module in plain.model.named_modules():
            other = loaded.model.get_submodule(path)
            if not isinstance(getattr(module, "weight", None), AffineWeight):
                continue
            assert torch.equal(module.weight.packed, other.weight.packed)
            assert module.weight.scales.dtype == other.weight.scales.dtype
            moved += not torch.equal(module.weight.scales, other.weight.scales)
    assert moved > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["code.py", "m", "out"]
    ids = tiny.random_ids(12)
    one, two = load(tmp_path / "out"), load(folder, quant=options)
    assert torch.equal(tiny.our_logits(one, ids), tiny.our_logits(two, ids))


def test_distilling_is_never_worse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate that leads astray, what it began with is kept."""
    monkeypatch.setattr(distilling, "_PEAK", 1e6)
    folder, data = _source(tmp_path / "m"), _code(tmp_path / "code.py")
    options = _distilled(folder, data, organization=MOQE, steps=4)
    result = quantize_checkpoint(folder, tmp_path / "out", options)
    before, after = _errors(result.summary)
    assert before == after
    ids = tiny.random_ids(12)
    plain = load(folder, quant=QuantOptions("2", organization=MOQE))
    assert torch.equal(tiny.our_logits(load(tmp_path / "out"), ids), tiny.our_logits(plain, ids))


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that were finished are not trained again, and the result is the same to the bit."""
    folder, data, out = _source(tmp_path / "m"), _code(tmp_path / "code.py"), tmp_path / "out"
    options = _distilled(folder, data, organization=MOQE)
    quantize_checkpoint(folder, tmp_path / "whole", options)
    learned: list[int] = []
    inner = distilling._Class._taught

    def taught(self: Any, number: int, *more: Any) -> Any:
        learned.append(number)
        if len(learned) == 2:
            raise KeyboardInterrupt
        return inner(self, number, *more)

    monkeypatch.setattr(distilling._Class, "_taught", taught)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(folder, out, options)
    assert not out.exists()
    quantize_checkpoint(folder, out, options)
    assert learned == [0, 1, 1]
    one, other = (load_file(p / "model.safetensors") for p in (out, tmp_path / "whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / ".out.distilled").exists()


@pytest.mark.parametrize("change", [{"steps": 21}, {"seed": 1}, {"scheme": "3"}, "damage", "text"])
def test_layers_of_another_run_are_not_used(tmp_path: Path, change: Any) -> None:
    folder, data, kept = _source(tmp_path / "m"), _code(tmp_path / "code.py"), tmp_path / "kept"
    load(folder, quant=_distilled(folder, data, organization=MOQE, distilled=kept))
    files = sorted(kept.iterdir())
    assert [path.name for path in files] == ["layer-00000.safetensors", "layer-00001.safetensors"]
    if change == "damage":
        files[0].write_bytes(files[0].read_bytes()[:100])
    if change == "text":
        _code(data, 130)
    more = change if isinstance(change, dict) else {}
    again = _distilled(folder, data, **{"organization": MOQE, "distilled": kept, **more})
    fresh = load(folder, quant=_distilled(folder, data, **{"organization": MOQE, **more}))
    ids = tiny.random_ids(12)
    logits = tiny.our_logits(load(folder, quant=again), ids)
    assert torch.equal(logits, tiny.our_logits(fresh, ids))


def test_distilling_in_mistakes(tmp_path: Path) -> None:
    folder, data = _source(tmp_path / "m"), tmp_path / "code.py"
    data.write_text("x = 1\n")
    with pytest.raises(BadRequestError, match="tokens of text"):
        load(folder, quant=_distilled(folder, data, organization=MOQE))
    _code(data)
    with pytest.raises(BadRequestError, match="no layer is quantized"):
        load(folder, quant=_distilled(folder, data, overrides=(r"layers=dense",)))


def test_requantizing_to_experts_alone(tmp_path: Path) -> None:
    """And back, while loaded; distilled too."""
    folder, data = _source(tmp_path / "m"), _code(tmp_path / "code.py")
    loaded = load(folder)
    plain = _schemes(loaded)
    report = loaded.requantize(_distilled(folder, data, organization=MOQE))
    assert not report.kept
    assert "distilled" in report.summary
    assert _schemes(loaded)["model.layers.0.mlp.experts.c_fc"] == "q2-g32"
    assert _schemes(loaded)["model.layers.0.self_attn.q_proj"] == "bfloat16"
    assert Engine(loaded).complete("def f", SamplingParams(max_tokens=2)) is not None
    loaded.requantize(None)
    assert _schemes(loaded) == plain


def test_the_right_weights_are_experts(tmp_path: Path) -> None:
    loaded = load(_source(tmp_path), quant=QuantOptions("2", organization=MOQE))
    holders = [m for m in loaded.model.modules() if _holds(m)]
    quantized = [m for m in holders if isinstance(m.weight, AffineWeight)]
    assert quantized == [m for m in loaded.model.modules() if isinstance(m, ExpertLinear)]
