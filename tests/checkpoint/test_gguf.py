"""GGUF against llama.cpp's fixtures and the `gguf` package: blocks, names, tokenizer, damage."""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from starquill import loading
from starquill.checkpoint.describe import describe
from starquill.checkpoint.gguf import BLOCK_TYPES, affine
from starquill.checkpoint.gguf_tokenizer import tokenizer_definition
from starquill.checkpoint.tokenizer import Tokenizer, load_tokenizer
from starquill.engine.loaded import LoadedModel
from starquill.errors import CheckpointError, StarquillError, UnsupportedError
from starquill.quant.affine import AffineWeight
from tests import tiny

load = functools.partial(loading.load, exact=True)  # to compare closely

DATA = tiny.SHARED / "data" / "starcoder2-tiny"
TOKENIZER = tiny.SHARED / "data" / "starcoder2-tokenizer"
shared = pytest.mark.skipif(not tiny.SHARED.exists(), reason=tiny.NO_SHARED)
Kind = gguf.GGMLQuantizationType
HEAD = "lm_head.weight"
# Scale and bias are float16 in the file itself; K-quants have products of float16 and integers.
LEGACY = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.IQ4_NL)
FIXTURES = ("f16", "iq4_nl", "q2_k", "q3_k_m", "q4_0", "q4_1", "q4_k_m", "q5_0", "q5_1", "q5_k_m")
FIXTURES = (*FIXTURES, "q6_k", "q8_0")
# Rows of 96 hold no K-quant block, rows of 256 one.
RAW = tiny.config(hidden_size=96, intermediate_size=256, sliding_window=None)
STATE = tiny.weights(RAW, head=True)
PLACES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor; a pure renaming, nothing is permuted."""
    module, _, part = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{PLACES[inner]}.{part}"
    return f"{PLACES[module]}.{part}"


def _fields(raw: dict[str, Any], definition: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes, by key."""
    tokens = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].get)
    special = {token["content"] for token in definition["added_tokens"]}
    sizes = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "rope.freq_base": "rope_theta",
        "attention.layer_norm_epsilon": "norm_epsilon",
    }
    return {
        **{f"starcoder2.{key}": raw[ours] for key, ours in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "starcoder",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in definition["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def _write(
    path: Path,
    state: Mapping[str, Tensor],
    kinds: Mapping[str, Any] | None = None,
    raw: dict[str, Any] = RAW,
    architecture: str = "starcoder2",
    **fields: Any,
) -> tuple[Path, dict[str, Tensor]]:
    """A file of `state` in the types `kinds` (F32 else), and the values that it stands for.

    `fields` override; dots are written `__`, and `...` leaves a key out.
    """
    writer = gguf.GGUFWriter(path, architecture)
    told = _fields(raw, tiny.byte_tokenizer(vocab_size=raw["vocab_size"]))
    told |= {key.replace("__", "."): value for key, value in fields.items()}
    for key, value in told.items():
        if value is not ...:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    meant = {}
    for name, tensor in state.items():
        kind = (kinds or {}).get(name, Kind.F32)
        values = tensor.float().numpy()
        data = values if kind == Kind.F32 else gguf.quants.quantize(values, kind)
        dense = kind in (Kind.F32, Kind.F16)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=None if dense else kind)
        meant[name] = torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, meant


def _tied() -> dict[str, Tensor]:
    return {name: tensor for name, tensor in STATE.items() if name != HEAD}


def _weight(loaded: LoadedModel, name: str) -> Any:
    return loaded.model.get_submodule(name.removesuffix(".weight")).weight


def _held(loaded: LoadedModel, name: str) -> Tensor:
    found: Tensor = (
        loaded.model.get_parameter(name).data
        if STATE[name].ndim == 1
        else (_weight(loaded, name).dequantize())
    )
    return found


def _assert_values(weight: AffineWeight, data: Any, kind: Any, rows: int) -> None:
    """Equal to the package's dequantization, to the rounding of the scale's dtype.

    Stored scales are kept as they are; products are float16 (2^-11 of each) or float32.
    """
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind)).reshape(rows, -1).double()
    found = weight.dequantize().double()
    reach = weight.integers().double().unflatten(-1, (-1, weight.group))
    size = (reach * weight.scales.double().abs()[..., None]).flatten(-2)
    size += weight.biases.double().abs().repeat_interleave(weight.group, -1)
    loses = weight.scales.dtype == torch.float16 and kind not in LEGACY
    assert bool(((found - expected).abs() <= size * (2.0**-10.9 if loses else 2.0**-22)).all())


