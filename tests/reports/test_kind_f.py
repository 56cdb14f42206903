"""Kind f: tied weights, files that are missing, stray or damaged, headers that lie, KV heads.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from starquill.checkpoint.describe import describe
from starquill.engine.loaded import LoadedModel
from starquill.errors import CheckpointError
from starquill.kernels.attention import Paged
from starquill.loading import load
from starquill.models.starcoder2 import Starcoder2Config
from starquill.nn.attention import attend
from starquill.nn.cache import CacheStep
from starquill.nn.linear import Embedding, Linear
from starquill.nn.rope import rope_table
from tests import tiny

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
INDEX = "model.safetensors.index.json"
STATE = tiny.weights(tiny.config())
OTHER = tiny.weights(tiny.config(), seed=9)


def _tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """Every tensor that the model holds, in whatever way, by its name in a checkpoint."""
    found: dict[str, Tensor] = dict(loaded.model.named_parameters(remove_duplicate=False))
    found |= dict(loaded.model.named_buffers(remove_duplicate=False))
    for path, module in loaded.model.named_modules():
        if isinstance(module, Linear | Embedding):
            found[f"{path}.weight"] = module.weight.dequantize()
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                found[f"{path}.{name}"] = value
    return found


def _assert_holds(model: Path, expected: dict[str, Tensor]) -> None:
    held = _tensors(load(model))
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor), name
    assert held.keys() - expected.keys() <= {HEAD}


def _refused(model: Path, *facts: str, readers: tuple[Any, ...] = (load, describe)) -> None:
    """Loading says `facts` in one printable line, and so does describing."""
    for read in readers:
        with pytest.raises(CheckpointError) as caught:
            read(model)
        message = str(caught.value)
        assert message.isprintable(), ascii(message)
        for fact in facts:
            assert fact in message


def _shard(number: int, count: int = 3) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _shards(folder: Path, index: bool = True, count: int = 3) -> dict[str, str]:
    """`STATE` in numbered shards; returns the index's weight_map."""
    tiny.write_checkpoint(folder, state=STATE)
    (folder / "model.safetensors").unlink()
    place = {name: _shard(i % count + 1, count) for i, name in enumerate(sorted(STATE))}
    for file in sorted(set(place.values())):
        save_file({n: STATE[n] for n, where in place.items() if where == file}, folder / file)
    if index:
        _write_index(folder, place)
    return place


def _write_index(folder: Path, place: Any) -> None:
    tiny.write_json(folder / INDEX, {"metadata": {"total_size": 1}, "weight_map": place})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
        {"use_bias": False},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
    ],
    ids=str,
)
def test_b62_nothing_stays_on_meta(tmp_path: Path, changes: dict[str, Any], dtype: Any) -> None:
    """B62: the tied side, or the rotary tables, stayed on meta: "cannot copy out of meta"."""
    raw = tiny.config(**changes)
    state = tiny.weights(raw)
    loaded = load(tiny.write_checkpoint(tmp_path, raw, state), dtype=dtype)
    held = _tensors(loaded)
    assert held.keys() == state.keys() | {HEAD}
    assert {tensor.device.type for tensor in held.values()} == {"cpu"}
    for name, tensor in state.items():
        kept = torch.float32 if "norm" in name else loaded.dtype
        assert torch.equal(held[name], tensor.to(kept)), name
    table = rope_table(loaded.config.rope, torch.arange(70)[None], torch.tensor([70]))
    assert all(not part.is_meta and bool(part.isfinite().all()) for part in table)


