"""Bad input ends in one line and an exit code: 2 for the user's mistakes, 1 for ours."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from starquill.cli.app import main
from tests import tiny

Capture = pytest.CaptureFixture[str]
Edit = Callable[[Path], object]
CONFIG, WEIGHTS = "config.json", "model.safetensors"
TOKENIZER, INDEX = "tokenizer.json", "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    return tiny.write_checkpoint(tmp_path / "model")


def error_line(capsys: Capture, *arguments: str, code: int = 2) -> str:
    """The one line on standard error that `arguments` end in, with nothing on standard output."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert err.removeprefix("error: ").strip()
    assert "Traceback" not in err
    return err


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def generate(model: Path | str, *more: str) -> list[str]:
    return ["generate", "-m", str(model), "-p", "def f", "-n", "3", *more]


# --- files of a checkpoint ---


def text(name: str, content: str) -> Edit:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8")


def data(name: str, content: bytes) -> Edit:
    return lambda folder: (folder / name).write_bytes(content)


def remove(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def cut(name: str, keep: float) -> Edit:
    def edit(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return edit


def instead(name: str, make: Callable[[Path], None]) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return edit


def as_folder(name: str) -> Edit:
    return instead(name, Path.mkdir)


def config(**changes: Any) -> Edit:
    return lambda folder: tiny.write_json(folder / CONFIG, tiny.config(**changes))


def config_text(key: str, value: str) -> Edit:
    """A config with a value that `json` would not write."""
    whole = json.dumps(tiny.config(**{key: "@"})).replace('"@"', value)
    return text(CONFIG, whole)


def rope(**scaling: Any) -> Edit:
    return config(rope_scaling=scaling)


def index(place: dict[str, Any]) -> Edit:
    return text(INDEX, json.dumps({"weight_map": place}))


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Edit:
    def edit(folder: Path) -> None:
        state = tiny.weights(tiny.config())
        change(state)
        save_file(state, folder / WEIGHTS)

    return edit


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(folder: Path) -> None:
        definition = tiny.byte_tokenizer()
        change(definition)
        tiny.write_json(folder / TOKENIZER, definition)

    return edit


def token_count(ids: int) -> Edit:
    return lambda folder: tiny.write_json(folder / TOKENIZER, tiny.byte_tokenizer(vocab_size=ids))


def header(entry: dict[str, Any] | str, size: int | None = None, after: bytes = bytes(64)) -> Edit:
    """A weight file with one tensor described by `entry`, or any header, and 64 bytes of data."""
    raw = entry if isinstance(entry, str) else json.dumps({NORM: entry})
    length = len(raw.encode()) if size is None else size
    return data(WEIGHTS, length.to_bytes(8, "little") + raw.encode() + after)


def tensor_entry(shape: list[Any], offsets: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BIG = 10**400
DEEP = "[" * 100_000 + "]" * 100_000

# What is wrong -> how it is made, and words of which the message must have all.
BROKEN: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "config missing": (remove(CONFIG), (CONFIG, "missing")),
    "config is a folder": (as_folder(CONFIG), (CONFIG, "directory")),
    "config empty": (text(CONFIG, ""), (CONFIG, "JSON")),
    "config truncated": (cut(CONFIG, 0.5), (CONFIG, "JSON")),
    "config not UTF-8": (data(CONFIG, b'{"a": "\xff"}'), (CONFIG, "UTF-8", "byte 7")),
    "config a list": (text(CONFIG, "[]"), (CONFIG, "list", "expected an object")),
    "config nested deeply": (text(CONFIG, DEEP), (CONFIG, "nested")),
    "config with a number of 5000 digits": (config_text("x", "1" * 5000), (CONFIG,)),
    "no model_type": (config(model_type=...), ("model_type", "None")),
    "model_type a list": (config(model_type=["starcoder2"]), ("model_type", "expected a name")),
    "another architecture": (config(model_type="llama"), ("'llama'", "starcoder2")),
    "no hidden_size": (config(hidden_size=...), ("hidden_size is missing", "whole number")),
    "hidden_size a string": (config(hidden_size="64"), ("hidden_size is '64'", "whole number")),
    "hidden_size true": (config(hidden_size=True), ("hidden_size is True", "whole number")),
    "hidden_size a list": (config(hidden_size=[64]), ("hidden_size is [64]", "whole number")),
    "hidden_size negative": (config(hidden_size=-64), ("hidden_size is -64", "whole number")),
    "hidden_size 1e400": (config_text("hidden_size", "1e400"), ("hidden_size is inf",)),
    "hidden_size NaN": (config_text("hidden_size", "NaN"), ("hidden_size is nan",)),
    "hidden_size of 400 digits": (config(hidden_size=BIG), ("hidden_size is 1000",)),
    "vocabulary of 2^62": (config(vocab_size=2**62), ("vocab_size is 4611",)),
    "layers 10^12": (config(num_hidden_layers=10**12), ("num_hidden_layers is 1000",)),
    "heads that overflow": (
        config(head_dim=2**31 - 2, num_attention_heads=2**31 - 2),
        ("head_dim", "num_attention_heads"),
    ),
    "context 0": (config(max_position_embeddings=0), ("max_position_embeddings is 0",)),
    "epsilon of 400 digits": (config(norm_epsilon=BIG), ("norm_epsilon is 1000",)),
    "tied as 1": (config(tie_word_embeddings=1), ("tie_word_embeddings is 1", "true or false")),
    "heads do not divide": (config(num_attention_heads=5), ("64", "num_attention_heads 5")),
    "KV heads do not divide": (config(num_key_value_heads=3), ("num_key_value_heads 3",)),
    "odd head_dim": (config(head_dim=17), ("head_dim 17 is odd",)),
    "unknown activation": (config(hidden_act="swish7"), ("hidden_act 'swish7'", "gelu")),
    "unknown norm": (config(norm_type="rms_norm"), ("norm_type 'rms_norm'", "layer_norm")),
    "unknown MLP": (config(mlp_type="gated"), ("mlp_type 'gated'", "default")),
    "unknown rope": (rope(type="longrope"), ("'longrope'", "yarn")),
    "rope a list": (config(rope_scaling=[1]), ("[1]", "expected an object")),
    "rope_theta text": (config(rope_theta="1e5"), ("rope_theta is '1e5'", "positive number")),
    "rope_theta NaN": (config_text("rope_theta", "NaN"), ("rope_theta is nan",)),
    "rope without its factor": (rope(type="linear"), ("factor is missing",)),
    "yarn mscale text": (rope(type="yarn", factor=2, mscale="x"), ("mscale is 'x'",)),
    "yarn with theta 1": (rope(type="yarn", factor=2, rope_theta=1.0), ("rope_theta",)),
    "yarn with a beta past all": (rope(type="yarn", factor=2, beta_fast=1e308), ("beta_fast",)),
    "dynamic factor 1e308": (rope(type="dynamic", factor=1e308), ("factor",)),
    "dynamic factor below 1": (rope(type="dynamic", factor=0.001), ("factor",)),
    "quantized by a number": (config(quantization=4), ("quantization is 4", "an object")),
    "weights missing": (remove(WEIGHTS), ("no .safetensors file",)),
    "weights empty": (data(WEIGHTS, b""), (WEIGHTS, "empty", "0 bytes")),
    "weights a folder": (as_folder(WEIGHTS), (WEIGHTS,)),
    "weights that link to themselves": (instead(WEIGHTS, lambda p: p.symlink_to(p)), (WEIGHTS,)),
    "weights truncated": (cut(WEIGHTS, 0.9), (WEIGHTS, "bytes", "download")),
    "weights cut in the header": (cut(WEIGHTS, 0.001), (WEIGHTS, "bytes", "download")),
    "weights are text": (text(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), (WEIGHTS,)),
    "pickled weights": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        ("pytorch_model.bin", "pickle", "safetensors"),
    ),
    "header longer than the file": (header("{}", 10**6), (WEIGHTS,)),
    "header of 2^63": (header("{}", 2**63), (WEIGHTS,)),
    "header not JSON": (header("{"), (WEIGHTS,)),
    "a tensor missing": (tensors(lambda s: s.pop(NORM)), (f"missing tensors: {NORM}",)),
    "a tensor too many": (
        tensors(lambda s: s.update({"model.extra": torch.zeros(1)})),
        ("unexpected tensors: model.extra",),
    ),
    "wrong shape": (
        tensors(lambda s: s.update({NORM: torch.ones(65)})),
        (NORM, "[65]", "expected [64]"),
    ),
    "wrong dtype": (
        tensors(lambda s: s.update({NORM: torch.ones(64, dtype=torch.int32)})),
        (NORM, "I32", "BF16, F16, F32"),
    ),
    "values not finite": (tensors(lambda s: s[NORM].fill_(float("nan"))), (NORM, "finite")),
    "a layer too many in the config": (
        config(num_hidden_layers=3),
        ("missing tensors", "model.layers.2.", "self_attn.q_proj.weight"),
    ),
    "an index that is no JSON": (text(INDEX, "{"), (INDEX, "JSON")),
    "an index without a map": (text(INDEX, "{}"), (INDEX, "weight_map")),
    "an index with a list": (text(INDEX, '{"weight_map": []}'), (INDEX, "weight_map")),
    "an index out of the folder": (index({NORM: "../m.safetensors"}), (INDEX, "../m.safetensors")),
    "an index of numbers": (index({NORM: 1}), (INDEX,)),
    "an index to a missing shard": (index({NORM: "model-1.safetensors"}), ("model-1.safetensors",)),
    "an index from elsewhere": (index({"other": WEIGHTS}), (WEIGHTS, "other")),
    "a shard missing": (
        lambda f: (f / WEIGHTS).rename(f / "model-00001-of-00002.safetensors"),
        ("model-00002-of-00002.safetensors",),
    ),
    "tokenizer truncated": (cut(TOKENIZER, 0.5), (TOKENIZER, "JSON")),
    "tokenizer a list": (text(TOKENIZER, "[]"), (TOKENIZER, "list")),
    "tokenizer empty": (text(TOKENIZER, "{}"), (TOKENIZER,)),
    "tokenizer a folder": (as_folder(TOKENIZER), (TOKENIZER, "directory")),
    "tokenizer missing": (remove(TOKENIZER), (TOKENIZER, "beside its weights")),
    "added tokens a number": (tokenizer(lambda t: t.update(added_tokens=5)), (TOKENIZER,)),
    "added tokens numbers": (tokenizer(lambda t: t.update(added_tokens=[1])), (TOKENIZER,)),
    "vocabulary a list": (tokenizer(lambda t: t["model"].update(vocab=[])), (TOKENIZER,)),
    "merges of unknown pieces": (
        tokenizer(lambda t: t["model"].update(merges=[["a", "zz"]])),
        (TOKENIZER, "zz"),
    ),
    "no decoder": (tokenizer(lambda t: t.update(decoder=None)), ("ByteLevel", "ByteFallback")),
    "fewer ids than rows": (token_count(300), ("300", "320", "--allow-padded-vocab")),
    "more ids than rows": (token_count(330), ("329", "320")),
    "tokenizer config no object": (text("tokenizer_config.json", "5"), ("tokenizer_config.json",)),
    "generation config broken": (text("generation_config.json", "{"), ("generation_config.json",)),
    "template not UTF-8": (data("chat_template.jinja", b"\xff"), ("chat_template.jinja", "UTF-8")),
    "template a folder": (as_folder("chat_template.jinja"), ("chat_template.jinja",)),
}

# A header that lies: shape, offsets and dtype of a tensor in a file with 64 bytes of data.
LIES: dict[str, tuple[Any, ...]] = {
    "offsets past the end": ([64], [0, 256]),
    "offsets far past the end": ([16], [2**62, 2**62 + 64]),
    "offsets backwards": ([16], [64, 0]),
    "offsets negative": ([16], [-64, 0]),
    "offsets leave bytes over": ([8], [0, 32]),
    "shape larger than its bytes": ([64], [0, 64]),
    "shape that overflows": ([2**33, 2**33], [0, 64]),
    "shape negative": ([-16], [0, 64]),
    "shape of text": (["16"], [0, 64]),
    "unknown dtype": ([16], [0, 64], "F99"),
}
BROKEN |= {name: (header(tensor_entry(*entry)), (WEIGHTS,)) for name, entry in LIES.items()}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint(folder: Path, capsys: Capture, name: str) -> None:
    edit, words = BROKEN[name]
    edit(folder)
    line = error_line(capsys, *generate(folder))
    for word in words:
        assert word in line
    assert "a fault in starquill" not in line
    assert len(line) < 2000


@pytest.mark.parametrize("name", BROKEN)
def test_inspecting_a_broken_checkpoint(folder: Path, capsys: Capture, name: str) -> None:
    """It may describe what it need not read, but never stumbles."""
    BROKEN[name][0](folder)
    code = main(["inspect", str(folder)])
    out, err = capsys.readouterr()
    assert code in (0, 2)
    assert "Traceback" not in err
    if code == 2:
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_every_problem_of_a_config_is_told_at_once(folder: Path, capsys: Capture) -> None:
    config(hidden_size="a", vocab_size=-1, norm_epsilon=None, use_bias="no", rope_theta=0)(folder)
    line = error_line(capsys, *generate(folder))
    for key in ("hidden_size", "vocab_size", "use_bias", "rope_theta"):
        assert key in line
    # A value that is wrong itself is not blamed for what does not fit it, too.
    assert "multiple" not in line


def test_tensors_are_listed_at_once_and_twenty_at_most(folder: Path, capsys: Capture) -> None:
    def change(state: dict[str, Tensor]) -> None:
        for name in [n for n in state if "layers.1" in n] + [NORM]:
            del state[name]
        state.update({f"extra.{n}": torch.zeros(1) for n in range(30)})
        state["model.norm.bias"] = torch.zeros(3)
        state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].double()

    tensors(change)(folder)
    line = error_line(capsys, *generate(folder))
    assert "missing tensors: " in line
    assert "unexpected tensors: extra.0," in line
    assert line.count("extra.") == 20
    assert "and 10 more" in line
    assert "model.norm.bias [3] (expected [64])" in line
    assert "model.embed_tokens.weight F64" in line


