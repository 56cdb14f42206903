"""A mixture of Qwen3-30B-A3B's layer shape with random weights, as each program reads it.

    python benchmarks/mixture_files.py --layers 4 --out DIR [--gguf FILE]

The vocabulary is cut as the layers are: of 48 layers 4 are kept, and so is a twelfth of the 151,936
tokens, so that embedding and head have the share of a token's work that they have in the whole
model. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from checkpoints import END, TOKENIZER, random_tensor
from gguf_file import DTYPES, Q
from torch import Tensor

from starquill.checkpoint.build import expected_tensors
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.checkpoint.save import ShardWriter
from starquill.checkpoint.stacked import piece_name
from starquill.models import architecture
from starquill.models.mixture import MixtureConfig
from starquill.models.qwen3_moe import GGUF

LAYERS, VOCABULARY = 48, 151936


def config(layers: int) -> dict[str, Any]:
    """`config.json` of Qwen3-30B-A3B, cut to `layers`."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "vocab_size": -(-VOCABULARY * layers // LAYERS // 256) * 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def write_mixture(folder: Path, layers: int, seed: int = 0) -> Path:
    """Write the checkpoint as it would be published, expert by expert."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = config(layers)
    spec = architecture(raw)
    shapes = expected_tensors(spec.Model(spec.read_config(raw)))
    rng = np.random.Generator(np.random.SFC64(seed))
    writer = ShardWriter(folder)
    for name, shape in shapes.items():
        if ".experts." not in name:
            writer.add(name, random_tensor(rng, name, shape))
            continue
        for expert in range(shape[0]):
            writer.add(piece_name(name, expert), random_tensor(rng, name, shape[1:]))
    writer.finish(raw)
    _write_tokenizer(folder, raw["vocab_size"])
    return folder


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """StarCoder2's first tokens: a BPE tokenizer learns them in the order of their numbers."""
    tokenizer = json.loads(lzma.decompress(TOKENIZER.read_bytes()))
    model = tokenizer["model"]
    kept = {token: index for token, index in model["vocab"].items() if index < vocab_size}
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    model["merges"] = [[a, b] for a, b in merges if {a, b, a + b} <= kept.keys()]
    model["vocab"] = kept
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 40960,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _gguf_name(name: str) -> str:
    """`model.layers.3.mlp.experts.up_proj.weight` -> `blk.3.ffn_up_exps.weight`."""
    module, _, part = name.rpartition(".")
    pieces = module.split(".")
    number = next((piece for piece in pieces if piece.isdigit()), "")
    pattern = ".".join("{}" if piece.isdigit() else piece for piece in pieces)
    theirs = {ours: name for name, ours in GGUF.modules.items()}[pattern]
    return f"{theirs.format(number)}.{part}"


def write_gguf(folder: Path, path: Path, dtype: str = "BF16") -> Path:
    """The checkpoint in `folder` as llama.cpp's `qwen3moe`, without a tokenizer: ids go in.

    Vectors and routers are float32, as llama.cpp's own converter writes them.
    """
    checkpoint = open_checkpoint(locate(folder, None))
    assert isinstance(checkpoint.config, MixtureConfig)
    writer = gguf.GGUFWriter(path, GGUF.architecture)
    _add_config(writer, checkpoint.config)
    writer.add_file_type(DTYPES[dtype][2])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    types = {
        name: "F32" if len(info.shape) == 1 or ".mlp.gate." in name else dtype
        for name, info in checkpoint.source.infos.items()
    }
    for name, info in checkpoint.source.infos.items():
        kind, torch_type, _ = DTYPES[types[name]]
        numpy_type = np.dtype(np.uint16 if kind is Q.BF16 else f"f{torch_type.itemsize}")
        nbytes = int(np.prod(info.shape)) * torch_type.itemsize
        writer.add_tensor_info(_gguf_name(name), info.shape, numpy_type, nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in checkpoint.source.infos:
        tensor = checkpoint.source.read(name)
        assert isinstance(tensor, Tensor)
        tensor = tensor.to(DTYPES[types[name]][1])
        whole = tensor.view(torch.uint16) if types[name] == "BF16" else tensor
        writer.write_tensor_data(whole.numpy())
    writer.close()
    return path


def _add_config(writer: gguf.GGUFWriter, config: MixtureConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.expert_size)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_head_count(config.heads.heads)
    writer.add_head_count_kv(config.heads.kv_heads)
    writer.add_key_length(config.heads.head_dim)
    writer.add_value_length(config.heads.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="write this file too")
    options = parser.parse_args()
    folder = write_mixture(options.out, options.layers, options.seed)
    written = [*folder.glob("*.safetensors")]
    if options.gguf is not None:
        written.append(write_gguf(folder, options.gguf))
    sizes = {path.name: path.stat().st_size for path in written}
    print(json.dumps({"benchmark": "mixture_files", "layers": options.layers, "bytes": sizes}))


if __name__ == "__main__":
    main()
