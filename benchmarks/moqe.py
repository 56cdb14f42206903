"""What low bits cost where, in a small mixture of experts and its dense twin.

    python benchmarks/moqe.py --data FILE|DIR --calibrate FILE|DIR
        [--table FILE.md] [--plot FILE.png] [--only bits|methods|rates]

The paper is "Mixture of Quantized Experts" (arXiv 2310.02410). `benchmarks/data/moqe` holds a
`starcoder2_moe` of 8 experts, two for each token, and a `starcoder2` of which as many weights work
on a token, trained on the same rows by `tools/train_moqe.py`. Prints tables of bits per byte at 8,
4, 3 and 2 bits when experts, attention or all is quantized, and of the twin's MLPs; of the methods
at 3 and 2 bits; of sizes and decode rates. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from starquill.checkpoint.files import read_texts
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.engine.bench import Case, measure
from starquill.engine.loaded import LoadedModel
from starquill.engine.scoring import score_texts
from starquill.loading import load
from starquill.nn.experts import ExpertLinear
from starquill.nn.linear import Linear
from starquill.quant.affine import AffineWeight, pack
from starquill.quant.weight import DenseWeight
from starquill.quantizing import QuantOptions, plan_checkpoint, planned_bytes

MODELS = Path(__file__).parent / "data" / "moqe"
BITS = (8, 4, 3, 2)
# What is quantized: the model, and by which pattern all else is kept from it.
PARTS = {
    "experts": ("mixture", r"^((?!\.experts\.).)*$=dense"),
    "attention": ("mixture", r"^((?!\.self_attn\.).)*$=dense"),
    "all": ("mixture", None),
    "twin's MLPs": ("dense", r"^((?!\.mlp\.).)*$=dense"),
}
CHANNEL = "rtn per channel"
METHODS = (CHANNEL, "rtn", "hqq", "hqq+calibration", "hqq+distilling", "hqq+both")
STEPS = 100
SHARE = 2_000  # characters of a text, so that many are seen


@dataclass(frozen=True)
class Data:
    """Text to score, and to learn from."""

    texts: list[str]
    calibrate: Path

    def bits_per_byte(self, loaded: LoadedModel) -> float:
        return score_texts(loaded, self.texts).bits_per_byte


@dataclass(frozen=True)
class Row:
    """A model with one part quantized."""

    model: str
    part: str
    bits: int
    method: str
    bits_per_byte: float
    worse: float  # a share of the unquantized model's
    bytes: int


def options_for(part: str, bits: int, method: str, calibrate: Path) -> QuantOptions:
    """Embedding and head get as many bits as the rest: what is compared is what bits do."""
    name, _, how = method.partition("+")
    kept = PARTS[part][1]
    scheme = f"{bits}-{name}"
    return QuantOptions(
        scheme,
        overrides=(f".={scheme}",) if kept is None else (kept,),
        calibrate=calibrate if how in ("calibration", "both") else None,
        distill=calibrate if how in ("distilling", "both") else None,
        steps=STEPS,
    )


def per_channel(weight: Tensor, bits: int) -> AffineWeight:
    """As the paper rounds: symmetric, one scale for an output channel, 2·max|w| / (2^bits - 1)."""
    half = 2 ** (bits - 1)
    scale = 2 * weight.abs().amax(-1, keepdim=True) / (2**bits - 1)
    q = (weight / scale).round().clamp(-half, half - 1) + half
    scales = scale.expand(*weight.shape[:-1], weight.shape[-1] // 64).contiguous()
    return AffineWeight(pack(q.to(torch.uint8), bits), scales, -half * scales, bits, 64, exact=True)


def by_channel(model: str, part: str, bits: int) -> LoadedModel:
    loaded = load(str(MODELS / model))
    for name, module in loaded.model.named_modules():
        wanted = isinstance(module, ExpertLinear) or (
            part == "twin's MLPs" and isinstance(module, Linear) and ".mlp." in name
        )
        if wanted:
            assert isinstance(module.weight, DenseWeight)
            module.weight = per_channel(module.weight.data.float(), bits)
    return loaded


def scored(part: str, bits: int, method: str, data: Data, base: dict[str, float]) -> Row:
    model = PARTS[part][0]
    folder = str(MODELS / model)
    checkpoint = open_checkpoint(locate(folder))
    options = options_for(part, bits, "rtn" if method == CHANNEL else method, data.calibrate)
    size = planned_bytes(
        checkpoint, plan_checkpoint(checkpoint, replace(options, calibrate=None, distill=None))
    )
    if method == CHANNEL:
        loaded = by_channel(model, part, bits)
        size = -1  # stored by groups here, which the paper does not do
    else:
        loaded = load(folder, quant=options, exact=True)
    found = data.bits_per_byte(loaded)
    row = Row(model, part, bits, method, round(found, 5), round(found / base[model] - 1, 5), size)
    print(f"{row.part} {bits} bits {method}: {found:.4f} ({row.worse:+.2%})", flush=True)
    return row


def by_bits(data: Data, base: dict[str, float]) -> list[Row]:
    """Without any data, as the paper does above 2 bits."""
    return [scored(part, bits, "hqq", data, base) for bits in BITS for part in PARTS]


def by_method(data: Data, base: dict[str, float]) -> list[Row]:
    parts = ("experts", "twin's MLPs")
    return [
        scored(part, bits, method, data, base)
        for bits in (3, 2)
        for method in METHODS
        for part in parts
    ]


@dataclass(frozen=True)
class Rate:
    """A model's weights in bytes, of which a token needs `read`, and its decode rate."""

    name: str
    bytes: int
    read: int
    tokens_per_second: float