@pytest.mark.parametrize("tie", [..., True, False], ids=["absent", "true", "false"])
@pytest.mark.parametrize("shipped", ["none", "copy", "other"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b62_tied_memory_is_shared_and_counted_once(
    tmp_path: Path, tie: Any, shipped: str, dtype: Any
) -> None:
    """B62: the tied head was a second copy of the largest matrix."""
    raw = tiny.config(tie_word_embeddings=tie)
    state = dict(STATE)
    if shipped != "none":
        state[HEAD] = (STATE if shipped == "copy" else OTHER)[EMBEDDING].clone()
    folder = tiny.write_checkpoint(tmp_path, raw, state)
    held = _tensors(load(folder, dtype=dtype))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in held.values()}
    counted = {n: t for n, t in state.items() if n != HEAD or shipped == "other"}
    size = 4 if dtype == "float32" else 2
    nbytes = sum(t.numel() * (4 if "norm" in n else size) for n, t in counted.items())
    assert sum(storage.nbytes() for storage in storages.values()) == nbytes
    same = held[HEAD].data_ptr() == held[EMBEDDING].data_ptr()
    assert same == (shipped != "other")
    if shipped != "copy":  # headers alone cannot tell a copy
        facts = describe(folder)
        assert facts.parameters == sum(t.numel() for t in counted.values())
        assert ("head" in facts.bytes) == (shipped == "other")
        assert sum(facts.bytes.values()) == 4 * facts.parameters


@pytest.mark.parametrize("count", [1, 2, 3, 35])
@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_b64_complete_shards_load(tmp_path: Path, count: int, index: bool) -> None:
    """B64: every shard is read, whether an index or their numbers list them."""
    _shards(tmp_path, index, count)
    _assert_holds(tmp_path, STATE)


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("gone", [(1,), (2,), (3,), (1, 3), (2, 3)])
def test_b64_missing_shards_are_all_named(
    tmp_path: Path, gone: tuple[int, ...], index: bool
) -> None:
    """B64: a missing shard left weights uninitialised, and only the output was wrong."""
    _shards(tmp_path, index)
    for number in gone:
        (tmp_path / _shard(number)).unlink()
    names = ", ".join(_shard(number) for number in gone)
    _refused(tmp_path, str(tmp_path), "lacks shards", f": {names};")


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 200, 0.5, -1])
def test_b64_cut_shards_are_named(tmp_path: Path, kept: float, index: bool) -> None:
    """B64: an empty or cut shard (a broken download) must be named, not read as it is."""
    _shards(tmp_path, index)
    path = tmp_path / _shard(2)
    content = path.read_bytes()
    kept = int(kept * len(content)) if isinstance(kept, float) else kept
    path.write_bytes(content[:kept])
    _refused(tmp_path, str(path), f"({len(content[:kept]):,} bytes)", "download it again")


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_b64_a_single_cut_file_is_named(tmp_path: Path, index: bool) -> None:
    """B64: the same for a checkpoint in one file, and for one that the user names."""
    path = tiny.write_checkpoint(tmp_path) / "model.safetensors"
    if index:
        _write_index(tmp_path, dict.fromkeys(STATE, path.name))
    path.write_bytes(path.read_bytes()[:-4])
    _refused(tmp_path, str(path), "download it again")
    _refused(path, str(path), "download it again")


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "../model/../outside.safetensors",
        "sub/inside.safetensors",
        "./model.safetensors",
        "/absolute.safetensors",
        "..\\outside.safetensors",
        "sub\\inside.safetensors",
        "C:\\outside.safetensors",
        "C:outside.safetensors",
        "..",
        "",
        None,
        7,
        ["model.safetensors"],
        {"file": "model.safetensors"},
    ],
    ids=str,
)
def test_b64_an_index_must_not_leave_its_folder(tmp_path: Path, file: Any) -> None:
    """B64: `../x.safetensors` in a downloaded index read any file of the machine."""
    folder = tiny.write_checkpoint(tmp_path / "model")
    (folder / "sub").mkdir()
    for place in ("outside", "model/sub/inside"):
        save_file(STATE, tmp_path / f"{place}.safetensors")
    if file == "/absolute.safetensors":
        file = str(folder / "model.safetensors")
    _write_index(folder, {**dict.fromkeys(STATE, "model.safetensors"), NORM: file})
    _refused(folder, str(folder / INDEX), "names files outside its folder", str(file))


@pytest.mark.parametrize(
    "name", ["x" * 300, "\0", "a\nb", "\x1b[2J", "\ud800", "\u202e"], ids=lambda n: ascii(n[:9])
)
def test_b64_an_unspeakable_shard_name_is_a_missing_shard(tmp_path: Path, name: str) -> None:
    """B64: names that no file can have, or that would act on a terminal, in an index."""
    folder = tiny.write_checkpoint(tmp_path)
    _write_index(folder, {**dict.fromkeys(STATE, "model.safetensors"), NORM: f"{name}.safetensors"})
    _refused(folder, "lacks shards")


@pytest.mark.parametrize("place", [[], {}, "model.safetensors", 3, None, [["a", "b"]]], ids=str)
def test_b64_an_index_without_a_map_is_refused(tmp_path: Path, place: Any) -> None:
    """B64: an index of another shape must be named; the files beside it are no way out."""
    _write_index(tiny.write_checkpoint(tmp_path), place)
    _refused(tmp_path, str(tmp_path / INDEX), "has no weight_map")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "7", '{"a": ' + "1" * 5000 + "}", "[" * 100000, "\xff"]
)
def test_b64_an_index_that_is_no_object_is_refused(tmp_path: Path, content: str) -> None:
    """B64: a cut or damaged index must be named."""
    (tiny.write_checkpoint(tmp_path) / INDEX).write_bytes(content.encode("latin-1"))
    _refused(tmp_path, str(tmp_path / INDEX))


