"""`starquill plan`: adds up what the checkpoint says, reads no weight, and says what would fit."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from starquill.checkpoint.build import expected_tensors
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.checkpoint.source import SafetensorsSource
from starquill.cli.app import main
from starquill.models import architecture
from starquill.nn.cache import BLOCK
from starquill.quant.weight import Computing
from starquill.quantizing import QuantOptions, plan_checkpoint, planned_bytes
from tests import tiny

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: Any, name: str) -> Any:
        raise AssertionError(f"plan read {name}")

    monkeypatch.setattr(SafetensorsSource, "read", refuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_checkpoint(tmp_path / "m", tiny.config(num_hidden_layers=4))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 15B that is a header and a hole in a sparse file."""
    folder = tmp_path_factory.mktemp("15b")
    raw = tiny.config(
        hidden_size=6144, num_hidden_layers=40, num_attention_heads=48, num_key_value_heads=4,
        intermediate_size=24576, vocab_size=49152, tie_word_embeddings=False, sliding_window=4096,
        max_position_embeddings=16384,
    )  # fmt: skip
    spec = architecture(raw)
    header, end = {}, 0
    for name, shape in expected_tensors(spec.Model(spec.read_config(raw))).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    tiny.write_json(folder / "config.json", raw)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder


def planned(capsys: Capture, *arguments: str | Path) -> dict[str, Any]:
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    assert found["fits"] is True
    return found


