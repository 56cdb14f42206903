"""llama.cpp's imatrix in both its forms: what is read, what is refused, how it is told."""

from __future__ import annotations

import logging
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from starquill.calibration import is_imatrix, read_imatrix
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.errors import CheckpointError, StarquillError
from starquill.loading import load
from starquill.models.starcoder2 import GGUF
from starquill.quantizing import QuantOptions, plan_checkpoint
from tests import tiny

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
C_FC, C_PROJ = (f"model.layers.1.mlp.{name}.weight" for name in ("c_fc", "c_proj"))
PYTHON = "def f(x):\n    return x\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_checkpoint(tmp_path / "model")


def _importances(folder: Path, data: Path) -> dict[str, Tensor]:
    plan = plan_checkpoint(open_checkpoint(locate(folder)), QuantOptions("4", calibrate=data))
    return dict(plan.importances)


# --- the older form ---


def _older(entries: dict[str, Any], calls: int = 2, more: bytes = b"") -> bytes:
    data = struct.pack("<i", len(entries))
    for name, values in entries.items():
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", calls, len(values)) + np.float32(values).tobytes()
    return data + more


@pytest.mark.parametrize("more", [b"", struct.pack("<ii", 7, 4) + b"code"], ids=["bare", "told"])
def test_older_imatrix(tmp_path: Path, more: bytes) -> None:
    path = tmp_path / "code.imatrix"
    path.write_bytes(_older({"blk.1.ffn_up.weight": np.arange(64)}, more=more))
    ((name, values),) = read_imatrix(path, GGUF).items()
    assert name == C_FC
    assert values.tolist() == [n / 2 for n in range(64)]


def _refused(path: Path, data: bytes, said: str | None = None) -> None:
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=said) as caught:
        read_imatrix(path, GGUF)
    assert str(caught.value).isprintable()
    assert str(path) in str(caught.value)


def test_an_older_imatrix_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = _older({"blk.1.ffn_up.weight": np.arange(8), "blk.1.ffn_down.weight": np.arange(8)})
    for end in range(len(whole)):
        _refused(tmp_path / "code.imatrix", whole[:end], "no imatrix file")


@pytest.mark.parametrize("value", [-1, 0, 2**31 - 1])
@pytest.mark.parametrize("at", [0, 4, 31], ids=["entries", "name", "values"])
def test_a_damaged_older_imatrix_is_refused(tmp_path: Path, at: int, value: int) -> None:
    data = bytearray(_older({"blk.1.ffn_up.weight": np.arange(64)}))
    assert struct.unpack_from("<i", data, at)[0] in (1, 19, 64)
    struct.pack_into("<i", data, at, value)
    _refused(tmp_path / "code.dat", bytes(data), "no imatrix file")


# --- the GGUF form ---