def test_b64_the_index_alone_decides(tmp_path: Path) -> None:
    """B64: a stray `model.safetensors`, or a tensor in two shards, overwrote the right values."""
    place = _shards(tmp_path)
    for name in ("model.safetensors", "model-00004-of-00004.safetensors", "adapter_model"):
        save_file(OTHER, (tmp_path / name).with_suffix(".safetensors"))
    for number in (1, 2, 3):
        file = _shard(number)
        mine = {n: STATE[n] for n, where in place.items() if where == file}
        save_file({**OTHER, **mine, "not.in.the.index": torch.ones(3)}, tmp_path / file)
    _assert_holds(tmp_path, STATE)
    for stray in ("model.safetensors", "consolidated.safetensors", "adapter_model.safetensors"):
        (tmp_path / stray).write_bytes(b"")
    _assert_holds(tmp_path, STATE)


def test_b64_a_tensor_twice_without_an_index_is_refused(tmp_path: Path) -> None:
    """B64: with no index to tell, which of two values counts would depend on the order."""
    _shards(tmp_path, index=False)
    save_file({NORM: OTHER[NORM], EMBEDDING: STATE[EMBEDDING]}, tmp_path / "model.safetensors")
    _refused(tmp_path, str(tmp_path), f"{EMBEDDING}, {NORM}; remove the stray file")
    (tmp_path / "model.safetensors").unlink()
    save_file({"more": torch.ones(1)}, tmp_path / "model-extra.safetensors")
    _refused(tmp_path, "unexpected tensors: more", readers=(load,))


def test_b64_a_stale_index_is_refused(tmp_path: Path) -> None:
    """B64: an index of another download names tensors that its shards lack, or too few."""
    place = _shards(tmp_path)
    _write_index(tmp_path, {**place, "model.norm.scale": _shard(2), "a.b": _shard(2)})
    _refused(tmp_path, f"{_shard(2)} lacks a.b, model.norm.scal")
    moved = _shard(1 if place[NORM] != _shard(1) else 2)
    _write_index(tmp_path, {**place, NORM: moved})
    _refused(tmp_path, f"{moved} lacks ", NORM)
    _write_index(tmp_path, {name: file for name, file in place.items() if name != NORM})
    _refused(tmp_path, f"missing tensors: {NORM}", readers=(load,))


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
@pytest.mark.parametrize("content", [None, b"", b"junk"], ids=["sound", "empty", "junk"])
def test_b64_an_adapter_beside_the_weights_is_no_weight(
    tmp_path: Path, content: bytes | None, index: bool
) -> None:
    """B64: `adapter_model.safetensors` beside the weights was read as one of them."""
    _shards(tmp_path, index)
    adapter = tmp_path / "adapter_model.safetensors"
    if content is None:
        save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, adapter)
    else:
        adapter.write_bytes(content)
    _assert_holds(tmp_path, STATE)
    for file in (*tmp_path.glob("model-*"), *tmp_path.glob(INDEX)):
        file.unlink()
    _refused(tmp_path, f"{tmp_path} has no .safetensors file")


@pytest.mark.parametrize("layout", ["one file", "index", "no index"])
def test_b64_links_of_the_hub_cache_work(tmp_path: Path, layout: str) -> None:
    """B64: the hub's cache is links to files elsewhere; a check of paths must not refuse those."""
    folder, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    if layout == "one file":
        tiny.write_checkpoint(folder, state=STATE)
    else:
        _shards(folder, layout == "index")
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{number:064x}"
        file.rename(blob)
        file.symlink_to(Path("..", "..", "blobs", blob.name))
    _assert_holds(folder, STATE)
    weights = sorted(folder.glob("*.safetensors"))[-1]
    weights.resolve().unlink()  # a link that leads nowhere is a missing file
    _refused(folder, weights.name)


Entry = dict[str, Any]


def _entry(**changes: Any) -> Entry:
    entry = {"dtype": "F32", "shape": [16], "data_offsets": [0, 64], **changes}
    return {key: value for key, value in entry.items() if value is not ...}