def test_models_that_are_not_there(tmp_path: Path, capsys: Capture) -> None:
    for name in ("nowhere", str(tmp_path / "no" / "such" / "model"), "~nobody-at-all/model", "\0"):
        assert "hub id" in error_line(capsys, *generate(name))
    for file in ("model.bin", "model.pt", "notes.txt"):
        (tmp_path / file).write_bytes(b"x")
        line = error_line(capsys, *generate(tmp_path / file))
        assert file in line
        assert ".safetensors" in line
    (tmp_path / "model.gguf").write_bytes(b"x")
    line = error_line(capsys, *generate(tmp_path / "model.gguf"))
    assert "model.gguf is not a whole GGUF file (1 bytes)" in line


# --- the hub; no test here reaches it ---


def hub_error(name: str) -> BaseException:
    from huggingface_hub import errors

    kind = getattr(errors, name)
    if issubclass(kind, errors.HfHubHTTPError):
        return kind("said so", response=SimpleNamespace(headers={}, request=None))
    return kind("said so")


UNREACHABLE = ("a/b", "cannot be reached")
HUB = {
    "LocalEntryNotFoundError": UNREACHABLE,
    "OfflineModeIsEnabled": UNREACHABLE,
    "HfHubHTTPError": UNREACHABLE,
    "HTTPError": UNREACHABLE,  # the parent of what the HTTP library raises while downloading
    "XetDownloadError": UNREACHABLE,
    "GatedRepoError": ("a/b", "gated", "log in"),
    "RepositoryNotFoundError": ("a/b", "no such model"),
    "RevisionNotFoundError": ("a/b", "'r1'"),
    "HFValidationError": ("a/b", "said so"),
}


