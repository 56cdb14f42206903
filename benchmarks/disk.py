"""A model larger than the memory it may take: rate of its weights against the disk's own.

Writes a folder of a 15B's shape (or of fewer layers of it) in 4 bits, random and really on disk,
then generates within a budget from a cold page cache. In turns with the tokens, and with nothing
else under way, as much of the same file is read in the ways that a disk's rate is measured by:
large direct reads, one and two at a time, and in order through the system's (empty) cache. The
share is of the best of the three, medians of all turns.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import starquill
import starquill.settling
from starquill.checkpoint.build import expected_tensors
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.models import architecture
from starquill.nn.disk import Extent, ReadAhead
from starquill.types import EngineOptions, SamplingParams

SHAPE = {
    "model_type": "starcoder2", "hidden_size": 6144, "num_attention_heads": 48,
    "num_key_value_heads": 4, "intermediate_size": 24576, "vocab_size": 49152,
    "use_bias": True, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5,
    "rope_theta": 1e5, "sliding_window": 4096, "max_position_embeddings": 16384,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
BITS, GROUP = 4, 64
ROUNDS = 5
CHUNK, BEHIND, AMOUNT = 8 << 20, 64 << 20, 1 << 30


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


def direct(path: Path, first: int, count: int, readers: int) -> None:
    """Read past the system's cache, so many at a time."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(number: int) -> None:
        buffer = mmap.mmap(-1, CHUNK)  # on a page's edge, as such reads need it
        for at in range(number * CHUNK, count, readers * CHUNK):
            os.preadv(descriptor, [buffer], first + at)

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, range(readers)))
    os.close(descriptor)


def in_order(path: Path, first: int, count: int) -> None:
    """Read through the system's cache, which has none of it, letting go of what was read.

    Memory that is used again at once is the fastest, on a virtual machine by far.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(mapped, dtype=np.uint8)
        for at in range(first, first + count, BEHIND):
            piece = data[at : min(at + BEHIND, first + count)]
            extent = Extent(str(path), piece, file.fileno(), at)
            extent.read()
            extent.drop(cached=False)


def disk_rates(path: Path, turn: int) -> dict[str, float]:
    """Bytes a second of each way, which take the places in the file's last two thirds by turns.

    Those are what the model reads too, so that what lies behind a virtual disk knows both as well.
    """
    size = path.stat().st_size
    count = min(AMOUNT, size // 9) // CHUNK * CHUNK
    ways: dict[str, Callable[[int], None]] = {
        "direct": lambda first: direct(path, first, count, 1),
        "direct_two": lambda first: direct(path, first, count, 2),
        "in_order": lambda first: in_order(path, first, count),
    }
    rates = {}
    drop_cache(path)
    for number, (name, read) in enumerate(ways.items()):
        start = time.perf_counter()
        place = (number + turn) % 3 + turn % 2 * 3
        read(size // 3 // CHUNK * CHUNK + place * count)
        rates[name] = count / (time.perf_counter() - start)
    drop_cache(path)
    return rates


def until_idle(disk: ReadAhead) -> None:
    """What is read ahead of a token would slow down what is measured beside it."""
    before = -1
    while before != disk.read_bytes:
        before = disk.read_bytes
        time.sleep(1)


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Peak(threading.Thread):
    """The most that was resident, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.over, self.looking = 0, threading.Event(), True

    def run(self) -> None:
        while not self.over.wait(0.02):
            found = resident()
            if self.looking:
                self.bytes = max(self.bytes, found)


def load(folder: Path, budget: int, warm: bool) -> LoadedModel:
    if not warm:
        # As on a machine whose memory holds no more than the budget: the system keeps nothing.
        vars(starquill.settling)["available_memory"] = lambda: 0
    loaded = starquill.load(
        folder, max_memory=f"cpu={budget},disk=inf", max_seq_len=512, max_batch_size=1
    )
    if not warm:
        drop_cache(folder / "model.safetensors")
    return loaded


