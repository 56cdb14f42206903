"""Decode and prefill of a mixture beside llama.cpp and mistral.rs, in one process, in turn.

    python benchmarks/mixture.py --work DIR [--schemes 4 2] [--layers 4]

All run the same weights, of Qwen3-30B-A3B's layer shape (see `mixture_files.py`), which are made in
`--work` once. Beside llama.cpp everything is quantized, by its recipe Q4_K_M or Q2_K and ours of 4
or 2 bits; beside mistral.rs only the experts are (its organization MoQE, ours `moqe`), and the rest
is as both compute it from bfloat16. Token ids are random, so that the experts' weights come from
memory. A rate is the median of rounds in which the programs take turns; a ratio above 1 means that
starquill is faster.

mistral.rs takes seconds for a step of such a mixture on a CPU: it gets a prompt of a few dozen
tokens where the others get `--prompt`, and one round. Its rates are those that it reports.

`--check` compares the logits of one such layer with llama.cpp's in float32. Ends in one line of
JSON. Other work on the machine distorts all of this: `load_average` should be near 0.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from against_llama_cpp import Theirs as LlamaCpp
from against_llama_cpp import read_bandwidth
from gguf_file import our_logits, quantize_gguf, silence, their_logits
from mixture_files import write_gguf, write_mixture
from rates import Ours, against, in_turn, random_ids, seconds

from starquill.engine.bench import weight_bytes
from starquill.loading import load
from starquill.quantizing import QuantOptions, quantize_checkpoint

RECIPES = {"4": "Q4_K_M", "2": "Q2_K"}
TEXT = 2 * "def add(first, second):\n    return first + second\n\n\n"


class MistralRs:
    def __init__(self, folder: Path, bits: str) -> None:
        import mistralrs

        self.request = mistralrs.CompletionRequest
        self.runner = mistralrs.Runner(
            which=mistralrs.Which.Plain(
                model_id=str(folder),
                arch=mistralrs.Architecture.Qwen3Moe,
                organization=_moqe(mistralrs),
            ),
            in_situ_quant=f"Q{bits}K",
            prefix_cache_n=0,  # every prompt is computed anew
        )

    def rates(self, text: str, tokens: int) -> tuple[int, float, float]:
        """How many tokens `text` has, and tokens a second of prefill and decode."""
        request = self.request(
            prompt=text, model="default", max_tokens=tokens, temperature=0.0, ignore_eos=True
        )
        usage = self.runner.send_completion_request(request).usage
        assert usage.completion_tokens == tokens, "the model ended early"
        return usage.prompt_tokens, usage.avg_prompt_tok_per_sec, usage.avg_compl_tok_per_sec


def _moqe(mistralrs: Any) -> Any:
    """`IsqOrganization.MoQE`. The module does not export the class, but looks for it."""
    try:
        mistralrs.Which.Plain(model_id="", organization="")
    except TypeError:
        found = [c for c in object.__subclasses__() if c.__name__ == "IsqOrganization"]
        return found[0].MoQE  # type: ignore[attr-defined]
    raise AssertionError("mistral.rs took a text for its organization")


def make_files(work: Path, options: argparse.Namespace) -> None:
    """All programs' files, those that are not there already."""
    work.mkdir(parents=True, exist_ok=True)
    plain, dense = work / "plain", work / "dense.gguf"
    if not (plain / "config.json").exists():
        write_mixture(plain, options.layers)
    for bits in options.schemes:
        kinds = {f"ours-{bits}": None, f"ours-{bits}-moqe": "moqe"}
        for name, organization in kinds.items():
            if not (work / name).exists():
                quantize_checkpoint(
                    plain, work / name, QuantOptions(bits, organization=organization)
                )
        recipe = work / f"{RECIPES[bits]}.gguf"
        if not recipe.exists():
            if not dense.exists():
                write_gguf(plain, dense)
            quantize_gguf(dense, recipe, RECIPES[bits])


def _ids(count: int, vocab: int) -> list[int]:
    return [token % (vocab - 100) + 50 for token in random_ids(count)]