def _file(header: Any, data: int = 64, length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(encoded) if length is None else length
    return struct.pack("<Q", size) + encoded + bytes(data)


LIES: dict[str, bytes] = {
    "header past the end": _file({}, length=10**6),
    "header of 100 MB": _file({}, length=10**8 + 1),
    "header of 2**64 - 1": _file({}, length=2**64 - 1),
    "header of no bytes": _file({}, length=0),
    "header cut": _file({NORM: _entry()}, length=20),
    "no JSON": _file(b"{nope"),
    "no UTF-8": _file(b'{"\xff": 1}'),
    "no object": _file(b"[]"),
    "nested without end": _file(b'{"a":' * 200000),
    "nothing declared": _file({}),
    "no entry": _file({NORM: None}),
    "empty entry": _file({NORM: {}}),
    "no shape": _file({NORM: _entry(shape=...)}),
    "no offsets": _file({NORM: _entry(data_offsets=...)}),
    "three offsets": _file({NORM: _entry(data_offsets=[0, 32, 64])}),
    "offsets past the end": _file({NORM: _entry(shape=[32], data_offsets=[0, 128])}),
    "offsets of 2**64 - 1": _file({NORM: _entry(data_offsets=[2**64 - 65, 2**64 - 1])}),
    "negative offsets": _file({NORM: _entry(data_offsets=[-64, 0])}),
    "offsets turned round": _file({NORM: _entry(data_offsets=[64, 0])}),
    "hole in front": _file({NORM: _entry(data_offsets=[64, 128])}, 128),
    "bytes left over": _file({NORM: _entry()}, 128),
    "overlap": _file({NORM: _entry(), "x": _entry(data_offsets=[32, 96])}, 96),
    "same place twice": _file({NORM: _entry(), "x": _entry()}),
    "larger than its place": _file({NORM: _entry(shape=[17])}),
    "smaller than its place": _file({NORM: _entry(shape=[15])}),
    "dtype of another size": _file({NORM: _entry(dtype="F16")}),
    "unknown dtype": _file({NORM: _entry(dtype="Q4_K")}),
    "negative shape": _file({NORM: _entry(shape=[-16])}),
    "fractional shape": _file({NORM: _entry(shape=[16.5])}),
    "shape of text": _file({NORM: _entry(shape="16")}),
    "shape of 2**64": _file({NORM: _entry(shape=[2**64])}),
    "product past 2**64": _file({NORM: _entry(shape=[2**40, 2**40])}),
    "product that wraps to 16": _file({NORM: _entry(shape=[2**62 + 4, 4])}),
    "product that wraps in bytes": _file({NORM: _entry(shape=[2**62 + 16])}),
    "metadata of numbers": _file({"__metadata__": {"a": 1}, NORM: _entry()}),
    "lines in a name": _file({"a\nb\x1b[2J": _entry(data_offsets=[64, 0])}),
    "lines in a dtype": _file({NORM: _entry(dtype="F\n\r\x1b[2J")}),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_b64_headers_that_lie_are_refused(tmp_path: Path, lie: str, index: bool) -> None:
    """B64: a header that does not describe its file must never be believed."""
    path = tiny.write_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(LIES[lie])
    if index:
        _write_index(tmp_path, {NORM: path.name})
    _refused(tmp_path, f"{path} is damaged or incomplete ({len(LIES[lie]):,} bytes)")


@pytest.mark.parametrize(
    ("name", "entry", "data", "fact"),
    [
        (NORM, _entry(shape=[0, 2**62], data_offsets=[0, 0]), 0, f"{NORM} [0, {2**62}]"),
        (NORM, _entry(shape=[], data_offsets=[0, 4]), 4, f"{NORM} [] (expected [64])"),
        (NORM, _entry(dtype="F64", shape=[64], data_offsets=[0, 512]), 512, f"{NORM} F64"),
        (NORM, _entry(dtype="I64", shape=[64], data_offsets=[0, 512]), 512, f"{NORM} I64"),
        (NORM, _entry(dtype="U8", shape=[64]), 64, f"{NORM} U8"),
        (NORM, _entry(dtype="BOOL", shape=[64]), 64, f"{NORM} BOOL"),
        (NORM, _entry(dtype="F8_E4M3", shape=[64]), 64, f"{NORM} F8_E4M3"),
        ("a\nb", _entry(), 64, "unexpected tensors: "),
        ("\x1b[2Ja\r", _entry(), 64, "unexpected tensors: "),
        ("a\u2028\u202e", _entry(), 64, "unexpected tensors: "),
    ],
    ids=ascii,
)
def test_b64_sound_headers_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, entry: Entry, data: int, fact: str
) -> None:
    """B64: sizes, dtypes and names that a model cannot have, however well described."""
    _shards(tmp_path, index=False)
    for file in tmp_path.glob("model-*"):
        kept = {n: t for n, t in STATE.items() if n != name and file.name == _shard(1)}
        save_file(kept, file)
    (tmp_path / "model-extra.safetensors").write_bytes(_file({name: entry}, data))
    _refused(tmp_path, fact, readers=(load,))


KV = [(4, 1, None), (4, 2, None), (4, 4, None), (8, 1, None), (8, 4, None), (6, 3, 8), (4, 2, 32)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), KV)
def test_b65_grouping_equals_transformers(
    tmp_path: Path, heads: int, kv_heads: int, head_dim: int | None
) -> None:
    """B65: with few KV heads, shapes were taken from the hidden size and heads grouped by %."""
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    raw = tiny.config(**{key: value for key, value in changes.items() if value})
    state, ids = tiny.weights(raw), tiny.random_ids(20)
    assert state["model.layers.0.self_attn.k_proj.weight"].shape == (
        kv_heads * (head_dim or 64 // heads),
        64,
    )
    loaded = load(tiny.write_checkpoint(tmp_path, raw, state))
    expected = tiny.reference_logits(raw, state, ids)
    for chunk in (20, 1, 6):
        ours = tiny.our_logits(loaded, ids, chunk)
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (4, 2), (4, 4), (12, 3), (6, 2)])
def test_b65_query_head_h_reads_kv_head_h_over_groups(
    heads: int, kv_heads: int, tokens: int
) -> None:
    """B65: query head h reads KV head h // (H/KV), not h % KV."""
    values = torch.arange(kv_heads, dtype=torch.float32)[None, :, None, None]
    values = values.expand(1, kv_heads, 5, 8)  # KV head n holds n everywhere
    q = torch.randn(1, heads, tokens, 8, generator=torch.Generator().manual_seed(0))
    nothing = torch.tensor([0])
    step = CacheStep(Paged(nothing[None], nothing, None), native=False)
    out = attend(q, torch.ones(1, kv_heads, 5, 8), values, step)  # [B, T, Hq·Dh]
    read = out.view(tokens, heads, 8)[..., 0].round().int().tolist()
    assert read == [[h // (heads // kv_heads) for h in range(heads)]] * tokens


@pytest.mark.parametrize("given", [1, 2, 4])
@pytest.mark.parametrize("said", [1, 2, 4])
def test_b65_wrong_kv_shapes_are_named(tmp_path: Path, said: int, given: int) -> None:
    """B65: `[896, 3072] != [1280, 3072]` named no tensor; here both shapes and all names."""
    state = tiny.weights(tiny.config(num_key_value_heads=given))
    folder = tiny.write_checkpoint(tmp_path, tiny.config(num_key_value_heads=said), state)
    if said == given:
        _assert_holds(folder, state)
        return
    found = ", ".join(
        f"model.layers.{layer}.self_attn.{part}_proj.{kind} [{16 * given}{columns}] "
        f"(expected [{16 * said}{columns}])"
        for layer in (0, 1)
        for part in "kv"
        for kind, columns in (("bias", ""), ("weight", ", 64"))
    )
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(caught.value) == f"the weights do not fit config.json: wrong shapes: {found}"


def _read_config(**changes: Any) -> Starcoder2Config:
    return Starcoder2Config.read(tiny.config(**changes))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (4, 8), (4, 5), (8, 6), (2, 4)])