def waits(disk: ReadAhead) -> list[float]:
    """Seconds that layers waited for the disk, from now on."""
    found, use = [], disk.use

    def timed(name: Hashable) -> None:
        start = time.perf_counter()
        use(name)
        found.append(time.perf_counter() - start)

    disk.use = timed  # type: ignore[method-assign]
    return found


def measure(folder: Path, budget: int, tokens: int, warm: bool) -> dict[str, Any]:
    """One process: loads, writes a few tokens, and tells what the disk gave."""
    peak = Peak()
    peak.start()
    start = time.perf_counter()
    loaded = load(folder, budget, warm)
    load_seconds = time.perf_counter() - start
    disk = loaded.model.route.disk
    waited = waits(disk)
    params = SamplingParams(max_tokens=2 + ROUNDS * tokens)
    generation = Engine(loaded, EngineOptions(lookup=0)).generate([7, 8, 9], params)
    next(generation)
    waited.clear()
    turns: list[dict[str, float]] = []
    seconds, read = [], []
    for turn in range(ROUNDS):
        if not warm:
            until_idle(disk)
            peak.looking = False  # what is read here is not the model's
            turns.append(disk_rates(folder / "model.safetensors", turn))
            peak.looking = True
        before, start = disk.read_bytes, time.perf_counter()
        for _ in range(tokens):
            next(generation)
        seconds.append(time.perf_counter() - start)
        read.append(disk.read_bytes - before)
    peak.over.set()
    peak.join()
    return {
        "device_map": str(loaded.placement and loaded.placement.devices),
        "load_s": round(load_seconds, 2),
        "tokens": ROUNDS * tokens, "s_per_token": round(statistics.median(seconds) / tokens, 3),
        "waited_share": round(sum(waited) / sum(seconds), 3),
        "read_per_token": sum(read) // (ROUNDS * tokens), "peak_resident": peak.bytes,
        "rate": told([n / s for n, s in zip(read, seconds, strict=True)]),
        "disk": {name: told([turn[name] for turn in turns]) for name in (turns or [{}])[0]},
    }  # fmt: skip


def told(rates: Sequence[float]) -> list[float]:
    """Median, least and most, in GB/s."""
    return [round(f(rates) / 1e9, 3) for f in (statistics.median, min, max)]


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
    parser.add_argument("--tokens", type=int, default=2, help="in each of five turns")
    parser.add_argument(
        "--folder", type=Path, help="where the model is written; else a scratch one"
    )
    parser.add_argument(
        "--model", type=Path, help="a folder written before, or to be written now and kept"
    )
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        torch.manual_seed(0)
        print(json.dumps(measure(options.one, int(options.budget), options.tokens, options.warm)))
        return
    kept = options.model is not None
    scratch = options.model if kept else Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(json.dumps(report(scratch, options)))
    finally:
        if not kept:
            shutil.rmtree(scratch)


def report(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    path = folder / "model.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        need = 216e6 * options.layers + 4e8
        if shutil.disk_usage(folder).free < 1.2 * need:
            raise SystemExit(
                f"{need / 1e9:.1f} GB are needed; name another --folder or fewer --layers"
            )
        write(folder, options.layers)
    budget = int(options.budget or 4e9 * options.layers / 40)
    drop_cache(path)
    cold = run_alone(folder, options, budget)
    warm = run_alone(folder, options, budget, "--warm")
    best = max(cold["disk"].values(), key=lambda rates: rates[0])
    return {
        "layers": options.layers, "bytes": path.stat().st_size, "budget": budget,
        "cold": cold, "warm": warm,
        "share_of_disk_rate": round(cold["rate"][0] / best[0], 3),
        "load_average": os.getloadavg()[0], "cores": os.cpu_count(),
        "within_budget": cold["peak_resident"] <= budget,
    }  # fmt: skip


if __name__ == "__main__":
    main()
