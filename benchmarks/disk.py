"""A model larger than the memory it may take: rate of its weights against the disk's own.

Writes a folder of a 15B's shape (or of fewer layers of it) in 4 bits, random and really on disk,
then generates within a budget from a cold page cache. The disk's own rate is that of large
direct reads of the same file, in turns with the tokens.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import starquill
import starquill.settling
from starquill.checkpoint.build import expected_tensors
from starquill.engine.engine import Engine
from starquill.models import architecture
from starquill.types import EngineOptions, SamplingParams

SHAPE = {
    "model_type": "starcoder2", "hidden_size": 6144, "num_attention_heads": 48,
    "num_key_value_heads": 4, "intermediate_size": 24576, "vocab_size": 49152,
    "use_bias": True, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5,
    "rope_theta": 1e5, "sliding_window": 4096, "max_position_embeddings": 16384,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
BITS, GROUP = 4, 64
ROUNDS = 3
CHUNK, READERS = 8 << 20, 2


def entries(raw: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
    """Name, type and shape of every tensor in the file, quantized ones as their three parts."""
    spec = architecture(raw)
    found: list[tuple[str, str, list[int]]] = []
    for name, shape in expected_tensors(spec.Model(spec.read_config(raw))).items():
        if len(shape) < 2:
            found.append((name, "F32", list(shape)))
            continue
        module, (rows, width) = name.removesuffix(".weight"), shape
        found.append((f"{module}.weight", "U32", [rows, width * BITS // 32]))
        found += [
            (f"{module}.{part}", "F16", [rows, width // GROUP]) for part in ("scales", "biases")
        ]
    return found


def contents(name: str, dtype: str, shape: list[int], random: np.random.Generator) -> bytes:
    count = int(np.prod(shape))
    if dtype == "U32":
        return random.bytes(4 * count)
    if dtype == "F32":
        return np.full(
            count, 1 if "norm" in name and name.endswith("weight") else 0, "<f4"
        ).tobytes()
    # q is 0 to 15: centred weights of a size that keeps activations in bounds.
    return np.full(count, 0.002 if name.endswith("scales") else -0.015, "<f2").tobytes()


def write(folder: Path, layers: int) -> int:
    """The bytes of the weight file. One layer's random integers serve for all of them."""
    raw = {**SHAPE, "num_hidden_layers": layers}
    raw["quantization"] = {"bits": BITS, "group_size": GROUP, "mode": "affine"}
    header, end = {}, 0
    listed = entries(raw)
    sizes = {"U32": 4, "F16": 2, "F32": 4}
    for name, dtype, shape in listed:
        start, end = end, end + int(np.prod(shape)) * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    random, kept = np.random.default_rng(0), {}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, dtype, shape in listed:
            kind = (dtype, name.rsplit(".", 1)[-1], "norm" in name, tuple(shape))
            if kind not in kept:
                kept[kind] = contents(name, dtype, shape, random)
            file.write(kept[kind])
        file.flush()
        os.fsync(file.fileno())
    (folder / "config.json").write_text(json.dumps(raw))
    return 8 + len(encoded) + end


def drop_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate(path: Path, most: int = 1 << 30) -> float:
    """Bytes a second of large reads past the system's cache, two at a time."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    most = min(most, path.stat().st_size) // CHUNK * CHUNK

    def read(first: int) -> None:
        buffer = mmap.mmap(-1, CHUNK)  # on a page's edge, as such reads need it
        for at in range(first * CHUNK, most, READERS * CHUNK):
            os.preadv(descriptor, [buffer], at)

    start = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(READERS)))
    seconds = time.perf_counter() - start
    os.close(descriptor)
    return most / seconds


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """The most that was resident, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.02):
            self.bytes = max(self.bytes, resident())


def measure(folder: Path, budget: int, tokens: int, warm: bool) -> dict[str, Any]:
    """One process: loads, writes a few tokens, and tells what the disk gave."""
    if not warm:
        # As on a machine whose memory holds no more than the budget: the system keeps nothing.
        starquill.settling.available_memory = lambda: 0
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    loaded = starquill.load(
        folder, max_memory=f"cpu={budget},disk=inf", max_seq_len=512, max_batch_size=1
    )
    load_seconds = time.perf_counter() - start
    if not warm:
        drop_cache(folder / "model.safetensors")
    engine = Engine(loaded, EngineOptions(lookup=0))
    params = SamplingParams(max_tokens=2 + ROUNDS * tokens)
    disk, path = loaded.model.route.disk, folder / "model.safetensors"
    waited, use = [0.0], disk.use

    def timed(name: object) -> None:
        start = time.perf_counter()
        use(name)
        waited[0] += time.perf_counter() - start

    disk.use = timed
    generation = engine.generate([7, 8, 9], params)
    next(generation)
    rates, read, seconds = [], 0, 0.0
    waited[0] = 0.0
    for _ in range(ROUNDS):
        if not warm:  # in turn: virtual disks slow down for who reads much
            rates.append(read_rate(path))
        before, start = disk.read_bytes, time.perf_counter()
        for _ in range(tokens):
            next(generation)
        seconds += time.perf_counter() - start
        read += disk.read_bytes - before
    peak.over.set()
    peak.join()
    count = ROUNDS * tokens
    return {
        "device_map": str(loaded.placement.devices), "load_s": round(load_seconds, 2),
        "tokens": count, "s_per_token": round(seconds / count, 3),
        "waited_per_token": round(waited[0] / count, 3), "read_per_token": read // count,
        "rate": round(read / seconds / 1e9, 3), "peak_resident": peak.bytes,
        "disk_rates": [round(rate / 1e9, 3) for rate in rates],
    }  # fmt: skip


def run_alone(folder: Path, options: argparse.Namespace, budget: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", str(folder), "--budget", str(budget)]
    command += ["--tokens", str(options.tokens), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument(
        "--budget", type=float, help="bytes; 4 GB for 40 layers, else in proportion"
    )
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, help="where the model is written; else a scratch one"
    )
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        torch.manual_seed(0)
        print(json.dumps(measure(options.one, int(options.budget), options.tokens, options.warm)))
        return
    scratch = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        need = 216e6 * options.layers + 4e8
        if shutil.disk_usage(scratch).free < 1.2 * need:
            raise SystemExit(
                f"{need / 1e9:.1f} GB are needed; name another --folder or fewer --layers"
            )
        size = write(scratch, options.layers)
        path = scratch / "model.safetensors"
        budget = int(options.budget or 4e9 * options.layers / 40)
        drop_cache(path)
        cold = run_alone(scratch, options, budget)
        warm = run_alone(scratch, options, budget, "--warm")
    finally:
        shutil.rmtree(scratch)
    disk = len(cold["disk_rates"]) / sum(1 / rate for rate in cold["disk_rates"])
    print(json.dumps({
        "layers": options.layers, "bytes": size, "budget": budget,
        "cold": cold, "warm": warm,
        "share_of_disk_rate": round(cold["rate"] / disk, 3),
        "load_average": os.getloadavg()[0], "cores": os.cpu_count(),
        "within_budget": cold["peak_resident"] <= budget,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
