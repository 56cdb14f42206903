"""From the command to the first token: starquill's beside llama.cpp's, each a fresh process.

    python benchmarks/start.py --ours DIR --theirs FILE.gguf [--rounds 5]

`--ours` is a saved quantized folder, `--theirs` the same model as a GGUF file. A prompt of about
16 tokens is completed by one token; files lie in the page cache. llama.cpp runs through its Python
binding, as small a program as that allows. The figure is the time that starquill needs on top of
llama.cpp's. Ends in one line of JSON.
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

PROMPT = "def quicksort(items, low, high):\n    if low < high:\n"
LLAMA = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=512, n_threads=int(sys.argv[3]), verbose=False)
print(model(sys.argv[2], max_tokens=1, temperature=0)["choices"][0]["text"])
"""


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--theirs", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    ours = [sys.executable, "-m", "starquill", "generate", "--model", str(options.ours)]
    ours += ["--prompt", PROMPT, "--max-tokens", "1"]
    theirs = [sys.executable, "-c", LLAMA, str(options.theirs), PROMPT, str(options.threads)]
    sides = {"starquill": ours, "llama.cpp": theirs}
    for command in sides.values():
        seconds(command)  # brings files and libraries into memory
    busy = round(os.getloadavg()[0], 2)
    found: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side in list(sides)[:: 1 if number % 2 == 0 else -1]:
            found[side].append(seconds(sides[side]))
    medians = {side: round(statistics.median(times), 3) for side, times in found.items()}
    result = {
        "benchmark": "start",
        "load_average": busy,
        "seconds": medians,
        "above_llama": round(medians["starquill"] - medians["llama.cpp"], 3),
        "ratio": round(medians["llama.cpp"] / medians["starquill"], 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
