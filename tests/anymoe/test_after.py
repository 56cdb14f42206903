"""What is done to a mixture afterwards: its experts quantized, adapters by request."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from starquill.anymoe import AnyMoeConfig, train
from starquill.anymoe.experts import open_base
from starquill.anymoe.training import write
from starquill.cli.app import main
from starquill.engine.scoring import score_texts
from starquill.errors import AdapterError
from starquill.loading import load
from starquill.quantizing import QuantOptions, quantize_checkpoint
from tests import tiny
from tests.adapters.making import weights_of
from tests.anymoe import making

IDS = tiny.random_ids(20)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Gates that go to one expert by the token, of base and two more."""
    torch.set_num_threads(1)
    base = making.checkpoint(tmp_path / "base", 0)
    experts = {str(seed): making.checkpoint(tmp_path / str(seed), seed) for seed in (1, 2)}
    gates = making.forced((0, 2), 1, 3)
    gates.weight.normal_(generator=torch.Generator().manual_seed(3))
    return write(open_base(base), experts, gates, tmp_path / "mixed", AnyMoeConfig(top_k=2))


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_experts_alone_are_quantized(
    tmp_path: Path, mixed: Path, bits: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """And compute what the same weights written out do; the rest is as it was, to the bit."""
    out = tmp_path / "small"
    options = [f"--quant={bits}", "--organization=moqe", f"--out={out}"]
    assert main(["quantize", str(mixed), *options]) == 0
    loaded, before = load(out, exact=True), load(mixed)
    for number, layer in enumerate(loaded.model.model.layers):
        scheme = "float32" if number == 1 else f"q{bits}-g{32 if bits == 2 else 64}"
        mlp = layer.mlp if number == 1 else layer.mlp.experts
        assert {mlp.c_fc.weight.scheme, mlp.c_proj.weight.scheme} == {scheme}
    own, whole = (load_file(path / "model.safetensors") for path in (out, mixed))
    same = [name for name in whole if name in own and ".switch_mlp." not in name]
    assert len(same) == len([name for name in whole if ".switch_mlp." not in name])
    assert all(torch.equal(own[name], whole[name]) for name in same)
    for number in (0, 2):
        experts = before.model.model.layers[number].mlp.experts
        small = loaded.model.model.layers[number].mlp.experts
        for name in ("c_fc", "c_proj"):
            getattr(experts, name).weight.data.copy_(getattr(small, name).weight.dequantize())
    ours, theirs = tiny.our_logits(loaded, IDS), tiny.our_logits(before, IDS)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert score_texts(load(out), ["def f(x):\n    return x\n"]).bits_per_byte > 0
    capsys.readouterr()
    assert main(["generate", f"--model={out}", "--max-tokens=4", "--prompt=import"]) == 0
    text = tmp_path / "text.py"
    text.write_text("def f(x):\n    return x\n")
    assert main(["eval", "perplexity", f"--data={text}", f"--model={out}"]) == 0
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["merge", "delta"])
def test_adapters_of_mlps_are_refused_by_name(tmp_path: Path, form: str) -> None:
    """Where there are experts, no single MLP is there to add to."""
    base = making.checkpoint(tmp_path / "base", 0)
    config = AnyMoeConfig(lora_experts=form)  # type: ignore[arg-type]
    experts = {"one": making.lora(tmp_path / "one", 1)}
    gates = making.forced((0, 2), 1, 2)
    loaded = load(write(open_base(base), experts, gates, tmp_path / "mixed", config))
    for name in ("c_fc", "c_proj"):
        with pytest.raises(
            AdapterError, match=rf"no module for model\.layers\.0\.mlp\.{name}\."
        ) as e:
            loaded.adapters.load(name, making.only(name, tmp_path / name, 5))
        assert "\n" not in str(e.value)
    assert not loaded.adapters.list()
    loaded.adapters.load("q", making.only("q_proj", tmp_path / "q", 5))
    assert [info.alias for info in loaded.adapters.list()] == ["q"]


@pytest.mark.parametrize("layers", [(0, 1, 2), (1,), (0, 2)], ids=str)
def test_trained_from_quantized_sources(tmp_path: Path, layers: tuple[int, ...]) -> None:
    """Base and expert of 4 bits stay as they are stored; the base alone does not change."""
    small = {}
    for seed, name in enumerate(("base", "one", "two")):
        folder = making.checkpoint(tmp_path / f"{name}-16", seed)
        small[name] = tmp_path / name
        quantize_checkpoint(folder, small[name], QuantOptions("4"))
    before = (small["base"] / "model.safetensors").read_bytes()
    data = making.rows(tmp_path / "rows.json")
    config = AnyMoeConfig(epochs=12, learning_rate=2e-2, held_out=0.34, layers=layers)
    experts = {name: small[name] for name in ("one", "two")}
    report = train(small["base"], experts, data, tmp_path / "mixed", config)
    assert report.accuracy > 0.95
    assert report.layers == layers
    loaded = load(report.out, exact=True)
    own = [weights_of(load(small[name], exact=True)) for name in ("base", "one", "two")]
    for number, layer in enumerate(loaded.model.model.layers):
        if number not in layers:
            assert not hasattr(layer.mlp, "gate")
            continue
        weight = layer.mlp.experts.c_fc.weight
        assert weight.scheme == "q4-g64"
        made = weight.dequantize().float()
        for place, state in enumerate(own):
            theirs = state[f"model.layers.{number}.mlp.c_fc.weight"].float()
            assert torch.equal(made[place], theirs)
    assert (small["base"] / "model.safetensors").read_bytes() == before
