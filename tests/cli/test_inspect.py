"""`starquill inspect`: numbers that agree with the files, and no weight read."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from starquill.checkpoint.build import expected_tensors
from starquill.checkpoint.source import SafetensorsSource
from starquill.cli.app import main
from starquill.models import architecture
from tests import tiny

Capture = pytest.CaptureFixture[str]
WINDOWS: list[int | None] = [8, None]


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds for every test of this file."""

    def refuse(_self: Any, name: str) -> Any:
        raise AssertionError(f"inspect read {name}")

    monkeypatch.setattr(SafetensorsSource, "read", refuse)


def facts(model: Path | str, capsys: Capture) -> dict[str, Any]:
    assert main(["inspect", str(model), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    result = json.loads(out)
    assert isinstance(result, dict)
    return result


def table(model: Path, capsys: Capture) -> dict[str, str]:
    """The rows that are printed for people, cells that go over several lines joined."""
    assert main(["inspect", str(model)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows: dict[str, str] = {}
    last = ""
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.strip()[1:-1].split("│")]
        if len(cells) != 2:
            continue
        last = cells[0] or last
        rows[last] = f"{rows.get(last, '')} {cells[1]}".strip()
    return rows


def sizes(path: Path) -> dict[str, tuple[int, int]]:
    """Numbers and bytes of every tensor, as the safetensors library reads them."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return {name: (t.numel(), t.numel() * t.element_size()) for name, t in tensors.items()}


def of_part(sized: dict[str, tuple[int, int]], *parts: str) -> int:
    return sum(size for name, (_, size) in sized.items() if any(part in name for part in parts))


@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_the_checkpoints(
    tmp_path: Path, capsys: Capture, head: bool, dtype: torch.dtype
) -> None:
    raw = tiny.config(tie_word_embeddings=not head, num_hidden_layers=3)
    state = {name: tensor.to(dtype) for name, tensor in tiny.weights(raw, head).items()}
    folder = tiny.write_checkpoint(tmp_path, raw, state)
    sized = sizes(folder / "model.safetensors")
    result = facts(folder, capsys)
    assert result["parameters"] == sum(count for count, _ in sized.values())
    assert sum(result["bytes"].values()) == sum(size for _, size in sized.values())
    expected = {
        "attention": of_part(sized, "self_attn"),
        "embedding": of_part(sized, "embed_tokens"),
        "mlp": of_part(sized, "mlp"),
        "norms": of_part(sized, "norm"),
    }
    assert result["bytes"] == expected | ({"head": of_part(sized, "lm_head")} if head else {})
    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert result["dtypes"] == {name: len(sized)}
    assert (result["model_type"], result["layers"]) == ("starcoder2", 3)
    assert (result["hidden_size"], result["vocab_size"]) == (64, 320)
    assert result["quantization"] is None
    assert result["warnings"] == []


@pytest.mark.parametrize("window", WINDOWS)
def test_context_and_window(tmp_path: Path, capsys: Capture, window: int | None) -> None:
    raw = tiny.config(sliding_window=window, max_position_embeddings=777)
    folder = tiny.write_checkpoint(tmp_path, raw)
    result = facts(folder, capsys)
    assert (result["context_length"], result["sliding_window"]) == (777, window)
    shown = table(folder, capsys)["context"]
    assert "777 tokens" in shown
    assert ("window" in shown) == (window is not None)


def test_tokens(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.write_checkpoint(tmp_path, tiny.config(eos_token_id=[3, 9999]))
    tiny.write_json(folder / "generation_config.json", {"eos_token_id": 4})
    result = facts(folder, capsys)
    assert result["special_tokens"] == {name: i for i, name in enumerate(tiny.SPECIAL_TOKENS)}
    assert result["end_tokens"] == [0, 3, 4]
    assert result["fill_in_the_middle"] is True
    assert result["chat_template"] is False
    assert any("9999" in warning for warning in result["warnings"])
    assert "9999" in table(folder, capsys)["warning"]


def test_a_chat_template_and_no_fill_tokens(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.write_checkpoint(tmp_path, tokenizer=tiny.byte_tokenizer(("<|endoftext|>",)))
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    result = facts(folder, capsys)
    assert result["chat_template"] is True
    assert result["fill_in_the_middle"] is False


@pytest.mark.parametrize("template", ["text", [{"name": "default", "template": "text"}]])
def test_a_template_in_the_tokenizers_config(
    tmp_path: Path, capsys: Capture, template: Any
) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    tiny.write_json(folder / "tokenizer_config.json", {"chat_template": template})
    assert facts(folder, capsys)["chat_template"] is True


def test_without_a_tokenizer(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    result = facts(folder, capsys)
    assert result["special_tokens"] == {}
    assert result["end_tokens"] == [0]


def test_shards_are_added_up(tmp_path: Path, capsys: Capture) -> None:
    whole = tiny.write_checkpoint(tmp_path / "whole")
    parted = tiny.write_checkpoint(tmp_path / "parted")
    (parted / "model.safetensors").unlink()
    state = tiny.weights(tiny.config())
    place: dict[str, str] = {}
    for number in (1, 2):
        name = f"model-{number:05d}-of-00002.safetensors"
        part = {k: v for n, (k, v) in enumerate(state.items()) if n % 2 == number - 1}
        save_file(part, parted / name)
        place |= dict.fromkeys(part, name)
    tiny.write_json(parted / "model.safetensors.index.json", {"weight_map": place})
    same = ("parameters", "bytes", "dtypes")
    assert [facts(whole, capsys)[key] for key in same] == [
        facts(parted, capsys)[key] for key in same
    ]


def test_a_weight_file_is_a_model_too(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    by_folder = facts(folder, capsys)
    by_file = facts(folder / "model.safetensors", capsys)
    assert {**by_file, "name": ""} == {**by_folder, "name": ""}


def test_the_table_says_the_same(tmp_path: Path, capsys: Capture) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    result, rows = facts(folder, capsys), table(folder, capsys)
    assert rows["parameters"] == f"{result['parameters']:,}"
    assert rows["bytes"] == f"{sum(result['bytes'].values()):,}"
    assert rows["in memory"] == f"{sum(result['resident'].values()):,}"
    for part, size in result["bytes"].items():
        assert rows[part] == f"{size:,} ({result['bits'][part]:.4g} bits each)"
    assert "tied" in rows["head"]
    assert rows["dtypes"] == f"F32 ({result['dtypes']['F32']} tensors)"
    assert rows["quantization"] == "none"
    assert rows["vocabulary"] == "320 tokens"
    assert rows["end tokens"] == "0"
    for name, index in result["special_tokens"].items():
        assert f"{name}={index}" in rows["special tokens"]


def test_markup_and_control_characters_in_names_are_shown_as_text(
    tmp_path: Path, capsys: Capture
) -> None:
    """A checkpoint comes from strangers: its names must not steer the terminal."""
    special = ("<|endoftext|>", "[red]x[/red]", "\x1b[2J\x1b]0;title\x07", "a\rb", "\x9b31m")
    folder = tiny.write_checkpoint(
        tmp_path / "[bold]m[/bold]", tokenizer=tiny.byte_tokenizer(special)
    )
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "[bold]m[/bold]" in out
    assert "[red]x[/red]=1" in out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)


def test_the_15b_is_described_from_its_header(tmp_path: Path, capsys: Capture) -> None:
    """32 GB that are only a hole in a sparse file: nothing but the header can be read."""
    raw = tiny.config(
        hidden_size=6144, num_hidden_layers=40, num_attention_heads=48, num_key_value_heads=4,
        intermediate_size=24576, vocab_size=49152, tie_word_embeddings=False,
    )  # fmt: skip
    spec = architecture(raw)
    header, end = {}, 0
    for name, shape in expected_tensors(spec.Model(spec.read_config(raw))).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    tiny.write_json(tmp_path / "config.json", raw)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    result = facts(tmp_path, capsys)
    assert result["parameters"] == 15_957_889_024
    assert sum(result["bytes"].values()) == 2 * 15_957_889_024
    assert result["bytes"]["head"] == result["bytes"]["embedding"] == 2 * 49_152 * 6_144


@pytest.mark.skipif(not tiny.SHARED.exists(), reason=tiny.NO_SHARED)
@pytest.mark.parametrize("name", ["mlx-q4-g64", "mlx-q6-g128", "mlx-q8-g64", "mlx-mixed"])
def test_quantized_checkpoints(capsys: Capture, name: str) -> None:
    folder = tiny.SHARED / "data" / "starcoder2-tiny" / name
    raw = json.loads((folder / "config.json").read_text())
    quantization = raw["quantization"]
    result = facts(folder, capsys)
    sized = sizes(folder / "model.safetensors")
    assert sum(result["bytes"].values()) == sum(size for _, size in sized.values())
    schemes = {f"q{quantization['bits']}-g{quantization['group_size']}"}
    settings = [value for value in quantization.values() if isinstance(value, dict)]
    schemes = {f"q{s['bits']}-g{s['group_size']}" for s in settings} or schemes
    assert all(scheme in result["quantization"] for scheme in schemes)
    # Parameters are the model's, not the packed words that hold them.
    original = tiny.DATA / "starcoder2-tiny"
    assert result["parameters"] == facts(original, capsys)["parameters"]
    assert schemes <= result["dtypes"].keys()


def test_the_reference_checkpoint(capsys: Capture) -> None:
    folder = tiny.DATA / "starcoder2-tiny"
    result = facts(folder, capsys)
    sized = sizes(folder / "model.safetensors")
    assert result["parameters"] == sum(count for count, _ in sized.values())
    assert result["parameters"] == sum(map(math.prod, shapes(folder)))
    assert (result["layers"], result["hidden_size"], result["vocab_size"]) == (2, 256, 512)
    assert result["sliding_window"] == 16


def shapes(folder: Path) -> list[list[int]]:
    """Straight from the file's header: 8 bytes of length, then JSON."""
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
