"""Decode and prefill rates beside transformers, float32, in one process.

Writes a random StarCoder2 checkpoint (or takes `--model DIR`), loads it in both programs, and
measures them in turn, so that a machine that drifts drifts for both. Ends in one line of JSON;
a ratio above 1 means that starquill is faster.

    python benchmarks/against_transformers.py --layers 6 --hidden 3072
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from starquill.checkpoint.build import expected_tensors
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.loading import load
from starquill.models import architecture
from starquill.nn.cache import blocks_for
from starquill.types import EngineOptions, SamplingParams


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; default: a random one")
    parser.add_argument("--quant", help="a scheme for our side; theirs stays float32")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--prompt", type=int, default=256, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=16, help="decoded tokens per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def write_random_checkpoint(folder: Path, hidden: int, layers: int) -> None:
    """A StarCoder2 of the 3B's proportions with random bf16 weights."""
    raw: dict[str, Any] = {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(hidden // 128, 2),
        "num_key_value_heads": 2,
        "vocab_size": 49152,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "rope_theta": 999999.4420358813,
        "max_position_embeddings": 16384,
        "sliding_window": 4096,
        "use_bias": True,
        "torch_dtype": "bfloat16",
    }
    spec = architecture(raw)
    shapes = expected_tensors(spec.Model(spec.read_config(raw)))
    del shapes["lm_head.weight"]
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    state = {
        name: (torch.randn(shape) * 0.02 + ("norm.weight" in name)).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


class Ours:
    name = "starquill"

    def __init__(self, folder: Path, quant: str | None) -> None:
        self.model: LoadedModel = load(folder, quant=quant)

    def prefill(self, ids: list[int]) -> None:
        runner = Runner(self.model, blocks_for(len(ids)), prefill_chunk=len(ids))
        runner.prefill(runner.cache.place(len(ids)), ids)

    def generate(self, ids: list[int], tokens: int) -> None:
        engine = Engine(self.model, EngineOptions(prefill_chunk=len(ids), prefix_cache=False))
        written = list(engine.generate(ids, SamplingParams(max_tokens=tokens)))
        assert len(written) == tokens, "the random model ended early; use another seed"


class Theirs:
    name = "transformers"

    def __init__(self, folder: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")

    @torch.inference_mode()
    def prefill(self, ids: list[int]) -> None:
        self.model(torch.tensor([ids]), logits_to_keep=1, use_cache=True)

    @torch.inference_mode()
    def generate(self, ids: list[int], tokens: int) -> None:
        self.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    sides: list[Ours | Theirs] = [Ours(folder, options.quant), Theirs(folder)]
    vocab_size = sides[0].model.config.vocab_size
    ids = torch.randint(1, vocab_size, (options.prompt,)).tolist()
    times: dict[str, dict[str, list[float]]] = {
        side.name: {"prefill": [], "decode": []} for side in sides
    }
    for round_number in range(options.rounds + 1):
        for side in sides:
            prefill = seconds(lambda side=side: side.prefill(ids))  # type: ignore[misc]
            whole = seconds(lambda side=side: side.generate(ids, options.tokens))  # type: ignore[misc]
            if round_number > 0:  # the first round warms up
                times[side.name]["prefill"].append(options.prompt / prefill)
                times[side.name]["decode"].append((options.tokens - 1) / (whole - prefill))
    rates = {
        name: {what: round(statistics.median(values), 2) for what, values in kinds.items()}
        for name, kinds in times.items()
    }
    ours, theirs = rates["starquill"], rates["transformers"]
    ratios = {what: round(ours[what] / theirs[what], 3) for what in ours}
    return {"tokens_per_second": rates, "ratios": ratios}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or Path(scratch)
        if options.model is None:
            write_random_checkpoint(folder, options.hidden, options.layers)
        result = measure(folder, options)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    print(json.dumps({"benchmark": "against_transformers", **settings, **result}))


if __name__ == "__main__":
    main()