def rates(rounds: int = 15) -> list[Rate]:
    """In turns, so that what else the machine does strikes all alike; the median of each."""
    folder = MODELS / "mixture"
    checkpoint = open_checkpoint(locate(folder))
    sizes = {"bf16": sum(info.nbytes for info in checkpoint.source.infos.values())}
    models = {"bf16": load(folder)}
    for bits in BITS:
        name, options = f"experts at {bits} bits", QuantOptions(str(bits), organization="moqe")
        models[name] = load(folder, quant=options)
        sizes[name] = planned_bytes(checkpoint, plan_checkpoint(checkpoint, options))
    case = Case("decode", 64, depth=64)
    runs = {name: [measure(m, case, 1)] for name, m in models.items()}
    for _ in range(rounds):
        for name, loaded in models.items():
            runs[name].append(measure(loaded, case, 1))
    return [
        Rate(name, sizes[name], own[0].weight_bytes, round(median(r.rate for r in own), 1))
        for name, own in runs.items()
    ]


def _cells(rows: Sequence[Row]) -> str:
    return " | ".join(f"{row.bits_per_byte:.4f} ({row.worse:+.2%})" for row in rows)


def bits_table(rows: Sequence[Row], base: dict[str, float]) -> Iterator[str]:
    yield f"| bits | {' | '.join(PARTS)} |"
    yield f"|---|{'---|' * len(PARTS)}"
    unquantized = [f"{base[model]:.4f}" for model, _ in PARTS.values()]
    yield f"| 16 | {' | '.join(unquantized)} |"
    for bits in BITS:
        cells = [r for part in PARTS for r in rows if (r.part, r.bits) == (part, bits)]
        yield f"| {bits} | {_cells(cells)} |"


def methods_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| how | experts, 3 bits | experts, 2 bits | twin's MLPs, 3 bits | twin's MLPs, 2 bits |"
    yield "|---|---|---|---|---|"
    for method in METHODS:
        own = {(r.part, r.bits): r for r in rows if r.method == method}
        cells = [own[part, bits] for part in ("experts", "twin's MLPs") for bits in (3, 2)]
        yield f"| {method} | {_cells(cells)} |"


def rates_table(found: Sequence[Rate]) -> Iterator[str]:
    yield "| weights | bytes | a token reads | tokens per second |"
    yield "|---|---|---|---|"
    whole = found[0]
    for one in found:
        smaller, faster = (
            one.bytes / whole.bytes - 1,
            one.tokens_per_second / whole.tokens_per_second,
        )
        yield (
            f"| {one.name} | {one.bytes:,} ({smaller:+.1%}) | {one.read:,} "
            f"| {one.tokens_per_second:.0f} ({faster:.2f}×) |"
        )


def plot(rows: Sequence[Row], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for part in PARTS:
        own = sorted((r for r in rows if r.part == part), key=lambda r: r.bits)
        worse = [max(100 * r.worse, 0.01) for r in own]
        style = "--" if PARTS[part][0] == "dense" else "-"
        axes.plot([r.bits for r in own], worse, style, marker="o", label=part)
    axes.set(yscale="log", xlabel="bits", ylabel="bits per byte over unquantized, %", xticks=BITS)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=100_000, help="of --data to score")
    parser.add_argument("--only", choices=("bits", "methods", "rates"), action="append")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    logging.getLogger("starquill").setLevel(logging.ERROR)
    wanted = options.only or ["bits", "methods", "rates"]
    data = Data(cut_to(read_texts(options.data, ".py"), options.characters), options.calibrate)
    result: dict[str, object] = {"benchmark": "moqe"}
    lines: list[str] = []
    base = {}
    if wanted != ["rates"]:
        base = {name: data.bits_per_byte(load(str(MODELS / name))) for name in ("mixture", "dense")}
        print(f"unquantized: {base}", flush=True)
    if "bits" in wanted:
        rows = by_bits(data, base)
        lines += ["", *bits_table(rows, base)]
        result["bits"] = [vars(row) for row in rows]
        if options.plot is not None:
            plot(rows, options.plot)
    if "methods" in wanted:
        rows = by_method(data, base)
        lines += ["", *methods_table(rows)]
        result["methods"] = [vars(row) for row in rows]
    if "rates" in wanted:
        found = rates()
        lines += ["", *rates_table(found)]
        result["rates"] = [vars(rate) for rate in found]
    print("\n".join(lines))
    if options.table is not None:
        options.table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps({**result, "unquantized": base}))


def cut_to(texts: list[str], characters: int) -> list[str]:
    """The beginnings of some, evenly spaced, as many characters in all."""
    count = max(1, min(len(texts), characters // SHARE))
    return [texts[i * len(texts) // count][: characters // count] for i in range(count)]


if __name__ == "__main__":
    main()
