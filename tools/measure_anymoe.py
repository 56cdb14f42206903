"""Measure a mixture of tools/train_experts.py's experts; prints docs/anymoe.md's table.

    python tools/train_experts.py --out build/anymoe --steps 110
    python tools/measure_anymoe.py --work build/anymoe --plot docs/anymoe.png

Gates are trained on files of WORK/gates: `token` gates on rows of --tokens, `mean` gates on rows
that are as short as the shortest prompts that they shall choose by. The learning rate of each is
the one of --rates that does best on files of WORK/choosing; bits per byte are of files of
WORK/heldout, which nothing was trained on or chosen by.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

from starquill.anymoe import AnyMoeConfig, TrainReport, train
from starquill.checkpoint.hub import embedded_model
from starquill.engine.runner import Runner
from starquill.engine.scoring import Score, score_texts
from starquill.loading import load
from starquill.nn.cache import blocks_for
from starquill.quantizing import QuantOptions

EXPERTS = ("c", "js")
BEGINNINGS = (64, 128, 256)  # tokens of a text that `mean` gates choose by
KINDS = {"base": "Python", "c": "C", "js": "JavaScript"}


def first_files(folder: Path, count: int) -> list[Path]:
    return sorted(folder.iterdir())[:count]


def train_gates(
    work: Path, gate: str, top_k: int, rate: float, options: argparse.Namespace
) -> TrainReport:
    data, out = work / "rows", work / f"mixture-{gate}-{top_k}"
    for folder in (data, out):
        shutil.rmtree(folder, ignore_errors=True)
    for kind in KINDS:
        (data / kind).mkdir(parents=True)
        for path in first_files(work / "gates" / kind, options.gate_files):
            shutil.copy(path, data / kind)
    config = AnyMoeConfig(
        gate=gate,  # type: ignore[arg-type]
        top_k=top_k,
        epochs=options.epochs,
        tokens=options.tokens if gate == "token" else options.mean_tokens,
        learning_rate=rate,
    )
    return train("default", {name: work / name for name in EXPERTS}, data, out, config)


def scores(
    model: str | Path, texts: dict[str, list[str]], quant: QuantOptions | None = None
) -> dict[str, Score]:
    loaded = load(model, quant=quant)
    return {kind: score_texts(loaded, found) for kind, found in texts.items()}


def by_beginning(model: Path, texts: dict[str, list[str]], tokens: int) -> dict[str, Score]:
    """With experts that the first tokens of each text choose: nothing of the rest is known then."""
    loaded, found = load(model), {}
    for kind, own in texts.items():
        total = Score()
        for text in own:
            ids = [0, *loaded.require_tokenizer().encode(text)]
            runner = Runner(loaded, blocks_for(tokens) + blocks_for(len(ids)))
            first, place = runner.cache.place(tokens), runner.cache.place(len(ids))
            runner.prefill(first, ids[:tokens])
            place.routes = first.routes
            logits = torch.cat(list(runner.score(place, ids[:-1])))
            nats = float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
            total += Score(len(ids) - 1, len(text.encode()), nats)
        found[kind] = total
    return found


def choose_rate(work: Path, gate: str, options: argparse.Namespace) -> float:
    """By bits per byte of files that are for nothing else."""
    texts = read(work / "choosing", options.choosing_files)
    found = {}
    for rate in options.rates:
        out = train_gates(work, gate, 1, rate, options).out
        scored = scores(out, texts) if gate == "token" else by_beginning(out, texts, BEGINNINGS[1])
        found[rate] = bits(scored)["all"]
    print(json.dumps({"gate": gate, "chosen by": found}), flush=True)
    return min(found, key=found.__getitem__)


def read(folder: Path, count: int) -> dict[str, list[str]]:
    return {
        kind: [p.read_text("utf-8") for p in first_files(folder / kind, count)] for kind in KINDS
    }


def line(name: str, found: dict[str, float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.3f}" for value in found.values()) + " |"


def bits(found: dict[str, Score]) -> dict[str, float]:
    """By kind, and of all as one text."""
    total = sum(found.values(), Score())
    return {**{k: s.bits_per_byte for k, s in found.items()}, "all": total.bits_per_byte}


def draw(table: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(10, 4), layout="constrained")).add_subplot()
    width = 0.8 / len(table)
    for number, (name, found) in enumerate(table.items()):
        places = [at + number * width for at in range(len(found))]
        axes.bar(places, list(found.values()), width, label=name)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(4)], [*KINDS.values(), "all"])
    axes.set_ylabel("bits per byte, less is better")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/anymoe"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--tokens", type=int, default=512, help="of a row for token gates")
    parser.add_argument("--mean-tokens", type=int, default=64, help="of a row for mean gates")
    parser.add_argument("--choosing-files", type=int, default=4, help="of a kind")
    parser.add_argument("--gate-files", type=int, default=48, help="of a kind")
    parser.add_argument("--files", type=int, default=8, help="held-out files of a kind")
    options = parser.parse_args()
    work: Path = options.work
    weights = embedded_model() / "model.safetensors"
    before = hashlib.sha256(weights.read_bytes()).hexdigest()
    texts = read(work / "heldout", options.files)
    rates = {gate: choose_rate(work, gate, options) for gate in ("token", "mean")}
    found: dict[str, dict[str, Score]] = {"base": scores("default", texts)}
    found |= {name: scores(work / name, texts) for name in EXPERTS}
    found["by hand"] = {kind: found[kind][kind] for kind in KINDS}
    for gate, top_k in (("token", 1), ("token", 2), ("mean", 1)):
        report = train_gates(work, gate, top_k, rates[gate], options)
        print(json.dumps({**asdict(report), "out": report.out.name}), flush=True)
        found[f"mixture, {gate}, top {top_k}"] = scores(report.out, texts)
    for tokens in BEGINNINGS:
        mean = f"mixture, mean, by the first {tokens} tokens"
        found[mean] = by_beginning(work / "mixture-mean-1", texts, tokens)
    drawn = list(found)
    for number in (4, 3, 2):  # MoQE: experts alone
        quant = QuantOptions(str(number), organization="moqe")
        name = f"mixture, token, top 1, experts at {number} bits"
        found[name] = scores(work / "mixture-token-1", texts, quant)
    table = {name: bits(of_kind) for name, of_kind in found.items()}
    for name, of_kind in table.items():
        print(line(name, of_kind))
    if options.plot is not None:
        draw({name: table[name] for name in drawn}, options.plot)
    if hashlib.sha256(weights.read_bytes()).hexdigest() != before:
        raise ValueError("the base's weights have changed")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
