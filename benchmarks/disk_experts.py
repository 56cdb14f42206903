"""Experts that stay on disk and are fetched as they are chosen: what a cache of them is worth.

Writes a small mixture in 8 bits whose router has favourites, and lets it write the same tokens from
memory, and from disk with room for all, for some, and for hardly any of the experts, each from a
cold page cache that keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import starquill
import starquill.settling
from starquill.checkpoint.build import expected_tensors
from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.models import architecture
from starquill.nn.disk import ExpertCache
from starquill.nn.experts import GatedExperts, PlainExperts
from starquill.quantizing import QuantOptions, quantize_checkpoint
from starquill.types import EngineOptions, SamplingParams

SHAPE = {
    "model_type": "starcoder2_moe", "hidden_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2048,
    "vocab_size": 4096, "max_position_embeddings": 1024, "num_local_experts": 16,
    "num_experts_per_tok": 2, "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5,
    "use_bias": True, "gate_bias": True, "rope_theta": 1e5, "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SHARES = (1.0, 0.5, 0.25, 0.0)
ROUNDS = 3


def write(folder: Path, skew: float) -> Path:
    """Random weights; expert n of a layer's order has a bias of -`skew`·ln(n + 1): Zipf's law."""
    plain, spec = folder / "plain", architecture(SHAPE)
    plain.mkdir()
    torch.manual_seed(0)
    state = {}
    for name, shape in expected_tensors(spec.Model(spec.read_config(SHAPE))).items():
        if len(shape) == 1:
            norm = "norm" in name and name.endswith("weight")
            state[name] = torch.ones(shape) if norm else torch.zeros(shape)
        else:
            state[name] = torch.randn(shape) * shape[-1] ** -0.5
    for name in [name for name in state if name.endswith("gate.bias")]:
        ranks = torch.randperm(len(state[name])).float()
        state[name] = -skew * (ranks + 1).log()
    save_file(state, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(SHAPE))
    quantize_checkpoint(plain, folder / "stored", QuantOptions("8"))
    shutil.rmtree(plain)
    return folder / "stored"


def cache_of(loaded: LoadedModel) -> ExpertCache:
    kinds = GatedExperts | PlainExperts
    found = [m for m in loaded.model.modules() if isinstance(m, kinds) and m.disk is not None]
    cache: ExpertCache = found[0].disk.cache  # type: ignore[union-attr]
    return cache


def uses(loaded: LoadedModel) -> list[int]:
    """How many experts each fetch asks for, from now on."""
    cache, counts = cache_of(loaded), []
    fetch = cache.fetch

    def noted(wanted: Any) -> None:
        counts.append(len(wanted))
        fetch(wanted)

    cache.fetch = noted  # type: ignore[method-assign]
    return counts


def measure(loaded: LoadedModel, tokens: int, counts: list[int] | None) -> dict[str, Any]:
    """After a few tokens, so that a cache is full: tokens a second, and hits."""
    params = SamplingParams(max_tokens=16 + ROUNDS * tokens, temperature=1.0, seed=7)
    run = Engine(loaded, EngineOptions(lookup=0)).generate([5, 6, 7], params)
    for _ in range(16):
        next(run)
    before = 0
    if counts is not None:
        before = cache_of(loaded).fetched
        counts.clear()
    rates = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(tokens):
            next(run)
        rates.append(tokens / (time.perf_counter() - start))
    told: dict[str, Any] = {
        "tokens_per_s": [round(f(rates), 2) for f in (statistics.median, min, max)]
    }
    if counts is not None:
        missed = cache_of(loaded).fetched - before
        told |= {"hits": round(1 - missed / sum(counts), 3), "fetched_per_token": round(
            missed / (ROUNDS * tokens), 2)}  # fmt: skip
    return told


def from_disk(folder: Path, tokens: int, share: float) -> dict[str, Any]:
    loaded = starquill.load(folder, device_map="disk", max_batch_size=1, max_seq_len=1024)
    cache = cache_of(loaded)
    mixtures = [m for m in loaded.model.modules() if isinstance(m, GatedExperts | PlainExperts)]
    experts = [e for m in mixtures if m.disk is not None for e in m.disk.experts]
    cache.room = share * sum(extent.nbytes for expert in experts for extent in expert)
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {"share_in_memory": share, **measure(loaded, tokens, uses(loaded))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skew", type=float, default=1.0, help="0 for a router without favourites")
    parser.add_argument("--tokens", type=int, default=40, help="in each of three turns")
    options = parser.parse_args()
    # As on a machine whose memory holds no more than the budget: the system keeps nothing.
    vars(starquill.settling)["available_memory"] = lambda: 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = write(Path(scratch), options.skew)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        runs = [from_disk(folder, options.tokens, share) for share in SHARES]
        memory = measure(starquill.load(folder), options.tokens, None)
    print(json.dumps({
        "bytes": size, "skew": options.skew, "memory": memory, "disk": runs,
        "load_average": os.getloadavg()[0], "cores": os.cpu_count(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