@pytest.mark.parametrize("name", HUB)
@pytest.mark.parametrize("verb", ["generate", "inspect"])
def test_hub_errors(capsys: Capture, monkeypatch: pytest.MonkeyPatch, verb: str, name: str) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", raising(hub_error(name)))
    model = ["-m", "a/b", "-p", "x"] if verb == "generate" else ["a/b"]
    line = error_line(capsys, verb, *model, "--revision", "r1")
    for word in HUB[name]:
        assert word in line


def test_a_full_disk_while_downloading(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("huggingface_hub.snapshot_download", raising(full))
    line = error_line(capsys, *generate("a/b"))
    assert "No space left" in line
    assert "network" not in line


def test_a_hub_model_runs(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def give(name: str, revision: str | None = None, **_: Any) -> str:
        asked.append((name, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", give)
    assert main(generate("a/b.c-d", "--revision", "v2")) == 0
    assert set(asked) == {("a/b.c-d", "v2")}


# --- options and prompts ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temp", "-1"], ("temperature is -1.0", "0 to 100")),
        (["--temp", "nan"], ("temperature is nan",)),
        (["--temp", "1e400"], ("temperature is inf",)),
        (["--temp", "warm"], ("--temp",)),
        (["--temp"], ("--temp",)),
        (["--top-p", "1.5"], ("top_p is 1.5", "0 to 1")),
        (["--top-k", "-1"], ("top_k is -1",)),
        (["--top-k", "1.5"], ("--top-k",)),
        (["--min-p", "2"], ("min_p is 2.0",)),
        (["--max-tokens", "-3"], ("max_tokens is -3", "0 or more")),
        (["--max-tokens", "many"], ("--max-tokens",)),
        (["--max-tokens", "9" * 5000], ("--max-tokens",)),
        (["--seed", "x"], ("--seed",)),
        (["--repetition-penalty", "0"], ("repetition_penalty is 0.0",)),
        (["--presence-penalty", "3"], ("presence_penalty is 3.0",)),
        (["--frequency-penalty", "inf"], ("frequency_penalty is inf",)),
        (["--logprobs", "21"], ("logprobs is 21", "0 to 20")),
        (["--logit-bias", ""], ("--logit-bias", "ID=BIAS")),
        (["--logit-bias", "5"], ("--logit-bias is '5'", "ID=BIAS")),
        (["--logit-bias", "a=1"], ("--logit-bias is 'a=1'", "ID=BIAS")),
        (["--logit-bias", "5=x"], ("--logit-bias is '5=x'", "ID=BIAS")),
        (["--logit-bias", "5=nan"], ("logit_bias", "finite")),
        (["--logit-bias", "320=1"], ("320", "0 to 319")),
        (["--logit-bias", "-1=1"], ("-1", "0 to 319")),
        (["--dtype", "int8"], ("'int8'", "float32, bfloat16, float16")),
        (["--language", "klingon"], ("'klingon'",)),
        (["--colour"], ("--colour",)),
        (["extra"], ("extra",)),
        (["--chat"], ("no chat template",)),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_options(folder: Path, capsys: Capture, options: list[str], words: tuple[str, ...]) -> None:
    line = error_line(capsys, *generate(folder, *options))
    for word in words:
        assert word in line


def test_verbs(capsys: Capture) -> None:
    assert "bogus" in error_line(capsys, "bogus")
    assert "no prompt" in error_line(capsys, "generate")
    assert "model" in error_line(capsys, "inspect")


def test_without_arguments_the_help_is_shown_and_no_empty_error(capsys: Capture) -> None:
    assert main([]) in (0, 2)
    out, err = capsys.readouterr()
    assert "generate" in out + err
    assert "error:" not in out + err


def test_prompts(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["generate", "-m", str(folder), "-n", "3", "-p"]
    line = error_line(capsys, *arguments, "x" * 99)
    assert "99 tokens" in line
    assert "64" in line
    assert "UTF-8" in error_line(capsys, *arguments, "a\udcff")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xffc")))
    assert "standard input is not UTF-8 (byte 2)" in error_line(capsys, *arguments, "-")
    monkeypatch.setattr(sys, "stdin", None)  # how Python says that it was closed
    assert "standard input" in error_line(capsys, *arguments, "-")


def test_a_start_token_is_needed_for_an_empty_prompt(folder: Path, capsys: Capture) -> None:
    (folder / "tokenizer_config.json").unlink()
    assert "empty" in error_line(capsys, "generate", "-m", str(folder), "-p", "")


# --- faults of ours ---


@pytest.mark.parametrize("error", [RuntimeError("two\nlines"), KeyError("x"), AssertionError()])
def test_our_faults_exit_with_1(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("starquill.cli.run.load", raising(error))
    line = error_line(capsys, *generate(folder), code=1)
    assert type(error).__name__ in line
    assert "--debug" in line
    assert main(["--debug", *generate(folder)]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_no_memory(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starquill.cli.run.load", raising(MemoryError()))
    assert "memory" in error_line(capsys, *generate(folder))


def test_a_process_ends_with_the_line_and_the_code(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "starquill", *generate(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == f"error: {tmp_path / CONFIG} is missing\n"
