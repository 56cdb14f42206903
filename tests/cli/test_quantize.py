"""`starquill quantize`, `eval perplexity` and `--quant`: what is printed where, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from starquill.cli.app import main
from starquill.engine.engine import Engine
from starquill.engine.scoring import score_texts
from starquill.loading import load
from starquill.quantizing import QuantOptions
from starquill.types import SamplingParams
from tests import moe, tiny

Capture = pytest.CaptureFixture[str]
TEXT = "def f(x):\n    return x + 2024  # é\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = tiny.config(max_position_embeddings=2000)
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"), raw)


def _refused(capsys: Capture, *arguments: str) -> str:
    """Exit code 2, nothing on standard output, and one line on standard error."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0]


# --- quantize ---


@pytest.mark.parametrize("quant", [None, "4", "q3-g32-hqq", "mixed-2-6"])
def test_quantize_writes_a_model(
    folder: Path, tmp_path: Path, capsys: Capture, quant: str | None
) -> None:
    out = tmp_path / "out"
    more = [] if quant is None else ["--quant", quant]
    assert main(["quantize", str(folder), "--out", str(out), *more]) == 0
    printed, told = capsys.readouterr()
    written, read = re.fullmatch(
        rf"{re.escape(str(out))}: ([\d,]+) bytes from ([\d,]+)\n", printed
    ).groups()  # type: ignore[union-attr]
    assert int(read.replace(",", "")) < (folder / "model.safetensors").stat().st_size
    size = (out / "model.safetensors").stat().st_size
    assert size - 10_000 < int(written.replace(",", "")) < size
    assert "bits a weight" in told
    assert re.search(r"\d+ x q\d-g\d+", told)
    ids = tiny.random_ids(9)
    ours, direct = load(out), load(folder, quant=quant or "4")
    assert tiny.our_logits(ours, ids).equal(tiny.our_logits(direct, ids))


