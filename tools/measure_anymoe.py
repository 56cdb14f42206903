"""Measure a mixture of tools/train_experts.py's experts; prints docs/anymoe.md's table.

    python tools/train_experts.py --out build/anymoe --steps 110
    python tools/measure_anymoe.py --work build/anymoe --plot docs/anymoe.png

Gates are trained on files of WORK/gates; bits per byte are of files of WORK/heldout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from starquill.anymoe import AnyMoeConfig, TrainReport, train
from starquill.checkpoint.hub import embedded_model
from starquill.engine.scoring import Score, score_texts
from starquill.loading import load

EXPERTS = ("c", "js")
KINDS = {"base": "Python", "c": "C", "js": "JavaScript"}


def first_files(folder: Path, count: int) -> list[Path]:
    return sorted(folder.iterdir())[:count]


def train_gates(work: Path, gate: str, top_k: int, options: argparse.Namespace) -> TrainReport:
    data, out = work / "rows", work / f"mixture-{gate}-{top_k}"
    for folder in (data, out):
        shutil.rmtree(folder, ignore_errors=True)
    for kind in KINDS:
        (data / kind).mkdir(parents=True)
        for path in first_files(work / "gates" / kind, options.gate_files):
            shutil.copy(path, data / kind)
    config = AnyMoeConfig(
        gate=gate, top_k=top_k, epochs=options.epochs, tokens=256, learning_rate=options.lr
    )
    return train("default", {name: work / name for name in EXPERTS}, data, out, config)


def scores(model: str | Path, texts: dict[str, list[str]]) -> dict[str, Score]:
    loaded = load(model)
    return {kind: score_texts(loaded, found) for kind, found in texts.items()}


def line(name: str, found: dict[str, float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.3f}" for value in found.values()) + " |"


def bits(found: dict[str, Score]) -> dict[str, float]:
    """By kind, and of all as one text."""
    total = sum(found.values(), Score())
    return {**{k: s.bits_per_byte for k, s in found.items()}, "all": total.bits_per_byte}


def draw(table: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 4), layout="constrained")).add_subplot()
    width = 0.8 / len(table)
    for number, (name, found) in enumerate(table.items()):
        places = [at + number * width for at in range(len(found))]
        axes.bar(places, list(found.values()), width, label=name)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(4)], [*KINDS.values(), "all"])
    axes.set_ylabel("bits per byte, less is better")
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/anymoe"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--gate-files", type=int, default=48, help="of a kind")
    parser.add_argument("--files", type=int, default=8, help="held-out files of a kind")
    options = parser.parse_args()
    work: Path = options.work
    weights = embedded_model() / "model.safetensors"
    before = hashlib.sha256(weights.read_bytes()).hexdigest()
    texts = {
        kind: [p.read_text("utf-8") for p in first_files(work / "heldout" / kind, options.files)]
        for kind in KINDS
    }
    found: dict[str, dict[str, Score]] = {"base": scores("default", texts)}
    found |= {name: scores(work / name, texts) for name in EXPERTS}
    found["by hand"] = {kind: found[kind][kind] for kind in KINDS}
    for gate, top_k in (("token", 1), ("token", 2), ("mean", 1)):
        report = train_gates(work, gate, top_k, options)
        print(json.dumps({**asdict(report), "out": report.out.name}), flush=True)
        found[f"mixture, {gate}, top {top_k}"] = scores(report.out, texts)
    table = {name: bits(of_kind) for name, of_kind in found.items()}
    for name, of_kind in table.items():
        print(line(name, of_kind))
    if options.plot is not None:
        draw(table, options.plot)
    if hashlib.sha256(weights.read_bytes()).hexdigest() != before:
        raise ValueError("the base's weights have changed")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