def refused(capsys: Capture, *arguments: str | Path) -> tuple[str, str]:
    """What went to standard output, and the one line of the error."""
    assert main(["plan", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return out, err


@pytest.mark.parametrize("quant", [None, "4", "mixed-2-6"])
@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
def test_bytes_are_those_that_loading_takes(
    tmp_path: Path, capsys: Capture, quant: str | None, head: bool
) -> None:
    raw = tiny.config(tie_word_embeddings=not head)
    folder = tiny.write_checkpoint(tmp_path, raw, tiny.weights(raw, head))
    found = planned(capsys, folder, "--device-map", "cpu", *(["--quant", quant] if quant else []))
    checkpoint = open_checkpoint(locate(folder))
    plan = plan_checkpoint(checkpoint, QuantOptions(quant or "4"))
    if quant is None:
        plan = type(plan)({})
    expected = planned_bytes(checkpoint, plan, Computing(torch.float32, as_stored=True))
    assert abs(found["weights"] - expected) <= 2  # rounded by part
    (cpu,) = found["devices"]
    assert cpu["weights"] == found["weights"]
    assert cpu["layers"] == "0-1"
    assert sum(layer["weights"] for layer in found["layers"]) < found["weights"]


def test_caches_are_of_the_engines_blocks(folder: Path, capsys: Capture) -> None:
    """Four layers, two KV heads of 16, window 8 and 513 tokens at a time: a block is enough."""
    for dtype, size in (("auto", 4), ("bfloat16", 2)):
        found = planned(capsys, folder, "--device-map", "cpu", "--dtype", dtype)
        (cpu,) = found["devices"]
        assert cpu["cache"] == 4 * (2 * 2 * 16 * size) * 3 * BLOCK
    more = planned(capsys, folder, "--device-map", "cpu", "--max-batch-size", "3")
    assert more["devices"][0]["cache"] == 4 * (2 * 2 * 16 * 4) * 7 * BLOCK


def test_a_plan_for_the_15b(large: Path, capsys: Capture) -> None:
    memory = "cuda:0=8GB,cpu=64GB"
    found = planned(capsys, large, "--quant", "4", "--max-memory", memory)
    # The same as the golden plan of this shape.
    assert found["device_map"] == "cuda:0=0-28,cpu=29-39,embed=cpu,head=cuda:0"
    assert [layer["device"] for layer in found["layers"]] == ["cuda:0"] * 29 + ["cpu"] * 11
    assert {layer["scheme"] for layer in found["layers"]} == {"q4-g64"}
    again = planned(
        capsys, large, "--quant", "4", "--max-memory", memory, "--device-map", found["device_map"]
    )
    assert again == found
    for use in found["devices"]:
        parts = ("weights", "cache", "activations", "buffers", "reserve")
        assert sum(use[part] for part in parts) == use["total"] <= use["free"]


def test_the_15b_within_four_gigabytes(large: Path, capsys: Capture) -> None:
    found = planned(capsys, large, "--quant", "4", "--max-memory", "cpu=4GB,disk=inf")
    assert found["device_map"] == "cpu=0-7,disk=8-39,embed=disk,head=cpu"
    assert [use["free"] for use in found["devices"]] == [4 * 10**9, None]


def test_what_fits_is_offered_and_fits(large: Path, capsys: Capture) -> None:
    out, err = refused(capsys, large, "--max-memory", "cuda:0=12GB", "--json")
    found = json.loads(out)
    assert (found["fits"], found["part"], found["device"]) == (False, "layer 13", "cuda:0")
    assert found["asked"] > found["free"]
    assert f"layer 13 does not fit on cuda:0: it asks for {found['asked'] / 1e6:.2f} MB" in err
    assert [offer["quant"] for offer in found["offers"]] == ["4"]
    for offer in found["offers"]:
        assert offer["command"] in err
        program, *arguments = shlex.split(offer["command"])
        assert program == "starquill"
        assert main([*arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["device_map"] == offer["device_map"]


def test_a_shorter_context_and_fewer_sequences_are_offered(large: Path, capsys: Capture) -> None:
    more = ["--quant", "4", "--max-memory", "cuda:0=12GB", "--max-batch-size", "5"]
    out, _ = refused(capsys, large, *more, "--json")
    found = [(o["quant"], o["max_seq_len"], o["max_batch_size"]) for o in json.loads(out)["offers"]]
    assert ("4", 16384, 2) in found
    assert any(o[2] == 5 and o[1] < 4096 for o in found)


def test_nothing_fits(folder: Path, capsys: Capture) -> None:
    _, err = refused(capsys, folder, "--max-memory", "cpu=1MB")
    assert "the embedding does not fit on cpu" in err
    assert "nothing smaller fits either" in err


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path, capsys: Capture) -> None:
    name = tiny.SHARED / "data" / "starcoder2-tiny" / "mlx-q4-g64"
    if not name.exists():
        pytest.skip(tiny.NO_SHARED)
    found = planned(capsys, name, "--device-map", "cpu")
    assert {layer["scheme"] for layer in found["layers"]} == {"q4-g64"}
    out, _ = refused(capsys, name, "--max-memory", "cpu=1MB", "--json")
    assert json.loads(out)["offers"] == []


def test_one_file_for_schemes_and_devices(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    both = tmp_path / "t.yaml"
    both.write_text('"0-1": {quant: 8, device: cuda:0}\n"2-3": {device: cpu}\n')
    found = planned(capsys, folder, "--quant", "4", "--topology", both)
    assert [(layer["device"], layer["scheme"]) for layer in found["layers"]] == [
        ("cuda:0", "q8-g64"), ("cuda:0", "q8-g64"), ("cpu", "q4-g64"), ("cpu", "q4-g64"),
    ]  # fmt: skip
    # A map on the command line wins; a file of devices alone needs no --quant.
    found = planned(
        capsys, folder, "--quant", "4", "--topology", both, "--device-map", "auto",
        "--max-memory", "cpu=1GB",
    )  # fmt: skip
    assert {layer["device"] for layer in found["layers"]} == {"cpu"}
    both.write_text("default: {device: cpu}\n")
    assert planned(capsys, folder, "--topology", both)["embed"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--device-map", "cpu=0-1,cuda=1-9"], "'cuda=1-9' passes the last layer, 3"),
        (["--device-map", "0:16;1:16"], "'1:16' passes the last layer, 3, with layers 16 to 31"),
        (["--device-map", "gpu"], "'gpu' is no device map"),
        (["--device-map", "cpu=0-3,embed=cpu,head=disk"], "part what is one matrix"),
        (["--max-memory", "gpu=1GB"], "'gpu=1GB' names no device"),
        (["--max-memory", "disk=inf"], "give --max-memory a cpu=SIZE beside disk"),
        (["--max-seq-len", "65"], "max_seq_len is 65 (expected 1 to 64)"),
        (["--max-seq-len", "0"], "max_seq_len is 0"),
        (["--max-batch-size", "0"], "max_batch_size is 0"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--quant", "9"], "'9'"),
        (["--quant-strict"], "need --quant"),
        (["--topology", "nothing.yaml"], "nothing.yaml"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)
def test_mistakes_are_one_line(
    folder: Path, capsys: Capture, arguments: list[str], fact: str
) -> None:
    assert fact in refused(capsys, folder, *arguments)[1]


def test_a_map_that_does_not_fit_names_its_layer(large: Path, capsys: Capture) -> None:
    text = "cuda:0=0-19,cpu=20-39"
    memory = "cuda:0=8GB,cpu=64GB"
    _, err = refused(capsys, large, "--device-map", text, "--max-memory", memory)
    assert "layer 8 does not fit on cuda:0" in err
    assert err.count("starquill plan") == 1
    assert f"--device-map auto --max-memory {memory} --max-seq-len 16384" in err


def test_weights_that_do_not_fit_their_config_are_refused(folder: Path, capsys: Capture) -> None:
    tiny.write_json(folder / "config.json", tiny.config(num_hidden_layers=5))
    assert "missing tensors: model.layers.4" in refused(capsys, folder)[1]


def test_the_table_says_the_same(folder: Path, capsys: Capture) -> None:
    arguments = [str(folder), "--quant", "4", "--max-memory", "cuda:0=600MB,cpu=1GB"]
    found = planned(capsys, *arguments)
    assert main(["plan", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"device map: {found['device_map']}\n" in out
    assert "room for: 1 x 64 tokens\n" in out
    assert f"quantization: {found['quantization']}\n" in out
    for use in found["devices"]:
        (row,) = [line for line in out.splitlines() if line.startswith(f"│ {use['device']} ")]
        assert use["layers"] in row
        assert f"{use['total'] / 1e6:.2f} MB" in row


def test_without_budgets_it_is_what_is_free(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda number: (number * 10**9, 2 * 10**9))
    monkeypatch.setattr("starquill.placing.available_memory", lambda: None)
    found = planned(capsys, folder)
    assert found["device_map"] == "cuda:1=0-3,embed=cuda:1,head=cuda:1"
    assert found["devices"][0]["free"] == 10**9
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = planned(capsys, folder)
    assert found["device_map"] == "cpu=0-3,embed=cpu,head=cpu"
    assert found["devices"][0]["free"] is None
