"""Decode and prefill rates of quantized models beside llama.cpp, in one process, in turn.

    python benchmarks/against_llama_cpp.py --model DIR [--schemes 4 2 8] [--prompts 256 2048]

`--model` is an unquantized StarCoder2 folder, such as `checkpoints.py` writes. Both programs'
files are made from it once, in `--work`. A rate is the median of rounds in which the programs
take turns; of several llama.cpp types the fastest counts. Both get the same token ids and
compute logits for the last one; sampling is left out. llama.cpp decides on flash attention
itself, and keeps its cache in float16.

Each share is what a program's decoding reads of its weights in a second, as a part of what the
same threads can read from memory. Ends in one line of JSON; a ratio above 1 means that
starquill is faster. Other work on the machine distorts all of this: `load_average`, taken at the
start, should be near 0.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import torch
from gguf_file import quantize_gguf, silence, write_gguf
from rates import Ours, against, in_turn, random_ids, seconds

from starquill.quantizing import QuantOptions, quantize_checkpoint

# starquill's scheme -> llama.cpp's types of like size.
RIVALS = {"2": ("Q2_K",), "3": ("Q3_K_M",), "4": ("Q4_0", "Q4_K_M"), "8": ("Q8_0",)}
# Tokens per call, llama-cpp-python's default and llama.cpp's own; 512 per pass over the weights.
BATCHES = (512, 2048)


class Theirs:
    def __init__(self, path: Path, threads: int, context: int) -> None:
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, max(BATCHES), 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, f"llama.cpp cannot run {path}"
        tensors = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(path).tensors}
        rows_only = tensors["token_embd.weight"] if "output.weight" in tensors else 0
        self.bytes_per_token = sum(tensors.values()) - rows_only

    def prefill(self, ids: list[int], batch: int = BATCHES[0]) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        for start in range(0, len(ids), batch):
            self._run(ids[start : start + batch])

    def decode(self, ids: list[int]) -> None:
        for token in ids:
            self._run([token])

    def _run(self, ids: list[int]) -> None:
        array = (llama_cpp.llama_token * len(ids))(*ids)
        failed = llama_cpp.llama_decode(
            self.context, llama_cpp.llama_batch_get_one(array, len(ids))
        )
        assert not failed, f"llama_decode returned {failed}"
        assert llama_cpp.llama_get_logits_ith(self.context, -1)  # waits for the result

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


def decode_rate(side: Ours | Theirs, depth: int, tokens: int) -> float:
    side.prefill(random_ids(depth))
    return tokens / seconds(lambda: side.decode(random_ids(tokens)))


def prefill_measures(
    ours: Ours, rivals: dict[str, Theirs], prompt: int
) -> dict[str, Callable[[], float]]:
    ids = random_ids(prompt)

    def rate(run: Callable[[], None]) -> float:
        return prompt / seconds(run)

    batches = BATCHES if prompt > BATCHES[0] else BATCHES[:1]
    theirs = {
        f"{kind} {batch}": partial(rate, partial(rival.prefill, ids, batch))
        for kind, rival in rivals.items()
        for batch in batches
    }
    return {"starquill": partial(rate, partial(ours.prefill, ids)), **theirs}


def read_bandwidth(rounds: int = 8) -> float:
    """Bytes a second that all threads together read from memory; the best of several reductions."""
    buffer = torch.ones(1 << 28)  # 1 GiB
    whole = buffer.view(torch.int32)
    actions = (buffer.sum, buffer.amax, whole.amax)
    best = min(seconds(action) for _ in range(rounds) for action in actions)
    return buffer.nbytes / best


def make_files(model: Path, work: Path, schemes: list[str]) -> None:
    """Both programs' quantized files, those that are not there already."""
    for scheme in schemes:
        if not (work / f"ours-{scheme}").exists():
            quantize_checkpoint(model, work / f"ours-{scheme}", QuantOptions(scheme))
        missing = [k for k in RIVALS[scheme] if not (work / f"{k}.gguf").exists()]
        dense = work / "dense.gguf"
        if missing and not dense.exists():
            write_gguf(model, dense, "BF16")
        for kind in missing:
            quantize_gguf(dense, work / f"{kind}.gguf", kind)


def measure_scheme(
    scheme: str, work: Path, bandwidth: float, options: argparse.Namespace
) -> dict[str, Any]:
    context = max([*options.prompts, options.depth + options.tokens])
    ours = Ours(work / f"ours-{scheme}")
    rivals = {
        kind: Theirs(work / f"{kind}.gguf", options.threads, context) for kind in RIVALS[scheme]
    }
    sides: dict[str, Ours | Theirs] = {"starquill": ours, **rivals}
    for side in sides.values():
        decode_rate(side, options.depth, 2)  # warms up
    decode = in_turn(
        {
            name: partial(decode_rate, side, options.depth, options.tokens)
            for name, side in sides.items()
        },
        options.rounds,
    )
    sizes = {name: side.bytes_per_token for name, side in sides.items()}
    shares = {name: round(decode[name] * sizes[name] / bandwidth, 3) for name in sides}
    prefill = {
        str(prompt): against(
            in_turn(prefill_measures(ours, rivals, prompt), options.prefill_rounds)
        )
        for prompt in options.prompts
    }
    for rival in rivals.values():
        rival.close()
    return {
        "decode": {**against(decode), "bandwidth_share": shares, "bytes_per_token": sizes},
        "prefill": prefill,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="where files are made and kept")
    parser.add_argument("--schemes", nargs="+", choices=list(RIVALS), default=["4", "2", "8"])
    parser.add_argument("--prompts", nargs="*", type=int, default=[256, 2048])
    parser.add_argument("--depth", type=int, default=32, help="tokens before the decoded ones")
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    options = parse()
    busy = round(os.getloadavg()[0], 2)
    torch.set_num_threads(options.threads)
    silence()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        make_files(options.model, work, options.schemes)
        bandwidth = read_bandwidth()
        found = {}
        for scheme in options.schemes:
            found[scheme] = measure_scheme(scheme, work, bandwidth, options)
            print(scheme, json.dumps(found[scheme]), flush=True)
        result = {"read_bandwidth": round(bandwidth), "schemes": found}
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    settings["load_average"] = busy
    print(json.dumps({"benchmark": "against_llama_cpp", **settings, **result}))


if __name__ == "__main__":
    main()