def test_quantize_with_overrides(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    more = ["--quant", "4", "--quant-override", "mlp=8", "--quant-override", r"c_proj=dense"]
    assert main(["quantize", str(folder), "--out", str(out), *more]) == 0
    settings = json.loads((out / "config.json").read_text())["quantization"]
    assert settings["model.layers.0.mlp.c_fc"]["bits"] == 8
    assert "model.layers.0.mlp.c_proj.weight" in capsys.readouterr().err
    assert main(["inspect", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "q4-g64 (8 tensors)" in facts["quantization"]


def test_an_override_without_a_scheme_means_the_default(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", str(folder), "--out", str(out), "--quant-override", "mlp=8"]
    assert main(arguments) == 0
    settings = json.loads((out / "config.json").read_text())["quantization"]
    assert settings["bits"] == 4


def test_quantize_in_mistakes(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out, model = str(tmp_path / "out"), str(folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    line = _refused(capsys, "quantize", model, "--out", out, "--quant", "7")
    assert "'7'" in line
    assert "2, 3, 4, 5, 6, 8" in line
    assert "exists" in _refused(capsys, "quantize", model, "--out", str(tmp_path / "full"))
    assert "out" in _refused(capsys, "quantize", model)
    assert "nowhere" in _refused(capsys, "quantize", "nowhere", "--out", out)
    assert "zzz" in _refused(capsys, "quantize", model, "--out", out, "--quant-override", "zzz=4")
    assert "regular" in _refused(capsys, "quantize", model, "--out", out, "--quant-override", "(=4")
    assert "REGEX" in _refused(capsys, "quantize", model, "--out", out, "--quant-override", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_quantizing_twice_is_refused(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "out")
    assert main(["quantize", str(folder), "--out", out]) == 0
    capsys.readouterr()
    line = _refused(capsys, "quantize", out, "--out", str(tmp_path / "again"))
    assert "quantized already" in line
    assert "quantized already" in _refused(capsys, "generate", "-m", out, "-p", "x", "--quant", "8")
    assert not (tmp_path / "again").exists()


def test_an_interrupt_leaves_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("starquill.quantizing.apply_isq", interrupt)
    try:
        assert main(["quantize", str(folder), "--out", str(tmp_path / "out")]) == 130
    finally:
        assert list(tmp_path.iterdir()) == []


# --- experts alone ---


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    raw = moe.config("starcoder2_moe")
    reference = moe.reference(raw).to(torch.bfloat16)
    return moe.write(tmp_path_factory.mktemp("mixture"), raw, reference)


def test_moqe_and_inspect(mixture: Path, tmp_path: Path, capsys: Capture) -> None:
    """What is quantized is told by its parts, then what each takes."""
    out = str(tmp_path / "out")
    more = ["--quant", "2", "--organization", "moqe", "--trunk-quant", "8"]
    assert main(["quantize", str(mixture), "--out", out, *more]) == 0
    assert "attention 8, embedding 1, experts 4" in capsys.readouterr().err
    assert main(["inspect", out, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bits"]["router"] == 16
    assert 8.5 <= facts["bits"]["embedding"] < 9
    assert 3 <= facts["bits"]["experts"] < 3.5
    assert main(["inspect", out]) == 0
    printed = capsys.readouterr().out
    assert f"{facts['bytes']['experts']:,} ({facts['bits']['experts']:.4g} bits each)" in printed
    assert f"{sum(facts['resident'].values()):,}" in printed


def test_distill_goes_with_generate_and_quantize(
    mixture: Path, tmp_path: Path, capsys: Capture
) -> None:
    data, out = tmp_path / "code.py", str(tmp_path / "out")
    data.write_text(TEXT * 30)
    more = ["--quant", "2", "--organization", "moqe", "--distill", str(data), "--steps", "3"]
    assert main(["quantize", str(mixture), "--out", out, *more]) == 0
    assert "2 layers distilled" in capsys.readouterr().err
    written = []
    for arguments in (["-m", out], ["-m", str(mixture), *more]):
        rest = ["-p", "def f", "-n", "6", "--logit-bias", "0=-100"]
        assert main(["generate", *rest, *arguments]) == 0
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--organization", "moqe"], "need --quant"),
        (["--quant", "4", "--organization", "moq"], "'moq'"),
        (["--quant", "4", "--trunk-quant", "8"], "organization moqe"),
        (["--quant", "4", "--steps", "9"], "--steps needs --distill"),
        (["--quant", "4", "--organization", "moqe"], "has no experts"),
        (["--quant", "4", "--distill", "nowhere.py"], "nowhere.py"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_moqe_in_mistakes(
    folder: Path, tmp_path: Path, capsys: Capture, options: list[str], fact: str
) -> None:
    out = str(tmp_path / "out")
    assert fact in _refused(capsys, "quantize", str(folder), "--out", out, *options)
    assert fact in _refused(capsys, "generate", "-m", str(folder), "-p", "x", *options)
    assert list(tmp_path.iterdir()) == []


def test_moqe_by_the_topology_needs_bits_too(
    mixture: Path, tmp_path: Path, capsys: Capture
) -> None:
    topology, out = tmp_path / "t.yaml", str(tmp_path / "out")
    topology.write_text("quant_organization: moqe\n")
    more = ["--topology", str(topology)]
    assert "need --quant" in _refused(capsys, "quantize", str(mixture), "--out", out, *more)
    topology.write_text("quant_organization: few\n")
    more += ["--quant", "4"]
    assert "'few'" in _refused(capsys, "quantize", str(mixture), "--out", out, *more)


# --- --quant ---


@pytest.mark.parametrize("quant", ["2", "8", "mixed-4-6"])
def test_generate_quantizes_while_loading(folder: Path, capsys: Capture, quant: str) -> None:
    arguments = ["-m", str(folder), "-n", "8", "--logit-bias", "0=-100", "--quant", quant]
    assert main(["generate", "-p", "def f", *arguments]) == 0
    params = SamplingParams(max_tokens=8, logit_bias={0: -100.0})
    expected = Engine(load(folder, quant=quant)).complete("def f", params)
    assert capsys.readouterr().out == expected
    plain = Engine(load(folder)).complete("def f", params)
    assert (expected == plain) is False or quant != "2"


def test_generate_with_overrides(folder: Path, capsys: Capture) -> None:
    more = ["--quant", "2", "--quant-override", "mlp=8", "--logit-bias", "0=-100", "-n", "8"]
    assert main(["generate", "-p", "def f", "-m", str(folder), *more]) == 0
    options = QuantOptions("2", ("mlp=8",))
    params = SamplingParams(max_tokens=8, logit_bias={0: -100.0})
    expected = Engine(load(folder, quant=options)).complete("def f", params)
    assert capsys.readouterr().out == expected


def test_fill_quantizes_while_loading(folder: Path, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def f(")
    (tmp_path / "b.py").write_text("x")
    parts = ["--prefix-file", str(tmp_path / "a.py"), "--suffix-file", str(tmp_path / "b.py")]
    printed = []
    for more in ([], ["--quant", "2"], ["--quant", "2"]):
        arguments = ["fill", *parts, "-m", str(folder), "-n", "8"]
        assert main([*arguments, "--logit-bias", "0=-100", *more]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] != printed[1]
    assert printed[1] == printed[2]


@pytest.mark.parametrize("verb", ["generate", "fill"])
@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (["--quant", "9"], "'9'"),
        (["--quant", "4", "--quant-override", "zzz=4"], "zzz"),
        (["--quant-override", "mlp=4"], "--quant"),
        (["--quant", ""], "''"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else v,
)
def test_mistakes_are_one_line(
    folder: Path, capsys: Capture, verb: str, options: list[str], fact: str
) -> None:
    code = str(folder / "config.json")
    prompt = ["-p", "x"] if verb == "generate" else ["--prefix-file", code, "--suffix-file", code]
    assert fact in _refused(capsys, verb, *prompt, "-m", str(folder), *options)


# --- eval perplexity ---


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "a.py").write_text(TEXT, encoding="utf-8")
    (tmp_path / "data" / "deep" / "b.py").write_text(TEXT * 3, encoding="utf-8")
    (tmp_path / "data" / "c.txt").write_text("not code", encoding="utf-8")
    return tmp_path / "data"


def _eval(folder: Path, data: Path, *more: str) -> list[str]:
    return ["eval", "perplexity", "-m", str(folder), "--data", str(data), *more]


def test_perplexity_of_files(folder: Path, data: Path, capsys: Capture) -> None:
    loaded = load(folder)
    for path, texts in ((data / "a.py", [TEXT]), (data, [TEXT, TEXT * 3])):
        score = score_texts(loaded, texts)
        assert main(_eval(folder, path, "--json")) == 0
        assert json.loads(capsys.readouterr().out) == {
            "tokens": score.tokens,
            "bytes": score.bytes,
            "bits_per_byte": score.bits_per_byte,
            "perplexity": score.perplexity,
        }
        assert main(_eval(folder, path)) == 0
        out, err = capsys.readouterr()
        assert err == ""
        for part in (str(score.tokens), f"{score.bits_per_byte:.4f}", f"{score.perplexity:.4f}"):
            assert part in out
    assert main(_eval(folder, data, "--suffix", ".txt", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == len("not code")


def test_against_a_reference(folder: Path, data: Path, capsys: Capture) -> None:
    assert main(_eval(folder, data, "--against", str(folder), "--json")) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["kl_divergence"] == 0
    assert same["top_agreement"] == 1
    assert main(_eval(folder, data, "--against", str(folder), "--json", "--quant", "2")) == 0
    quantized = json.loads(capsys.readouterr().out)
    assert quantized["kl_divergence"] > 0
    assert quantized["bits_per_byte"] != same["bits_per_byte"]
    assert main(_eval(folder, data, "--against", str(folder))) == 0
    assert "100.00 %" in capsys.readouterr().out


def test_eval_in_mistakes(folder: Path, data: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "bytes.py").write_bytes(b"x = '\xff'")
    (tmp_path / "empty").mkdir()
    assert "UTF-8" in _refused(capsys, *_eval(folder, tmp_path / "bytes.py"))
    assert ".py" in _refused(capsys, *_eval(folder, tmp_path / "empty"))
    assert "nothing.py" in _refused(capsys, *_eval(folder, tmp_path / "nothing.py"))
    assert "data" in _refused(capsys, "eval", "perplexity", "-m", str(folder))
    assert "'9'" in _refused(capsys, *_eval(folder, data, "--quant", "9"))
    raw = tiny.config(vocab_size=300)
    small = str(tiny.write_checkpoint(tmp_path / "small", raw))
    assert "vocabularies" in _refused(capsys, *_eval(folder, data, "--against", small))


def test_an_empty_file_has_no_perplexity(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """1.0 would be a perfect score."""
    (tmp_path / "empty.py").write_text("")
    _refused(capsys, *_eval(folder, tmp_path / "empty.py"))
