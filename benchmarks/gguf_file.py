"""A StarCoder2 checkpoint as a GGUF file that llama.cpp runs, and its quantizations.

    python benchmarks/gguf_file.py --model DIR --out FILE [--dtype F32] [--quantize Q4_K_M]

Tensors are converted one at a time, so memory stays small. Quantizing, and `--check`, need
`llama-cpp-python`; writing does not.

K-quants work on runs of 256 weights. A tensor whose rows 256 does not divide is stored by
llama.cpp in another type, larger than asked for (Q2_K and Q3_K become Q4_0, Q4_K Q5_0, Q5_K
Q5_1, Q6_K Q8_0), and in F16 where not even 32 divides them. All widths of the published models
and of the embedded one are multiples of 256.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import Checkpoint, open_checkpoint
from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.loading import load
from starquill.models.starcoder2 import GGUF, Starcoder2Config
from starquill.nn.cache import blocks_for

Q = gguf.GGMLQuantizationType
DTYPES = {
    "F32": (Q.F32, torch.float32, gguf.LlamaFileType.ALL_F32),
    "F16": (Q.F16, torch.float16, gguf.LlamaFileType.MOSTLY_F16),
    "BF16": (Q.BF16, torch.bfloat16, gguf.LlamaFileType.MOSTLY_BF16),
}
# Kept here, because llama.cpp goes on calling it.
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
_OURS = {ours: theirs for theirs, ours in GGUF.modules.items()}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.c_fc.weight` -> `blk.3.ffn_up.weight`."""
    module, _, part = name.rpartition(".")
    number = next((piece for piece in module.split(".") if piece.isdigit()), "")
    pattern = ".".join("{}" if piece.isdigit() else piece for piece in module.split("."))
    return f"{_OURS[pattern].format(number)}.{part}"


def write_gguf(model: str | Path, path: Path, dtype: str = "F32") -> Path:
    """Write `model` (a folder, or `default`) to `path`; vectors stay float32, as llama.cpp's."""
    checkpoint = open_checkpoint(locate(model, None))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    assert isinstance(config, Starcoder2Config), "only StarCoder2 is written"
    assert tokenizer is not None, f"{model} has no tokenizer.json"
    assert config.rope.type == "default", "rope scaling is not written"
    kind, _, file_type = DTYPES[dtype]
    writer = gguf.GGUFWriter(path, GGUF.architecture)
    _add_config(writer, config)
    _add_tokenizer(writer, tokenizer, config.vocab_size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, info in checkpoint.source.infos.items():
        assert not info.is_quantized, f"{name} is quantized already"
        own = kind if len(info.shape) > 1 else Q.F32
        itemsize = DTYPES[own.name][1].itemsize
        nbytes = int(np.prod(info.shape)) * itemsize
        numpy_type = np.dtype(np.uint16 if own is Q.BF16 else f"f{itemsize}")
        writer.add_tensor_info(gguf_name(name), info.shape, numpy_type, nbytes, own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for array in _arrays(checkpoint, kind.name):
        writer.write_tensor_data(array)
    writer.close()
    return path


def _arrays(checkpoint: Checkpoint, dtype: str) -> Iterator[NDArray[Any]]:
    for name, info in checkpoint.source.infos.items():
        tensor = checkpoint.source.read(name)
        assert isinstance(tensor, Tensor)
        own = DTYPES[dtype][1] if len(info.shape) > 1 else torch.float32
        tensor = tensor.to(own)
        yield (tensor.view(torch.uint16) if own is torch.bfloat16 else tensor).numpy()


def _add_config(writer: gguf.GGUFWriter, config: Starcoder2Config) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_eps(config.norm_epsilon)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocab_size: int) -> None:
    """The vocabulary; ids that the tokenizer lacks get llama.cpp's filler tokens."""
    model = tokenizer.definition["model"]
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [gguf.TokenType.UNUSED] * vocab_size
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, gguf.TokenType.NORMAL
    for index, token in tokenizer.added.items():
        special = index in tokenizer.special_ids
        kind = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        tokens[index], types[index] = token, kind
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("starcoder")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    end = tokenizer.eos_id
    assert end is not None, "the tokenizer names no end token"
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(end)
    writer.add_add_bos_token(False)


def silence() -> None:
    """Keep llama.cpp from printing every tensor that it reads or writes."""
    import llama_cpp

    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))


def quantize_gguf(source: Path, target: Path, kind: str, threads: int = 2) -> Path:
    """Quantize with llama.cpp to `kind`, a name of its tool (`Q4_0`, `Q4_K_M`, `Q2_K`...).

    `Q3_K`, `Q4_K` and `Q5_K` without a size letter, and any name with `-PURE` behind it, give
    that type to every matrix. Otherwise llama.cpp's recipe keeps more bits for some, above all
    for the tied embedding.
    """
    import llama_cpp

    silence()
    name = kind.removesuffix("-PURE")
    size = "_S" if name in ("Q3_K", "Q4_K", "Q5_K") else ""
    pure = bool(size) or kind != name
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}{size}")
    params.nthread, params.pure = threads, pure
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    if failed:
        raise RuntimeError(f"llama.cpp could not quantize {source} to {kind}")
    return target


def their_logits(path: Path, ids: list[int]) -> NDArray[np.float32]:
    """llama.cpp's logits `[T, V]` at every position, its cache in float32 as ours is."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path),
        n_ctx=max(len(ids), 256),
        logits_all=True,
        n_threads=2,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    model.eval(ids)
    return np.array(model.scores[: len(ids)])


def our_logits(loaded: LoadedModel, ids: list[int]) -> NDArray[np.float32]:
    runner = Runner(loaded, blocks_for(len(ids)))
    return torch.cat(list(runner.score(runner.cache.place(len(ids)), ids))).numpy()


def check(model: str | Path, path: Path, text: str) -> dict[str, float]:
    """How far llama.cpp's logits on `path` are from ours on `model`, for a short text."""
    loaded = load(model)
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer.encode(text)
    ours, theirs = our_logits(loaded, ids), their_logits(path, ids)
    return {
        "tokens": len(ids),
        "largest_logit": float(np.abs(ours).max()),
        "largest_difference": float(np.abs(ours - theirs).max()),
        "same_top": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=list(DTYPES), default="F32")
    parser.add_argument("--quantize", nargs="*", default=[], metavar="TYPE")
    parser.add_argument("--check", metavar="TEXT", help="compare llama.cpp's logits with ours")
    options = parser.parse_args()
    files = [write_gguf(options.model, options.out, options.dtype)]
    for kind in options.quantize:
        target = options.out.with_name(f"{options.out.stem}-{kind}.gguf")
        files.append(quantize_gguf(options.out, target, kind))
    rows = []
    for path in files:
        row: dict[str, Any] = {"file": path.name, "bytes": path.stat().st_size}
        if options.check is not None:
            row |= check(options.model, path, options.check)
        rows.append(row)
    print(json.dumps({"benchmark": "gguf_file", "files": rows}))


if __name__ == "__main__":
    main()
