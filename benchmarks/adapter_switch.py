"""Time to the first token after a change of adapter, beside mlx-lm, which loads all anew.

    python benchmarks/adapter_switch.py [--model default] [--quant 4] [--rounds 15]

The two adapters of `examples/adapters/` on a model that `starquill quantize` wrote, which both
engines read. Here both adapters are loaded; requests with the same adapter as the last and with
the other take turns, without reuse of prompts. mlx-lm's server does what is measured there: its
model has one adapter, so that another means `mlx_lm.load` of model and adapter. Ends in one line
of JSON, medians in milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from starquill.engine.engine import Engine
from starquill.loading import load
from starquill.quantizing import QuantOptions, quantize_checkpoint
from starquill.types import EngineOptions, SamplingParams

EXAMPLES = Path(__file__).parents[1] / "examples" / "adapters"
NAMES = ("tests", "docstrings")
PROMPT = "def read_lines(path, encoding=None):\n    with open(path, encoding=encoding) as file:\n"
NEW_NAMES = (("lora_A.weight", "lora_a"), ("lora_B.weight", "lora_b"))


def as_mlx(peft: Path, folder: Path) -> Path:
    """The same adapter as mlx-lm has it."""
    folder.mkdir()
    config = json.loads((peft / "adapter_config.json").read_text())
    tensors = {}
    for name, tensor in load_file(peft / "adapter_model.safetensors").items():
        ours = name.removeprefix("base_model.model.")
        for old, new in NEW_NAMES:
            ours = ours.replace(old, new)
        tensors[ours] = tensor.T.contiguous()
    save_file(tensors, folder / "adapters.safetensors")
    keys = sorted({name.split(".", 3)[3].rpartition(".")[0] for name in tensors})
    scale = config["lora_alpha"] / config["r"]
    parameters = {"rank": config["r"], "scale": scale, "dropout": 0.0, "keys": keys}
    said = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def milliseconds(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - started)


def ours(folder: Path, rounds: int) -> dict[str, Any]:
    """First tokens with the adapter of the request before, and with the other."""
    loaded = load(folder)
    loading = [milliseconds(partial(loaded.adapters.load, name, EXAMPLES / name)) for name in NAMES]
    engine = Engine(loaded, EngineOptions(prefix_cache=False))
    params = SamplingParams(max_tokens=1)
    found: dict[str, list[float]] = {"same": [], "changed": []}
    written = {}
    for number, name in zip(range(2 * rounds + 2), itertools.cycle(NAMES), strict=False):
        for kind in ("changed", "same"):
            deltas: list[Any] = []
            took = milliseconds(
                lambda: deltas.extend(engine.generate(PROMPT, params, heal=False, adapter=name))  # noqa: B023
            )
            written[name] = deltas[0].token_id
            if number > 1:  # the first of each brings all of it into memory
                found[kind].append(took)
    medians = {kind: round(statistics.median(values), 2) for kind, values in found.items()}
    return {**medians, "load": round(statistics.median(loading), 1), "tokens": written}


def theirs(folder: Path, top: Path, rounds: int) -> dict[str, Any]:
    """First tokens of a model that has its adapter, and of one that must be loaded with it."""
    import mlx_lm

    adapters = {name: as_mlx(EXAMPLES / name, top / name) for name in NAMES}
    found: dict[str, list[float]] = {"same": [], "changed": []}
    written = {}
    state: dict[str, Any] = {}

    def first(name: str, change: bool) -> None:
        if change:
            loaded = mlx_lm.load(str(folder), adapter_path=str(adapters[name]))
            state["model"], state["tokenizer"] = loaded[:2]
        steps = mlx_lm.stream_generate(state["model"], state["tokenizer"], PROMPT, max_tokens=1)
        written[name] = next(iter(steps)).token

    for number, name in zip(range(2 * rounds + 2), itertools.cycle(NAMES), strict=False):
        for kind in ("changed", "same"):
            took = milliseconds(lambda: first(name, kind == "changed"))  # noqa: B023
            if number > 1:
                found[kind].append(took)
    medians = {kind: round(statistics.median(values), 2) for kind, values in found.items()}
    return {**medians, "tokens": written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--quant", default="4")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    busy = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        quantize_checkpoint(options.model, top / "model", QuantOptions(options.quant))
        result = {
            "benchmark": "adapter_switch",
            "load_average": busy,
            "starquill": ours(top / "model", options.rounds),
            "mlx_lm": theirs(top / "model", top, options.rounds),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
