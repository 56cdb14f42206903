"""Decode and prefill rates of a model quantized while loading beside mistral.rs, in turn.

    python benchmarks/against_mistralrs.py --model DIR [--quant 4]

`--model` is an unquantized StarCoder2 folder, such as `checkpoints.py` writes; both programs
quantize it themselves. mistral.rs's rates are those that it reports for its own requests, ours
are timed over the same number of tokens after the same prompt. Ends in one line of JSON; a
ratio above 1 means that starquill is faster. Other work on the machine distorts all of this:
`load_average`, taken at the start, should be near 0.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rates import Ours, against, in_turn, random_ids, seconds

LINE = "def add(first, second):\n    return first + second\n\n\n"


class Theirs:
    def __init__(self, folder: Path, quant: str) -> None:
        import mistralrs

        self.request = mistralrs.CompletionRequest
        self.runner = mistralrs.Runner(
            which=mistralrs.Which.Plain(
                model_id=str(folder), arch=mistralrs.Architecture.Starcoder2
            ),
            in_situ_quant=f"Q{quant}K",
            prefix_cache_n=0,  # every prompt is computed anew
        )

    def usage(self, text: str, tokens: int) -> Any:
        request = self.request(
            prompt=text, model="default", max_tokens=tokens, temperature=0.0, ignore_eos=True
        )
        usage = self.runner.send_completion_request(request).usage
        assert usage.completion_tokens == tokens, "the model ended early"
        return usage


def decode_rate(side: Ours | Theirs, text: str, tokens: int) -> float:
    if isinstance(side, Theirs):
        return float(side.usage(text, tokens).avg_compl_tok_per_sec)
    side.prefill(side.encode(text))
    return tokens / seconds(lambda: side.decode(random_ids(tokens)))


def prefill_rate(side: Ours | Theirs, text: str) -> float:
    if isinstance(side, Theirs):
        return float(side.usage(text, 1).avg_prompt_tok_per_sec)
    ids = side.encode(text)
    return len(ids) / seconds(lambda: side.prefill(ids))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    ours, theirs = Ours(options.model, options.quant), Theirs(options.model, options.quant)
    sides: dict[str, Ours | Theirs] = {"starquill": ours, "mistralrs": theirs}
    short, long = LINE * options.short, LINE * options.long
    for side in sides.values():
        decode_rate(side, short, 4)  # warms up
    decode = in_turn(
        {n: partial(decode_rate, side, short, options.tokens) for n, side in sides.items()},
        options.rounds,
    )
    prefill = in_turn(
        {n: partial(prefill_rate, side, long) for n, side in sides.items()}, options.rounds
    )
    return {
        "depth": len(ours.encode(short)),
        "prompt": len(ours.encode(long)),
        "decode": against(decode),
        "prefill": against(prefill),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--quant", default="4", choices=("2", "3", "4", "5", "6", "8"))
    parser.add_argument("--short", type=int, default=2, help="lines before the decoded tokens")
    parser.add_argument("--long", type=int, default=20, help="lines of the prefilled prompt")
    parser.add_argument("--tokens", type=int, default=64, help="decoded tokens per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    busy = round(os.getloadavg()[0], 2)
    # mistral.rs's pool is as large as this says when it starts.
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    result = measure(options)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    settings["load_average"] = busy
    print(json.dumps({"benchmark": "against_mistralrs", **settings, **result}))


if __name__ == "__main__":
    main()
