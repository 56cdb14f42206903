"""What quantization costs: bits per byte, KL divergence and size by scheme, as a table.

    python benchmarks/quantization.py --model default --data FILE|DIR

Every scheme is compared with the unquantized model on the same text. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from starquill.cli.evaluate import read_texts
from starquill.engine.scoring import score_texts
from starquill.loading import load
from starquill.nn.linear import Embedding, Linear

SCHEMES = [f"{bits}-{method}" for bits in (8, 6, 5, 4, 3, 2) for method in ("rtn", "hqq")]


def stored_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights; a tied one counts once."""
    weights = {id(m.weight): m.weight for m in model.modules() if isinstance(m, Linear | Embedding)}
    vectors = sum(p.numel() * 4 for p in model.parameters())
    return vectors + sum(weight.nbytes for weight in weights.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    options = parser.parse_args()
    texts = read_texts(options.data, ".py")
    reference = load(options.model)
    dense = score_texts(reference, texts)
    rows = []
    print("| scheme | size | bits per byte | over float32 | KL (nats) | same top token |")
    print("|---|---|---|---|---|---|")
    for scheme in options.schemes:
        loaded = load(options.model, quant=scheme)
        score = score_texts(loaded, texts, reference)
        size = stored_bytes(loaded.model)
        worse = score.bits_per_byte / dense.bits_per_byte - 1
        print(
            f"| {scheme} | {size / 1e6:.2f} MB | {score.bits_per_byte:.4f} | {100 * worse:+.2f} % "
            f"| {score.kl_divergence:.4f} | {100 * score.top_agreement:.1f} % |",
            flush=True,
        )
        rows.append(
            {
                "scheme": scheme,
                "bytes": size,
                "bits_per_byte": round(score.bits_per_byte, 5),
                "kl": round(score.kl_divergence, 5),
                "top": round(score.top_agreement, 4),
            }
        )
    print(
        json.dumps(
            {"benchmark": "quantization", "float32": round(dense.bits_per_byte, 5), "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
