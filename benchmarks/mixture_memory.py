"""Qwen3-30B-A3B's shape with its experts in 2 bits: peak memory, and bytes beside the arithmetic.

    python benchmarks/mixture_memory.py [--scheme 2] [--layers 48] [--how write load] [--limit 16]

The source is 61 GB of bf16 in sparse shards, laid out as it is published: each expert's matrices
begin with random values and are zeros from there on, so that they take little room on disk. `write`
is `starquill quantize`, `load` quantizes in memory, each in a process of its own. The peak is the
operating system's largest resident size of that process, which counts pages of mapped files;
`anonymous` is the largest size of its own memory, looked at ten times a second. `bound` is what the
peak should stay below: the result (on disk: the shard that is collected), a layer's experts as they
are stored, and 400 MB for the interpreter and its libraries. Times are those of zeros. Ends in one
line of JSON; exit code 1 if a peak is over its bound or the limit, or a size is off by over 2 %.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

# This process imports no torch: a child's peak counts what its parent had when it was started.
SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 32768, "tie_word_embeddings": False, "attention_bias": False,
    "sliding_window": None, "use_sliding_window": False, "bos_token_id": 151643,
    "eos_token_id": 151643,
}  # fmt: skip
SCHEMES = ("2", "2-rtn", "3", "3-rtn")
GROUP = {"2": 32, "3": 64}  # by bits
OVERHEAD = 400_000_000
SHARD = 1 << 30
RANDOM = 2048  # values at the beginning of a tensor
CLOSE = 0.02
LOADING = """
import json, sys
from starquill.loading import load
from starquill.quantizing import QuantOptions
loaded = load(sys.argv[1], quant=QuantOptions(sys.argv[2], organization="moqe"))
weights = {id(m.weight): m.weight.nbytes for m in loaded.model.modules()
           if hasattr(getattr(m, "weight", None), "scheme")}
held = sum(weights.values()) + sum(4 * p.numel() for p in loaded.model.parameters())
print(json.dumps({"resident": held}))
"""


def shapes(layers: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Every tensor's shape under its published name, by the file that it is in."""
    width, head = SHAPE["hidden_size"], SHAPE["head_dim"]
    queries = SHAPE["num_attention_heads"] * head
    values = SHAPE["num_key_value_heads"] * head
    inner = SHAPE["moe_intermediate_size"]
    files = {"outer": {
        "model.embed_tokens.weight": (SHAPE["vocab_size"], width),
        "model.norm.weight": (width,),
        "lm_head.weight": (SHAPE["vocab_size"], width),
    }}  # fmt: skip
    for number in range(layers):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, width),
            "self_attn.k_proj.weight": (values, width),
            "self_attn.v_proj.weight": (values, width),
            "self_attn.o_proj.weight": (width, queries),
            "self_attn.q_norm.weight": (head,),
            "self_attn.k_norm.weight": (head,),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
            "mlp.gate.weight": (SHAPE["num_experts"], width),
        }
        for expert in range(SHAPE["num_experts"]):
            own = f"mlp.experts.{expert}"
            layer[f"{own}.gate_proj.weight"] = layer[f"{own}.up_proj.weight"] = (inner, width)
            layer[f"{own}.down_proj.weight"] = (width, inner)
        named = {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        files[f"layer{number:02}"] = named
    return files


def write_source(folder: Path, layers: int) -> None:
    """The checkpoint: real headers and sizes, holes where no values were written."""
    folder.mkdir()
    random = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for name, tensors in shapes(layers).items():
        header: dict[str, Any] = {}
        end = 0
        for tensor, shape in tensors.items():
            start, end = end, end + 2 * math.prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        path = folder / f"model-{name}.safetensors"
        weight_map |= dict.fromkeys(tensors, path.name)
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
            for tensor, shape in tensors.items():
                count = min(RANDOM, math.prod(shape))
                values = 0.02 * random.standard_normal(count, dtype=np.float32)
                file.seek(8 + len(text) + header[tensor]["data_offsets"][0])
                file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))