# --- fixtures made by llama.cpp ---


@functools.cache
def _fixture(name: str) -> LoadedModel:
    return load(DATA / "gguf" / f"{name}.gguf")


@shared
def test_every_fixture_is_tested() -> None:
    assert {path.stem for path in (DATA / "gguf").glob("*.gguf")} == set(FIXTURES)
    assert {k for n in FIXTURES for k in _fixture_kinds(n)} >= set(BLOCK_TYPES)


def _fixture_kinds(name: str) -> set[Any]:
    return {t.tensor_type for t in gguf.GGUFReader(DATA / "gguf" / f"{name}.gguf").tensors}


@shared
@pytest.mark.parametrize("name", FIXTURES)
def test_a_fixtures_weights_are_what_gguf_says(name: str) -> None:
    loaded = _fixture(name)
    names = {_gguf_name(n): n for n in STATE}
    tensors = gguf.GGUFReader(DATA / "gguf" / f"{name}.gguf").tensors
    assert len(tensors) == 35
    for tensor in tensors:
        ours = names[tensor.name]
        if tensor.tensor_type in BLOCK_TYPES:
            rows = int(tensor.shape[1])
            _assert_values(_weight(loaded, ours), tensor.data, tensor.tensor_type, rows)
            continue
        expected = torch.from_numpy(np.array(tensor.data)).float()
        assert torch.equal(_held(loaded, ours), expected.reshape(_held(loaded, ours).shape))


@shared
@pytest.mark.parametrize("name", FIXTURES)
def test_logits_follow_a_fixtures(name: str) -> None:
    """llama.cpp ignores the window, as the file does; its activations are 8-bit integers."""
    ids = np.load(DATA / "ids.npy").tolist()
    theirs = torch.from_numpy(np.load(DATA / "gguf" / f"{name}.logits.npy"))
    loaded = _fixture(name)
    ours = tiny.our_logits(loaded, ids)
    error = float((ours - theirs).square().mean().sqrt()) / float(theirs.std())
    assert error < (0.002 if name == "f16" else 0.03)
    reference = torch.from_numpy(np.load(DATA / "logits-hf-f32-nowindow.npy"))
    if name == "f16":
        torch.testing.assert_close(ours, reference, rtol=0, atol=0.006)
    assert any("sliding window" in warning for warning in loaded.warnings)


@shared
def test_a_fixtures_tokenizer_is_the_folders() -> None:
    folder = load_tokenizer(DATA / "hf")
    inside = _fixture("q4_0").require_tokenizer()
    assert folder is not None
    for text in (
        "def f(x):\n    return 2024\n",
        "x=12345\n\t        y\n\n\n",
        "１２ a\u00a0b 👩‍👧",
        "",
    ):
        assert inside.encode(text) == folder.encode(text)
        assert inside.decode(inside.encode(text)) == text
    assert inside.eos_id == folder.eos_id == 0
    assert inside.special_ids == folder.special_ids
    assert inside.fim == folder.fim


