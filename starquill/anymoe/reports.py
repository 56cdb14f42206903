"""What training leaves to read: a line for people, JSON, CSV, and a picture of the losses."""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starquill.anymoe.config import TrainReport

log = logging.getLogger("starquill")

_COLUMNS = ("epoch", "loss", "held_out_loss", "accuracy", "token_accuracy")
History = Sequence[dict[str, float]]


def write_report(report: TrainReport, history: History, folder: Path) -> None:
    """`anymoe-report.json`, `anymoe-loss.csv`, and with matplotlib `anymoe-loss.png`."""
    value = {**asdict(report), "out": report.out.name}
    text = json.dumps(_without_nan(value), indent=2, ensure_ascii=False)
    (folder / "anymoe-report.json").write_text(f"{text}\n", encoding="utf-8")
    with (folder / "anymoe-loss.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS)
        writer.writeheader()
        writer.writerows(history)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning("no picture of the losses without matplotlib: pip install matplotlib")
        return
    figure = Figure(figsize=(8, 4), layout="constrained")
    losses, shares = figure.subplots(1, 2)
    for axes, names in ((losses, _COLUMNS[1:3]), (shares, _COLUMNS[3:])):
        for name in names:
            points = [(entry["epoch"], entry[name]) for entry in history if name in entry]
            if points:
                axes.plot(*zip(*points, strict=True), label=name.replace("_", " "))
        axes.axvline(report.best_epoch, color="grey", lw=0.8, ls=":")
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        if axes.get_lines()[:-1]:  # without held-out rows nothing was right or wrong
            axes.legend()
    shares.set_ylim(0, 1.02)
    figure.savefig(folder / "anymoe-loss.png", dpi=110)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value


def describe(report: TrainReport) -> str:
    """What the command line prints."""
    seen = f"{report.held_out} held-out rows" if report.held_out else "the rows trained on"
    width = max(map(len, report.experts))
    lines = [
        f"{report.out}: {len(report.experts)} experts in {len(report.layers)} layers, "
        f"{report.epochs} epochs (best: {report.best_epoch})",
        f"of {seen}: {report.accuracy:.1%} right (a layer's worst {min(report.by_layer):.1%}), "
        f"{report.token_accuracy:.1%} of tokens",
        f"{'expert':<{width}}   right  tokens   rows given to {', '.join(report.experts)}",
    ]
    for name, right, share, given in zip(
        report.experts, report.by_expert, report.shares, report.confusion, strict=True
    ):
        shown = "    -" if math.isnan(right) else f"{right:6.1%}"
        lines.append(f"{name:<{width}}  {shown}  {share:6.1%}   {' '.join(map(str, given))}")
    return "\n".join(lines)
