"""`starquill merge`: what is written computes what the adapters did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from starquill.adapters.store import AdapterStore
from starquill.cli.app import main
from starquill.errors import AdapterError, NumericsError
from starquill.isq import apply_isq
from starquill.loading import load
from starquill.merging import MergeOptions, merge_checkpoint
from tests import tiny
from tests.adapters import making
from tests.cli.test_errors import error_line

Capture = pytest.CaptureFixture[str]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4},
    "dora": {"r": 2, "use_dora": True},
    "bias": {"r": 2, "bias": "all", "lora_bias": True},
    "whole": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["c_fc"]},
    "rows": {"r": 2, "target_modules": ["q_proj", "embed_tokens"]},
    "head": {"r": 2, "target_modules": ["v_proj", "lm_head"]},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    top = tmp_path_factory.mktemp("merge")
    tiny.write_checkpoint(top / "base")
    for seed, (name, options) in enumerate(KINDS.items()):
        making.peft_folder(top / name, seed=seed, **options)
    return {name: top / name for name in ("base", *KINDS)}


def unmerged(folders: Mapping[str, Path], acting: Mapping[str, float], **options: Any) -> Tensor:
    loaded = load(folders["base"], **options)
    store = AdapterStore(loaded)
    for name in acting:
        store.load(name, folders[name])
    return making.logits(loaded, store, acting)


def command(folders: Mapping[str, Path], acting: Mapping[str, float], out: Path) -> list[str]:
    found = ["merge", str(folders["base"]), "--out", str(out)]
    for name, weight in acting.items():
        found += ["--adapter", f"{folders[name]}={weight}"]
    return found


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize(
    "acting",
    [*({name: 1.0} for name in KINDS), {"plain": 0.7, "dora": -0.3}, dict.fromkeys(KINDS, 0.4)],
    ids=str,
)
def test_merged_computes_what_unmerged_does(
    folders: dict[str, Path], tmp_path: Path, acting: dict[str, float]
) -> None:
    """Here, and in transformers, which reads the folder too."""
    out = tmp_path / "merged"
    assert main(command(folders, acting, out)) == 0
    expected = unmerged(folders, acting)
    assert float((expected - making.logits(load(folders["base"]))).abs().max()) > 0.1
    torch.testing.assert_close(making.logits(load(out)), expected, rtol=0, atol=1e-4)
    theirs = transformers.Starcoder2ForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits = theirs(torch.tensor([making.IDS])).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert (out / "tokenizer.json").exists()


@pytest.mark.parametrize(("name", "unties"), [("plain", False), ("rows", True), ("head", True)])
def test_b37_a_tied_head_is_untied_before_one_of_the_two_changes(
    folders: dict[str, Path], tmp_path: Path, name: str, unties: bool
) -> None:
    """B37: merging an adapter of the embedding changed the head that is tied to it."""
    out = tmp_path / "merged"
    merge_checkpoint(folders["base"], {str(folders[name]): 1.0}, out)
    with safe_open(out / "model.safetensors", "pt") as found:
        assert ("lm_head.weight" in found.keys()) == unties  # noqa: SIM118
        with safe_open(folders["base"] / "model.safetensors", "pt") as before:
            embedding = before.get_tensor("model.embed_tokens.weight")
        if name == "rows":
            assert torch.equal(found.get_tensor("lm_head.weight"), embedding)
        if name == "head":
            assert torch.equal(found.get_tensor("model.embed_tokens.weight"), embedding)
    assert (config_of(out).get("tie_word_embeddings") is False) == unties


def test_what_no_adapter_changes_stays_to_the_last_bit(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "merged"
    merge_checkpoint(folders["base"], {str(folders["head"]): 1.0}, out)
    with (
        safe_open(folders["base"] / "model.safetensors", "pt") as before,
        safe_open(out / "model.safetensors", "pt") as after,
    ):
        names = set(before.keys())
        assert set(after.keys()) == names | {"lm_head.weight"}
        changed = {n for n in names if not torch.equal(before.get_tensor(n), after.get_tensor(n))}
    assert changed == {f"model.layers.{n}.self_attn.v_proj.weight" for n in (0, 1)}


def test_a_quantized_base_gets_dense_weights_where_an_adapter_acts(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    quantized, out = tmp_path / "q", tmp_path / "merged"
    assert main(["quantize", str(folders["base"]), "--out", str(quantized)]) == 0
    acting = {"whole": 0.5, "rows": 1.0}
    expected = unmerged({**folders, "base": quantized}, acting, exact=True)
    paths = {str(folders[name]): weight for name, weight in acting.items()}
    merge_checkpoint(quantized, paths, out, MergeOptions(dtype="float32"))
    merged = load(out, exact=True)
    torch.testing.assert_close(making.logits(merged), expected, rtol=0, atol=1e-4)
    layer = merged.model.model.layers[0]
    assert layer.self_attn.q_proj.weight.scheme == layer.mlp.c_fc.weight.scheme == "float32"
    assert layer.mlp.c_proj.weight.scheme.startswith("q4")
    merge_checkpoint(quantized, paths, tmp_path / "half")
    half = load(tmp_path / "half").model.model.layers[0]
    assert half.self_attn.q_proj.weight.scheme == "float16"


def test_quant_quantizes_the_result(folders: dict[str, Path], tmp_path: Path) -> None:
    """From a quantized base too: all of it is written out and quantized anew."""
    acting = {"plain": 1.0}
    quantized = tmp_path / "q8"
    assert main(["quantize", str(folders["base"]), "--out", str(quantized), "--quant", "8"]) == 0
    for number, base in enumerate((folders["base"], quantized)):
        out = tmp_path / f"merged{number}"
        given = command({**folders, "base": base}, acting, out)
        assert main([*given, "--quant", "8"]) == 0
        merged = load(out, exact=True)
        assert merged.model.model.layers[1].mlp.c_fc.weight.scheme.startswith("q8")
        expected = unmerged(folders, acting)
        near = torch.nn.functional.cosine_similarity(making.logits(merged), expected)
        assert float(near.min()) > 0.99


def test_dtypes(folders: dict[str, Path], tmp_path: Path) -> None:
    path = str(folders["plain"])
    merge_checkpoint(folders["base"], {path: 1.0}, tmp_path / "b", MergeOptions(dtype="bfloat16"))
    layer = load(tmp_path / "b").model.model.layers[0]
    assert layer.self_attn.q_proj.weight.scheme == "bfloat16"


def test_what_a_dtype_cannot_hold(folders: dict[str, Path], tmp_path: Path) -> None:
    acting = {str(folders["plain"]): 1e6}
    with pytest.raises(NumericsError, match="has values that float16 cannot hold"):
        merge_checkpoint(folders["base"], acting, tmp_path / "h", MergeOptions(dtype="float16"))
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_adds_a_bias_where_there_is_none(tmp_path: Path) -> None:
    raw = tiny.config(use_bias=False)
    base = tiny.write_checkpoint(tmp_path / "base", raw)
    folder, _ = making.peft_folder(tmp_path / "it", r=2, lora_bias=True, target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"q_proj has no bias, .* cannot be merged"):
        merge_checkpoint(base, {str(folder): 1.0}, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_failure_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(plan: Any, name: str, value: Any) -> Any:
        if "layers.1" in name:
            raise NumericsError("broken")
        return apply_isq(plan, name, value)

    monkeypatch.setattr("starquill.quantizing.apply_isq", failing)
    with pytest.raises(NumericsError):
        merge_checkpoint(folders["base"], {str(folders["plain"]): 1.0}, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give --adapter"),
        (["--adapter", "{plain}=nan"], "expected PATH or PATH=WEIGHT"),
        (["--adapter", "{plain}", "--dtype", "int8"], "dtype is 'int8'"),
        (["--adapter", "{plain}", "--adapter", "{plain}=2"], "is given twice"),
        (["--adapter", "{base}"], "adapter_config.json"),
    ],
)
def test_mistakes_are_told_in_one_line(
    folders: dict[str, Path], tmp_path: Path, capsys: Capture, arguments: list[str], told: str
) -> None:
    given = [argument.format(**folders) for argument in arguments]
    out = str(tmp_path / "out")
    assert told in error_line(capsys, "merge", str(folders["base"]), "--out", out, *given)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_left_alone(
    folders: dict[str, Path], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "mine").write_text("mine")
    assert "exists already" in error_line(capsys, *command(folders, {"plain": 1.0}, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