def _published() -> tuple[Tokenizer, Tokenizer]:
    """StarCoder2's vocabulary from the GGUF file, and from tokenizer.json."""
    reader = gguf.GGUFReader(TOKENIZER / "ggml-vocab-starcoder.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    definition, config, warnings = tokenizer_definition(fields)
    assert warnings == []
    folder = load_tokenizer(TOKENIZER)
    assert folder is not None
    return Tokenizer(definition, config), folder


@shared
def test_the_published_vectors() -> None:
    """B19: digits, runs of white space and scripts, as llama.cpp publishes them."""
    ours, folder = _published()
    base = TOKENIZER / "ggml-vocab-starcoder.gguf"
    texts = base.with_name(base.name + ".inp").read_bytes().decode()
    lines = base.with_name(base.name + ".out").read_text().split("\n")
    vectors = texts.split("\n__ggml_vocab_test__\n")
    assert len(vectors) == 47
    for text, line in zip(vectors, lines, strict=False):
        expected = [int(i) for i in line.split()]
        assert ours.encode(text) == folder.encode(text) == expected, ascii(text)
        assert ours.decode(expected) == text
    for text in (
        "x=12345\n\t        y\n\n\n",
        "１２",
        "a\u00a0b",
        "👩\u200d👧 2024",
        "<fim_middle>",
    ):
        assert ours.encode(text) == folder.encode(text)
        assert ours.encode(text, parse_special=True) == folder.encode(text, parse_special=True)
    assert ours.special_ids == folder.special_ids
    assert ours.fim == folder.fim


# --- blocks of random bits ---


@pytest.mark.parametrize("kind", list(BLOCK_TYPES), ids=lambda k: k.name)
@pytest.mark.parametrize("seed", range(3))
def test_any_bits_of_a_block_are_read_exactly(kind: Any, seed: int) -> None:
    """Every bit pattern of the packed parts, which trained weights do not reach."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (6, 2 * size), dtype=np.uint8)
    blocks = data.reshape(-1, size)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
    places = (0, 2) if kind in (Kind.Q4_K, Kind.Q5_K) else halves.get(kind.name, (0,))
    for place in places:
        scales = generator.normal(0, 0.05, len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    weight = affine(kind, data.copy())
    assert weight.shape == (6, 2 * values)
    _assert_values(weight, data, kind, 6)


# --- B06, B28, B29: whole files ---


@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
def test_b06_a_renamed_file_is_the_same_model(tmp_path: Path, head: bool) -> None:
    """B06: interleaved rotation, or a permutation of q and k that other models need."""
    state = STATE if head else _tied()
    raw = {**RAW, "tie_word_embeddings": not head}
    path, _ = _write(tmp_path / "m.gguf", state)
    loaded, folder = load(path), load(tiny.write_checkpoint(tmp_path / "f", raw, state))
    for name, tensor in state.items():
        assert torch.equal(_held(loaded, name), tensor), name
    ids = tiny.random_ids(40)
    ours = tiny.our_logits(loaded, ids)
    torch.testing.assert_close(ours, tiny.our_logits(folder, ids), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        ours, tiny.reference_logits(raw, dict(state), ids), rtol=0, atol=2e-4
    )
    assert loaded.end_ids == folder.end_ids == {0}


@pytest.mark.parametrize("embedding", [Kind.F16, Kind.Q8_0])
@pytest.mark.parametrize("head", [None, Kind.F32, Kind.Q8_0, Kind.Q5_1])
def test_b28_the_head_is_the_embedding_or_its_own(
    tmp_path: Path, embedding: Any, head: Any
) -> None:
    """B28: no output.weight, or one of another type than the embedding."""
    state = STATE if head is not None else _tied()
    kinds = {"model.embed_tokens.weight": embedding, HEAD: head}
    path, meant = _write(tmp_path / "m.gguf", state, kinds)
    loaded = load(path)
    assert not any("lm_head" in warning for warning in loaded.warnings)
    tied = _weight(loaded, HEAD) is _weight(loaded, "model.embed_tokens.weight")
    assert tied == (head is None)
    expected = meant.get(HEAD, meant["model.embed_tokens.weight"])
    torch.testing.assert_close(_weight(loaded, HEAD).dequantize(), expected, rtol=2**-20, atol=1e-6)
    assert ("head" in describe(path).bytes) == (head is not None)
    ids = tiny.random_ids(12)
    raw = {**RAW, "tie_word_embeddings": head is None}
    reference = tiny.reference_logits(raw, meant, ids)
    torch.testing.assert_close(tiny.our_logits(loaded, ids), reference, rtol=0, atol=1e-3)


def test_b29_every_tensor_has_its_own_type(tmp_path: Path) -> None:
    """B29: one type for the file, though Q4_K_M and friends mix many."""
    cycle = [Kind.Q5_0, Kind.Q8_0, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.F32]
    matrices = [name for name, tensor in _tied().items() if tensor.ndim == 2]
    kinds = {name: cycle[i % len(cycle)] for i, name in enumerate(matrices)}
    path, meant = _write(tmp_path / "m.gguf", _tied(), kinds)
    loaded = load(path)
    for name, tensor in meant.items():
        torch.testing.assert_close(_held(loaded, name), tensor, rtol=2**-20, atol=1e-6)
    reference = tiny.reference_logits({**RAW, "tie_word_embeddings": True}, meant, [1, 2, 3, 4])
    ours = tiny.our_logits(loaded, [1, 2, 3, 4])
    torch.testing.assert_close(ours, reference, rtol=0, atol=1e-3)
    assert "q8-g32" in str(describe(path).quantization)


# --- what is refused, and how ---


def _patched(path: Path, name: str, number: int) -> Path:
    """The file with the type of tensor `name` changed in its header."""
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    dimensions = struct.unpack_from("<I", data, at)[0]
    struct.pack_into("<I", data, at + 4 + 8 * dimensions, number)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ3_S", "IQ1_S", "TQ1_0", "MXFP4", "IQ4_XS", "I8"])
def test_b29_an_unsupported_type_is_named_before_any_reading(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = _write(tmp_path / "m.gguf", _tied())
    _patched(path, "blk.1.ffn_down.weight", Kind[kind].value)
    monkeypatch.setattr("starquill.checkpoint.gguf.GgufSource.read", None)
    for read in (load, describe):
        with pytest.raises(UnsupportedError) as caught:
            read(path)
        message = str(caught.value)
        assert f"blk.1.ffn_down.weight {kind}" in message
        for known in ("F32", "F16", "BF16", *(k.name for k in BLOCK_TYPES)):
            assert known in message


@pytest.mark.parametrize("number", [4, 31, 999, 2**32 - 1])
def test_a_type_that_nobody_knows(tmp_path: Path, number: int) -> None:
    path, _ = _write(tmp_path / "m.gguf", _tied())
    with pytest.raises(StarquillError, match=str(number)):
        load(_patched(path, "blk.1.ffn_down.weight", number))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path, _ = _write(tmp_path_factory.mktemp("whole") / "m.gguf", _tied())
    return path.read_bytes()


@pytest.mark.parametrize(
    "size", [0, 1, 4, 8, 12, 23, 24, 30, 100, 555, 999, 1000, 5000, 9001, 10**5]
)
def test_b29_a_truncated_file(tmp_path: Path, whole: bytes, size: int) -> None:
    """B29: cut in the magic, the fields, a string, the tensor list or the data."""
    (tmp_path / "m.gguf").write_bytes(whole[:size])
    for read in (load, describe):
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path / "m.gguf")
        assert "m.gguf" in str(caught.value)
        assert f"{size:,}" in str(caught.value)


@pytest.mark.parametrize("missing", [1, 100, 4096, 100_000])
def test_b29_a_file_without_its_end(tmp_path: Path, whole: bytes, missing: int) -> None:
    """Both sizes are told: what is there, and what the header promises."""
    size = len(whole) - missing
    (tmp_path / "m.gguf").write_bytes(whole[:size])
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "m.gguf")
    assert f"{size:,}" in str(caught.value)
    assert f"{len(whole):,}" in str(caught.value)


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_header_is_no_fault_of_ours(tmp_path: Path, whole: bytes, seed: int) -> None:
    """One byte of fields or tensor list changed: loads, or one line that says what is wrong."""
    generator = np.random.default_rng(seed)
    data = bytearray(whole)
    start = whole.index(b"token_embd.weight") if seed % 2 else 0
    end = whole.index(b"token_embd.weight") + 1500 if seed % 2 else 1000
    data[int(generator.integers(start, end))] ^= int(generator.integers(1, 256))
    (tmp_path / "m.gguf").write_bytes(data)
    with contextlib.suppress(StarquillError):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["llama", "starcoder", "qwen2moe"])
def test_another_architecture_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path, _ = _write(tmp_path / "m.gguf", _tied(), architecture=name)
    with pytest.raises(UnsupportedError) as caught:
        load(path)
    assert repr(name) in str(caught.value)
    assert "starcoder2" in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [f"starcoder2.{key}" for key in ("block_count", "embedding_length", "feed_forward_length")]
    + ["starcoder2.attention.head_count", "starcoder2.attention.head_count_kv"]
    + ["starcoder2.context_length", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"]
    + ["tokenizer.ggml.model"],
)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path, _ = _write(tmp_path / "m.gguf", _tied(), **{key.replace(".", "__"): ...})
    with pytest.raises(StarquillError) as caught:
        load(path)
    wanted = key.split(".", 1)[1] if key.startswith("starcoder2") else key.split(".")[-1]
    assert (wanted if wanted != "model" else "tokenizer") in str(caught.value)


def test_a_missing_theta_is_told_or_refused(tmp_path: Path) -> None:
    """B07: never a silent default, for the three published models have three values."""
    path, _ = _write(tmp_path / "m.gguf", _tied(), starcoder2__rope__freq_base=...)
    with contextlib.suppress(CheckpointError):
        assert any("rope" in warning for warning in load(path).warnings)


@pytest.mark.parametrize("rule", [..., "refact", "starcoder", "default", "llama-bpe"])
def test_b19_the_name_of_the_splitting_rule(tmp_path: Path, rule: Any) -> None:
    """B19: files of early 2024 have no `pre`; digits are split one by one all the same."""
    path, _ = _write(tmp_path / "m.gguf", _tied(), tokenizer__ggml__pre=rule)
    loaded = load(path)
    told = any("split" in warning for warning in loaded.warnings)
    assert told == (rule not in ("refact", "starcoder"))
    tokenizer = loaded.require_tokenizer()
    plain = Tokenizer(tiny.byte_tokenizer())
    for text in ("x=12345\n\t        y\n\n\n", "１２", "a\u00a0b", "👩\u200d👧", "    def x", ""):
        assert tokenizer.encode(text) == plain.encode(text)
    assert len(tokenizer.encode("2024")) == 4
    assert tokenizer.special_ids == plain.special_ids


WRONG: dict[str, tuple[Any, ...]] = {
    "tokenizer.ggml.merges": (["a zzz"], ["a"], ["a b c"], 7),
    "tokenizer.ggml.tokens": ("text",),
    "tokenizer.ggml.token_type": ([3] * 400,),
    "tokenizer.ggml.eos_token_id": (400, "x"),
    "tokenizer.chat_template": (7,),
    "starcoder2.block_count": ("x", 0),
    "starcoder2.rope.freq_base": ("x",),
}


@pytest.mark.parametrize("key", WRONG)
def test_fields_of_the_wrong_kind_are_no_fault_of_ours(tmp_path: Path, key: str) -> None:
    for value in WRONG[key]:
        path, _ = _write(tmp_path / "m.gguf", _tied(), **{key.replace(".", "__"): value})
        with contextlib.suppress(StarquillError):
            load(path)


@pytest.mark.parametrize("width", [3072, 4608, 6144, 2048])
def test_the_window_is_the_published_models(width: int) -> None:
    """GGUF has no key for it; a width that nobody published has none, and both are told."""
    from starquill.models.starcoder2 import GGUF

    fields = _fields({**RAW, "hidden_size": width}, tiny.byte_tokenizer())
    made = GGUF.config(fields, {"token_embd.weight": (49152, width)})
    assert made.raw.get("sliding_window") == (None if width == 2048 else 4096)
    assert any("sliding window" in warning for warning in made.warnings)


@pytest.mark.parametrize("absent", ["model.layers.0.self_attn.q_proj.weight", "model.norm.bias"])
def test_a_tensor_that_is_not_there_is_named(tmp_path: Path, absent: str) -> None:
    state = {name: tensor for name, tensor in _tied().items() if name != absent}
    path, _ = _write(tmp_path / "m.gguf", state)
    with pytest.raises(CheckpointError, match=absent):
        load(path)
