"""What LoRA adapters cost in decode, beside the base model.

    python benchmarks/adapters.py [--size 3b] [--layers 6] [--quant 4] [--rank 16] [--rounds 7]

A random checkpoint of StarCoder2's width, quantized while loading, and eight random adapters on
all of its Linears, in bfloat16. Steps at batch 1 with and without an adapter take turns, and so do
steps at batch 8 with one adapter for all and with one for each. Ends in one line of JSON:
milliseconds a step, both costs as shares of the cheaper side, and the seconds that loading an
adapter takes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from checkpoints import write_checkpoint
from rates import in_turn, seconds
from safetensors.torch import save_file

from starquill.adapters.adapter import BaseModules
from starquill.adapters.store import AdapterStore
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.loading import load
from starquill.nn.cache import blocks_for
from starquill.nn.linear import Linear

STEPS, PROMPT = 12, 64


def write_adapter(folder: Path, loaded: LoadedModel, rank: int, seed: int) -> Path:
    """As PEFT writes one for `all-linear`, with small random values."""
    generator = torch.Generator().manual_seed(seed)
    base, tensors = BaseModules.of(loaded), {}
    for path, module in base.modules.items():
        if isinstance(module, Linear) and path != base.spec.head:
            outputs, inputs = module.weight.shape
            for name, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = 0.01 * torch.randn(shape, generator=generator)
                tensors[f"base_model.model.{path}.lora_{name}.weight"] = values.bfloat16()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "target_modules": "all-linear"}), encoding="utf-8"
    )
    return folder


def stepping(
    loaded: LoadedModel, store: AdapterStore, rows: Sequence[Mapping[str, float]]
) -> Callable[[], float]:
    """A measure: milliseconds for a step of `rows` sequences, each with its adapters."""
    span = PROMPT + STEPS + 1
    runner = Runner(loaded, len(rows) * blocks_for(span))
    places = [runner.cache.place(span) for _ in rows]
    mix = store.mix_of([store.lease(row) for row in rows], [1] * len(rows))
    for place in places:
        runner.advance(place, list(range(100, 100 + PROMPT)))

    def steps() -> None:
        for step in range(STEPS):
            runner.decode(places, [[300 + step]] * len(rows), mix)

    def measure() -> float:
        for place in places:
            place.length = PROMPT
        return 1000 * seconds(steps) / STEPS

    return measure


def cost(dearer: float, cheaper: float) -> float:
    return round(dearer / cheaper - 1, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="3b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--quant", default="4")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    busy = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as top:
        folder = write_checkpoint(Path(top) / "base", options.size, options.layers)
        loaded = load(folder, quant=options.quant)
        store, loading = AdapterStore(loaded), []
        for number in range(8):
            adapter = write_adapter(Path(top) / f"a{number}", loaded, options.rank, number)
            started = time.perf_counter()
            store.load(str(number), adapter)
            loading.append(time.perf_counter() - started)
    measures = {
        "1 row, base": stepping(loaded, store, [{}]),
        "1 row, adapter": stepping(loaded, store, [{"0": 1}]),
        "8 rows, base": stepping(loaded, store, [{}] * 8),
        "8 rows, one adapter": stepping(loaded, store, [{"0": 1}] * 8),
        "8 rows, 8 adapters": stepping(loaded, store, [{str(n): 1} for n in range(8)]),
    }
    for measure in measures.values():
        measure()  # brings all of it into memory
    found = in_turn(measures, options.rounds)
    result = {
        "benchmark": "adapters",
        "load_average": busy,
        "milliseconds": found,
        "one_adapter": cost(found["1 row, adapter"], found["1 row, base"]),
        "eight_adapters": cost(found["8 rows, 8 adapters"], found["8 rows, one adapter"]),
        "seconds_to_load": round(max(loading), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