def beside_llama_cpp(bits: str, options: argparse.Namespace) -> dict[str, Any]:
    ours = Ours(options.work / f"ours-{bits}")
    context = max(options.prompt, options.depth + options.tokens)
    theirs = LlamaCpp(options.work / f"{RECIPES[bits]}.gguf", options.threads, context)
    sides: dict[str, Ours | LlamaCpp] = {"starquill": ours, RECIPES[bits]: theirs}
    vocab = ours.loaded.config.vocab_size
    prompt, short, more = (_ids(n, vocab) for n in (options.prompt, options.depth, options.tokens))

    def decode(side: Ours | LlamaCpp) -> float:
        side.prefill(short)
        return len(more) / seconds(lambda: side.decode(more))

    def prefill(side: Ours | LlamaCpp) -> float:
        return len(prompt) / seconds(lambda: side.prefill(prompt))

    for measure in (decode, prefill):
        for side in sides.values():
            measure(side)  # warms up
    found = {
        measure.__name__: against(
            in_turn({n: partial(measure, side) for n, side in sides.items()}, options.rounds)
        )
        for measure in (decode, prefill)
    }
    theirs.close()
    return {**found, "bytes_a_token": weight_bytes(ours.loaded)}


def beside_mistralrs(bits: str, options: argparse.Namespace) -> dict[str, Any]:
    ours = Ours(options.work / f"ours-{bits}-moqe")
    theirs = MistralRs(options.work / "plain", bits)
    ids = ours.encode(TEXT)
    theirs.rates(TEXT, 2)  # warms up
    tokens, prefill, decode = theirs.rates(TEXT, options.their_tokens)
    assert tokens == len(ids), f"{tokens} and {len(ids)} tokens of one text"
    more = _ids(options.tokens, ours.loaded.config.vocab_size)
    ours.prefill(ids)
    ours.decode(more)
    own: dict[str, Callable[[], float]] = {
        "prefill": lambda: tokens / seconds(lambda: ours.prefill(ids)),
        "decode": lambda: len(more) / seconds(lambda: ours.decode(more)),
    }
    rates = in_turn(own, options.rounds)
    return {
        "prompt": tokens,
        "decode": against({"starquill": rates["decode"], "mistralrs": decode}),
        "prefill": against({"starquill": rates["prefill"], "mistralrs": prefill}),
    }


def check(work: Path) -> dict[str, float]:
    """How far one layer's logits are from llama.cpp's, both in float32 from the same weights."""
    folder, path = work / "one", work / "one.gguf"
    if not (folder / "config.json").exists():
        write_mixture(folder, layers=1)
    write_gguf(folder, path, "F32")
    loaded = load(folder)
    ids = _ids(60, loaded.config.vocab_size)
    ours, theirs = our_logits(loaded, ids), their_logits(path, ids)
    path.unlink()
    return {
        "largest_logit": float(np.abs(ours).max()),
        "largest_difference": float(np.abs(ours - theirs).max()),
        "same_top": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where files are made and kept")
    parser.add_argument("--schemes", nargs="+", choices=list(RECIPES), default=["4", "2"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512, help="prefilled tokens")
    parser.add_argument("--depth", type=int, default=32, help="tokens before the decoded ones")
    parser.add_argument("--tokens", type=int, default=48, help="decoded tokens per round")
    parser.add_argument("--their-tokens", type=int, default=4, help="the same of mistral.rs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--without", nargs="*", choices=["llama.cpp", "mistral.rs"], default=[])
    parser.add_argument("--check", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    busy = round(os.getloadavg()[0], 2)
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # read when mistral.rs starts
    torch.set_num_threads(options.threads)
    silence()
    make_files(options.work, options)
    result: dict[str, Any] = {"read_bandwidth": round(read_bandwidth())}
    if options.check:
        result["check"] = check(options.work)
    for bits in options.schemes:
        row: dict[str, Any] = {}
        if "llama.cpp" not in options.without:
            row["llama.cpp"] = beside_llama_cpp(bits, options)
        if "mistral.rs" not in options.without:
            row["mistral.rs, experts alone"] = beside_mistralrs(bits, options)
        print(bits, json.dumps(row), flush=True)
        result[bits] = row
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    settings["load_average"] = busy
    print(json.dumps({"benchmark": "mixture", **settings, **result}))


if __name__ == "__main__":
    main()
