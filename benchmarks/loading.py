"""Loading with quantization to 4 bits beside mistral.rs: seconds and peak memory.

    python benchmarks/loading.py --model DIR [--rounds 3]

Each load is a fresh process, the two programs in turn, the files read once before so that they
lie in the page cache. Seconds are those of the load itself, without the start of the process.
The peak is the operating system's largest resident size of the process, which counts pages of
mapped files. Ends in one line of JSON; a ratio above 1 means that starquill is better. `bound`
is what starquill's peak should stay below: the quantized weights, the two largest tensors in
float32, and 400 MB for the interpreter and its libraries. Other work on the machine distorts all
of this: `load_average` should be near 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# This process imports no torch: a child's peak counts what its parent had when it was started.
OVERHEAD = 400_000_000
SIDES = ("starquill", "mistralrs")


def load_ours(folder: str, quant: str) -> dict[str, Any]:
    import starquill
    from starquill.checkpoint.build import expected_tensors
    from starquill.nn.linear import Embedding, Linear

    started = time.perf_counter()
    loaded = starquill.load(folder, quant=quant)
    seconds = time.perf_counter() - started
    shapes = expected_tensors(loaded.model)
    if loaded.config.tie_word_embeddings is not False:
        del shapes["lm_head.weight"]
    sizes = sorted(rows * columns for rows, columns in (s for s in shapes.values() if len(s) == 2))
    modules = [m for m in loaded.model.modules() if isinstance(m, Linear | Embedding)]
    quantized = sum({id(m.weight): m.weight.nbytes for m in modules}.values())
    quantized += sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    bound = quantized + 4 * sum(sizes[-2:]) + OVERHEAD
    return {"seconds": seconds, "quantized": quantized, "bound": bound}


def load_theirs(folder: str, quant: str) -> dict[str, Any]:
    import mistralrs

    started = time.perf_counter()
    mistralrs.Runner(
        which=mistralrs.Which.Plain(model_id=folder, arch=mistralrs.Architecture.Starcoder2),
        in_situ_quant=f"Q{quant}K",
    )
    return {"seconds": time.perf_counter() - started}


def fresh_load(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Load in a new process; what it reports, and its peak as the system counted it."""
    threads = str(options.threads)
    env = {**os.environ, "OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads}
    child = [sys.executable, __file__, "--model", str(options.model), "--side", side]
    process = subprocess.Popen(
        [*child, "--quant", options.quant], env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [line for line in process.stdout if line.startswith("{")]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not lines:
        raise RuntimeError(f"{side} failed with status {process.returncode}")
    unit = 1 if sys.platform == "darwin" else 1024
    result: dict[str, Any] = json.loads(lines[-1])
    return {**result, "peak": usage.ru_maxrss * unit, "processor": usage.ru_utime + usage.ru_stime}


def read_once(folder: Path) -> int:
    """Bring the weights into the page cache; their bytes."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while block := file.read(1 << 24):
                total += len(block)
    return total


def measure_alone(options: argparse.Namespace) -> dict[str, Any]:
    """starquill's peak only, for checkpoints that are too large for the other side."""
    run = fresh_load("starquill", options)
    return {**run, "within_bound": run["peak"] <= run["bound"]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    busy = round(os.getloadavg()[0], 2)
    size = read_once(options.model)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(options.rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            run = fresh_load(side, options)
            runs[side].append(run)
            print(f"{side}: {run['seconds']:.2f} s, peak {run['peak'] / 1e6:.0f} MB", flush=True)
    medians = {
        side: {
            what: statistics.median(run[what] for run in found)
            for what in ("seconds", "peak", "processor")
        }
        for side, found in runs.items()
    }
    ours, theirs = (medians[side] for side in SIDES)
    last = runs["starquill"][-1]
    worst = max(run["peak"] for run in runs["starquill"])
    return {
        "load_average": busy,
        "checkpoint_bytes": size,
        "medians": {
            side: {what: round(value, 2) for what, value in found.items()}
            for side, found in medians.items()
        },
        "all_seconds": {s: [round(r["seconds"], 2) for r in found] for s, found in runs.items()},
        "ratio_seconds": round(theirs["seconds"] / ours["seconds"], 3),
        "ratio_peak": round(theirs["peak"] / ours["peak"], 3),
        "quantized_bytes": last["quantized"],
        "bound": last["bound"],
        "worst_peak": worst,
        "within_bound": worst <= last["bound"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quant", default="4", choices=("2", "3", "4", "5", "6", "8"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="one run of starquill, for its peak")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        load_side = load_ours if options.side == "starquill" else load_theirs
        print(json.dumps(load_side(str(options.model), options.quant)), flush=True)
        return
    result = measure_alone(options) if options.alone else measure(options)
    settings = {"rounds": options.rounds, "quant": options.quant, "threads": options.threads}
    print(json.dumps({"benchmark": "loading", **settings, **result}))


if __name__ == "__main__":
    main()