def test_b65_kv_heads_must_divide_heads(heads: int, kv_heads: int) -> None:
    """B65: KV heads that do not divide the heads were rounded into a wrong grouping."""
    fact = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
    with pytest.raises(CheckpointError, match=rf"^config\.json: {fact}$"):
        _read_config(num_attention_heads=heads, num_key_value_heads=kv_heads)


@pytest.mark.parametrize("key", ["num_key_value_heads", "num_attention_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -2, 2.0, "2", True, [2], 2**31])
def test_b65_head_counts_must_be_counts(key: str, value: Any) -> None:
    """B65: a count that is no count must be named with its value."""
    with pytest.raises(CheckpointError) as caught:
        _read_config(**{key: value})
    assert f"{key} is {value!r} (expected a whole number from 1" in str(caught.value)


def test_b65_sizes_that_do_not_divide_are_named() -> None:
    """B65: the size of a head is never rounded, and rotary needs an even one."""
    with pytest.raises(CheckpointError, match="hidden_size 64 is not a multiple of num_attention"):
        _read_config(num_attention_heads=6)
    with pytest.raises(CheckpointError, match="head_dim 7 is odd"):
        _read_config(head_dim=7)
    with pytest.raises(CheckpointError, match="num_key_value_heads is missing"):
        _read_config(num_key_value_heads=...)