def arithmetic(layers: int, bits: str) -> dict[str, int]:
    """Bytes by counting weights: of the source, of the result on disk and in memory."""
    flat = {n: s for tensors in shapes(layers).values() for n, s in tensors.items()}
    expert = sum(math.prod(s) for n, s in flat.items() if ".experts." in n)
    other = sum(math.prod(s) for n, s in flat.items() if ".experts." not in n)
    vectors = sum(math.prod(s) for s in flat.values() if len(s) == 1)
    # A scale and a bias of 16 bits for each group.
    quantized = expert * (int(bits) + 32 / GROUP[bits]) / 8
    return {
        "source": 2 * (expert + other),
        "layer_of_experts": 2 * expert // layers,
        "file": round(quantized + 2 * other),
        "resident": round(quantized + 2 * other + 2 * vectors),  # norms are float32 in memory
    }


def own_memory(pid: int) -> int:
    """Bytes of a process that are no file's."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


def run(command: list[str]) -> dict[str, Any]:
    """What a command printed, its seconds and its peaks."""
    started, anonymous = time.perf_counter(), 0
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    while True:
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
        if done:
            break
        anonymous = max(anonymous, own_memory(process.pid))
        time.sleep(0.1)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.stdout is not None
    printed = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ended with {process.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024
    seconds = round(time.perf_counter() - started, 1)
    peaks = {"peak": usage.ru_maxrss * unit, "anonymous": anonymous}
    return {"printed": printed, "seconds": seconds, **peaks}


def inspected(folder: Path) -> dict[str, Any]:
    printed = run([sys.executable, "-m", "starquill", "inspect", str(folder), "--json"])["printed"]
    facts: dict[str, Any] = json.loads(printed)
    sizes = {"file": sum(facts["bytes"].values()), "resident": sum(facts["resident"].values())}
    return {**sizes, "bits_of_experts": facts["bits"]["experts"]}


def written(source: Path, out: Path, scheme: str, expected: dict[str, int]) -> dict[str, Any]:
    command = [sys.executable, "-m", "starquill", "quantize", str(source), "--out", str(out)]
    result = run([*command, "--quant", scheme, "--organization", "moqe"])
    del result["printed"]
    on_disk = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    bound = SHARD + expected["layer_of_experts"] + OVERHEAD
    return {**result, "bound": bound, "file": on_disk, "inspect": inspected(out)}


def loaded(source: Path, scheme: str, expected: dict[str, int]) -> dict[str, Any]:
    result = run([sys.executable, "-c", LOADING, str(source), scheme])
    resident = json.loads(result.pop("printed"))["resident"]
    bound = expected["resident"] + expected["layer_of_experts"] + OVERHEAD
    return {**result, "bound": bound, "resident": resident}


def faults(found: dict[str, Any], expected: dict[str, int], limit: float) -> list[str]:
    told = []
    for way, result in found.items():
        least = min(result["bound"], limit)
        if result["peak"] > least:
            told.append(f"{way}: peak {result['peak']:,} (expected {least:,.0f} at most)")
        sizes = {**result, **{f"inspect {n}": v for n, v in result.get("inspect", {}).items()}}
        for name, value in sizes.items():
            wanted = expected.get(name.removeprefix("inspect "))
            if wanted is not None and abs(value - wanted) > CLOSE * wanted:
                told.append(f"{way}: {name} {value:,} (expected {wanted:,})")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scheme", default="2", choices=SCHEMES, help="rtn is the quickest")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--how", nargs="+", default=["write", "load"], choices=("write", "load"))
    parser.add_argument("--limit", type=float, default=16.0, help="GB (10^9 bytes) for each peak")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    options = parser.parse_args()
    expected = arithmetic(options.layers, options.scheme[0])
    work = Path(tempfile.mkdtemp(prefix="mixture-", dir=options.folder))
    found: dict[str, Any] = {}
    try:
        write_source(work / "source", options.layers)
        if "write" in options.how:
            found["write"] = written(work / "source", work / "out", options.scheme, expected)
            print(json.dumps(found["write"]), flush=True)
            shutil.rmtree(work / "out")
        if "load" in options.how:
            found["load"] = loaded(work / "source", options.scheme, expected)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    told = faults(found, expected, options.limit * 1e9)
    settings = {"scheme": options.scheme, "layers": options.layers, "limit": options.limit * 1e9}
    line = {"benchmark": "mixture_memory", **settings, "arithmetic": expected, **found}
    print(json.dumps({**line, "faults": told}))
    raise SystemExit(bool(told))


if __name__ == "__main__":
    main()