def _gguf(path: Path, tensors: dict[str, Any], kind: str | None = "imatrix") -> Path:
    """As llama-imatrix writes it: no architecture, and sums that are not divided."""
    writer = gguf.GGUFWriter(path, "")
    if kind is not None:
        writer.add_key_value("general.type", kind, gguf.GGUFValueType.STRING)
    writer.add_array("imatrix.datasets", ["code.txt"])
    writer.add_uint32("imatrix.chunk_count", 4)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in tensors.items():
        array = np.asarray(values)
        writer.add_tensor(name, array if array.dtype == np.float16 else array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pair(name: str, sums: Any, counts: Any) -> dict[str, Any]:
    """Sums `[E, in]` and counts `[E, 1]`, with E = 1 for a matrix."""
    return {f"{name}.in_sum2": np.atleast_2d(sums), f"{name}.counts": np.reshape(counts, (-1, 1))}


def test_gguf_imatrix(tmp_path: Path) -> None:
    tensors = _pair("blk.1.ffn_up.weight", np.arange(64), 4)
    tensors |= _pair("output.weight", np.ones(64), 8)
    found = read_imatrix(_gguf(tmp_path / "i.gguf", tensors), GGUF)
    assert found.keys() == {C_FC, HEAD}
    assert found[C_FC].tolist() == [n / 4 for n in range(64)]
    assert found[HEAD].tolist() == [1 / 8] * 64


def test_stacked_experts_in_a_gguf_imatrix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = _pair("blk.0.ffn_up.weight", [[2.0, 4.0], [0.0, 0.0], [3.0, 9.0]], [2, 0, 3])
    ((_, values),) = read_imatrix(_gguf(tmp_path / "i.gguf", tensors), GGUF).items()
    assert values.tolist() == [[1.0, 2.0], [1.0, 1.0], [1.0, 3.0]]
    assert "model.layers.0.mlp.c_fc.weight[1]" in caplog.text


@pytest.mark.parametrize("form", ["older", "gguf"])
def test_entries_that_counted_nothing_are_named_and_left_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    names = {name: _gguf_name(name) for name in tiny.weights(tiny.config()) if "proj" in name}
    names = {n: g for n, g in names.items() if n.endswith("weight") and n != C_PROJ}
    path = tmp_path / "i.imatrix"
    if form == "gguf":
        tensors = _pair("blk.1.ffn_down.weight", np.zeros(256), 0)
        for name, theirs in names.items():
            tensors |= _pair(theirs, np.ones(_width(name)), 1)
        _gguf(path, tensors)
    else:
        entries = {theirs: np.ones(_width(name)) for name, theirs in names.items()}
        zero = _older({"blk.1.ffn_down.weight": np.zeros(256)}, calls=0)
        data = bytearray(_older(entries) + zero[4:])
        struct.pack_into("<i", data, 0, len(entries) + 1)
        path.write_bytes(data)
    found = _importances(model, path)
    assert found.keys() == names.keys()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "quantized without" in line
    assert EMBEDDING in line  # tied, and no head is in the file
    assert "and 1 more" in line  # c_fc twice, c_proj once and the embedding
    plain, held = load(model, quant="4-hqq"), load(model, quant=QuantOptions("4", calibrate=path))
    ours, theirs = (m.model.model.layers[1].mlp.c_proj.weight.packed for m in (plain, held))
    assert torch.equal(ours, theirs)


def _gguf_name(name: str) -> str:
    """llama.cpp's name of one of our matrices."""
    for theirs, ours in GGUF.modules.items():
        if match := re.fullmatch(re.escape(ours).replace(r"\{\}", r"(\d+)") + r"\.weight", name):
            return f"{theirs.format(*match.groups())}.weight"
    return name


def _width(name: str) -> int:
    return 256 if "c_proj" in name else 64


@pytest.mark.parametrize(
    ("tensors", "kind", "said"),
    [
        (_pair("blk.1.ffn_up.weight", np.ones(4), 1), "model", "of type 'model'"),
        (_pair("blk.1.ffn_up.weight", np.ones(4), 1), None, "of type None"),
        ({"blk.1.ffn_up.weight.in_sum2": np.ones((1, 4))}, "imatrix", r"lacks.*blk\.1\.ffn_up"),
        ({"blk.1.ffn_up.weight.counts": np.ones((1, 1))}, "imatrix", r"lacks.*blk\.1\.ffn_up"),
        (_pair("blk.1.ffn_up.weight", np.float16([1, 1]), np.float16(1)), "imatrix", "float32"),
        (_pair("blk.1.ffn_up.weight", np.ones((3, 4)), [1, 1]), "imatrix", "2 counts for sums"),
        (_pair("blk.1.ffn_up.weight", [np.nan, 1], 1), "imatrix", "damaged.*c_fc"),
        (_pair("blk.1.ffn_up.weight", [-1, 1], 1), "imatrix", "damaged.*c_fc"),
        (_pair("blk.1.ffn_up.weight", [1, 1], -1), "imatrix", "damaged.*c_fc"),
        (_pair("blk.1.ffn_up.weight", [1, 1], np.nan), "imatrix", "damaged.*c_fc"),
        (_pair("other", [1, 1], 1), "imatrix", "names no layer"),
        ({"blk.1.ffn_up.weight": np.ones(4)}, "imatrix", "names no layer"),
    ],
)
def test_a_gguf_that_is_no_imatrix(
    tmp_path: Path, tensors: dict[str, Any], kind: str | None, said: str
) -> None:
    path = _gguf(tmp_path / "i.imatrix", tensors, kind)
    _refused(path, path.read_bytes(), said)


def test_a_gguf_imatrix_cut_or_damaged_anywhere(tmp_path: Path) -> None:
    path = _gguf(tmp_path / "i.gguf", _pair("blk.1.ffn_up.weight", np.arange(64), 4))
    whole = path.read_bytes()
    last = int(np.flatnonzero(np.frombuffer(whole, np.uint8))[-1])  # padding may be missing
    for end in [*range(0, last, 7), last]:
        _refused(path, whole[:end])
    generator = np.random.default_rng(0)
    for at in generator.integers(0, len(whole) - 260, 150):
        path.write_bytes(whole[:at] + generator.bytes(2) + whole[at + 2 :])
        try:
            read_imatrix(path, GGUF)
        except StarquillError as error:
            assert str(error).isprintable()  # noqa: PT017


# --- which of all it is ---


@pytest.mark.parametrize("name", ["i", "i.bin", "i.py", "i.dat", "i.imatrix", "i.gguf"])
@pytest.mark.parametrize("form", ["older", "gguf"])
def test_an_imatrix_is_known_by_its_content(
    model: Path, tmp_path: Path, name: str, form: str
) -> None:
    path = tmp_path / name
    if form == "gguf":
        _gguf(path, _pair("blk.1.ffn_up.weight", np.arange(64), 2))
    else:
        path.write_bytes(_older({"blk.1.ffn_up.weight": np.arange(64)}))
    assert is_imatrix(path)
    ((found, values),) = _importances(model, path).items()
    assert found == C_FC
    assert values.tolist() == [n / 2 for n in range(64)]


@pytest.mark.parametrize(
    "text",
    [PYTHON, "", "x", "é😀", "\n\n\n\n", "GGUX", "a\n".encode("utf-16"), "a\n".encode("utf-16-le")],
)
def test_text_is_no_imatrix(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "code.py"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert not is_imatrix(path)
    assert is_imatrix(path.rename(tmp_path / "code.imatrix"))


@pytest.mark.parametrize("name", ["i.imatrix", "i.gguf", "i.dat"])
@pytest.mark.parametrize("data", [b"", b"GG", PYTHON.encode(), b"GGUF"])
def test_what_is_called_an_imatrix_and_is_none(tmp_path: Path, name: str, data: bytes) -> None:
    _refused(tmp_path / name, data)


def test_an_imatrix_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    path = _gguf(tmp_path / "i.gguf", _pair("blk.1.ffn_up.weight", np.ones(63), 1))
    with pytest.raises(CheckpointError, match=rf"63 values for {C_FC} \(expected 64\)"):
        _importances(model, path)


@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
def test_the_heads_entry_is_the_embeddings_where_they_are_one(tmp_path: Path, head: bool) -> None:
    raw = tiny.config(tie_word_embeddings=not head)
    folder = tiny.write_checkpoint(tmp_path / "m", raw, tiny.weights(raw, head))
    tensors = _pair("blk.1.ffn_up.weight", np.ones(64), 1) | _pair("output.weight", np.ones(64), 1)
    found = _importances(folder, _gguf(tmp_path / "i.gguf", tensors))
    assert found.keys() == {C_FC, HEAD if head else EMBEDDING}
