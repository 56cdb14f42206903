"""GGUF files of Qwen3's mixture: stacked experts, in float and in blocks; Qwen's tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from starquill.checkpoint.describe import describe
from starquill.checkpoint.gguf_tokenizer import tokenizer_definition
from starquill.checkpoint.tokenizer import Tokenizer
from starquill.errors import CheckpointError
from starquill.loading import load
from starquill.nn.experts import ExpertLinear
from tests import moe, tiny

Kind = gguf.GGMLQuantizationType
RAW = moe.config("qwen3_moe", mlp_only_layers=[1], rms_norm_eps=1e-6)
PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    """The folder's, by llama.cpp's names, experts stacked."""
    found: dict[str, Any] = {}
    stacks: dict[str, dict[int, Any]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module in OUTER:
            found[f"{OUTER[module]}.weight"] = tensor
            continue
        layer, inner = re.findall(r"model\.layers\.(\d+)\.(.*)", module)[0]
        if expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)_proj", inner):
            stack = stacks.setdefault(f"blk.{layer}.ffn_{expert[2]}_exps.weight", {})
            stack[int(expert[1])] = tensor
        else:
            found[f"blk.{layer}.{PLACES[inner]}.weight"] = tensor
    found |= {n: torch.stack([parts[e] for e in range(6)]) for n, parts in stacks.items()}
    return {name: tensor.numpy() for name, tensor in found.items()}


def _write(folder: Path, kind: Any, **fields: Any) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    definition = tiny.byte_tokenizer()
    tokens = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].get)
    told = {f"qwen3moe.{key}": RAW[ours] for key, ours in FIELDS.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i < 8 else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in definition["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }
    for key, value in (told | {k.replace("__", "."): v for k, v in fields.items()}).items():
        if value is not ...:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, values in _tensors(folder).items():
        if "_exps" in name and kind != Kind.F32:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0], ids=lambda k: k.name)
def test_a_renamed_file_is_the_same_model(tmp_path: Path, kind: Any) -> None:
    model, ids = moe.reference(RAW), tiny.random_ids(20)
    folder = moe.write(tmp_path, RAW, model)
    path = _write(folder, kind)
    loaded, tensors = load(path, exact=True), _tensors(folder)
    assert describe(path).warnings == ()
    stacks = {n: m for n, m in loaded.model.named_modules() if isinstance(m, ExpertLinear)}
    assert len(stacks) == 3
    for name, module in stacks.items():
        part = name.rpartition(".")[2].removesuffix("_proj")
        values = tensors[f"blk.0.ffn_{part}_exps.weight"]
        if kind != Kind.F32:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        meant = torch.from_numpy(np.array(values))
        torch.testing.assert_close(module.weight.dequantize(), meant, rtol=2**-20, atol=1e-6)
        with torch.no_grad():
            for path_, parameter in model.named_parameters():
                if path_.endswith("layers.0.mlp.experts.gate_up_proj") and part != "down":
                    parameter[:, :32] = meant if part == "gate" else parameter[:, :32]
                    parameter[:, 32:] = meant if part == "up" else parameter[:, 32:]
                elif path_.endswith("layers.0.mlp.experts.down_proj") and part == "down":
                    parameter.copy_(meant)
    ours = tiny.our_logits(loaded, ids)
    torch.testing.assert_close(ours, moe.logits(model, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("key", ["expert_count", "expert_feed_forward_length", "block_count"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    folder = moe.write(tmp_path, RAW, moe.reference(RAW))
    with pytest.raises(CheckpointError, match=f"fields lack qwen3moe.{key}"):
        load(_write(folder, Kind.F32, **{f"qwen3moe.{key}": ...}))


def test_yarn_is_read(tmp_path: Path) -> None:
    folder = moe.write(tmp_path, RAW, moe.reference(RAW))
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
    path = _write(folder, Kind.F32, **{f"qwen3moe.rope.scaling.{k}": v for k, v in scaling.items()})
    rope = load(path).config.rope
    assert (rope.type, rope.factor, rope.original_context) == ("yarn", 4.0, 16)


def test_qwens_splitting_rule() -> None:
    """White space goes to the word behind it, digits come one by one, NFC comes first."""
    import tokenizers

    vocab = tiny.byte_tokenizer()["model"]["vocab"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": list(vocab),
        "tokenizer.ggml.merges": [],
    }
    definition, config, warnings = tokenizer_definition(fields)
    assert warnings == []
    assert (
        Tokenizer(definition, config).decode(Tokenizer(definition, config).encode("e\u0301"))
        == "\u00e9"
    )
    split = tokenizers.Tokenizer.from_str(json.dumps(definition)).pre_tokenizer
    text = "def f1(x):\n\n    return x's 42 \t\n"
    words = [text[start:end] for _, (start, end) in split.pre_tokenize_str(text)]
    assert words == [
        "def", " f", "1", "(x", "):\n\n", "   ", " return", " x", "'s", " ", "4", "2", " \t\n",
    ]  # fmt: skip
