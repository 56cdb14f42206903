"""Checkpoints of the published models' shapes with random weights, for measuring without them.

    python benchmarks/checkpoints.py --size 3b --layers 6 --out DIR

Everything a program needs to load the folder is in it, StarCoder2's tokenizer included. The
same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starquill.checkpoint.build import expected_tensors
from starquill.checkpoint.save import ShardWriter
from starquill.models import architecture

TOKENIZER = Path(__file__).parents[1] / "tests" / "data" / "starcoder2-tokenizer.json.xz"
# hidden size, layers, heads, key/value heads, rope theta
SIZES = {
    "3b": (3072, 30, 24, 2, 999999.4420358813),
    "7b": (4608, 32, 36, 4, 1e6),
    "15b": (6144, 40, 48, 4, 1e5),
}
END = "<|endoftext|>"


def config(size: str, layers: int | None = None) -> dict[str, Any]:
    """`config.json` of a published model, cut to `layers`."""
    hidden, all_layers, heads, kv_heads, theta = SIZES[size]
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": all_layers if layers is None else layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 49152,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_type": "layer_norm",
        "mlp_type": "default",
        "norm_epsilon": 1e-5,
        "rope_theta": theta,
        "max_position_embeddings": 16384,
        "sliding_window": 4096,
        "use_bias": True,
        "use_cache": True,
        "tie_word_embeddings": size != "15b",
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


@cache
def _normals() -> NDArray[np.uint16]:
    """The normal distribution as 65,536 equally likely bf16 values, scaled by 0.02."""
    ranks = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    values = (0.02 * torch.special.ndtri(ranks)).bfloat16()
    return values.view(torch.uint16).numpy()


def random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Tensor:
    """Norm weights are ones; all else is normal. Drawn from a table, several times faster."""
    if "norm" in name and name.endswith("weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    table = _normals()
    ranks = rng.integers(0, 1 << 16, int(np.prod(shape)), dtype=np.uint16)
    return torch.from_numpy(table[ranks]).view(torch.bfloat16).reshape(shape)


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Zeros that take no room on disk: for memory's sake, not for quality's or speed's."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_checkpoint(
    folder: Path, size: str, layers: int | None = None, seed: int = 0, *, sparse: bool = False
) -> Path:
    """Write a whole checkpoint into `folder`, tensor by tensor: memory holds one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = config(size, layers)
    spec = architecture(raw)
    shapes = expected_tensors(spec.Model(spec.read_config(raw)))
    if raw["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    if sparse:
        write_sparse(folder / "model.safetensors", shapes)
        (folder / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    else:
        rng = np.random.Generator(np.random.SFC64(seed))
        writer = ShardWriter(folder)
        for name, shape in shapes.items():
            writer.add(name, random_tensor(rng, name, shape))
        writer.finish(raw)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(lzma.decompress(TOKENIZER.read_bytes()))
    tokenizer_config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": True,
        "model_max_length": 16384,
    }
    for name, value in (
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", {"bos_token_id": 0, "eos_token_id": 0}),
    ):
        (folder / name).write_text(json.dumps(value, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=list(SIZES), default="3b")
    parser.add_argument("--layers", type=int, help="default: as many as the published model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sparse", action="store_true", help="zeros that take no room on disk")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    started = time.perf_counter()
    folder = write_checkpoint(
        options.out, options.size, options.layers, options.seed, sparse=options.sparse
    )
    print(
        json.dumps(
            {
                "benchmark": "checkpoints",
                "size": options.size,
                "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
