"""Train the small StarCoder2 model that ships inside the package, on a CPU, in a fixed time.

Steps, each a sub-command (``all`` runs them in this order, so that one command reproduces the
model):

  corpus     download and filter permissively licensed Python packages (tools/tiny_corpus.py)
  tokenizer  learn the 5120-token byte-level BPE (tools/tiny_tokenizer.py)
  rows       turn the corpus into shuffled rows of tokens, half of them fill-in-the-middle
  train      train for --minutes; the learning rate follows the share of that time that is gone
             and always ends at zero.  --resume goes on from the last checkpoint.
  check      compare the trained weights' logits with transformers' own implementation

Example::

    python tools/train_tiny.py all --work build/tiny --out build/tiny/out --minutes 90

The model is a standard ``Starcoder2ForCausalLM`` (6 layers of 256, 5.64 M parameters, tied
embeddings, a sliding window of 512).  The forward pass below is a compact equivalent of
transformers' one, made for a CPU: attention works on blocks that never leave the sliding window
(half as fast again as with torch's own attention), and the loss never holds the logits of more
than a slice of tokens.  It computes in bfloat16 while the optimizers keep float32 weights.

Used: Python 3.11, torch 2.13.0 (CPU), tokenizers, numpy, safetensors, matplotlib, and for
``check`` transformers 5.24.0.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_corpus import build_corpus, read_documents
from tiny_model import CONFIG, Model, TiedLoss
from tiny_tokenizer import SampleSettings, build_rows, train_tokenizer
from torch import Tensor, nn

MAX_SHIPPED_BYTES = 12_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one training run."""

    work: Path
    out: Path
    snapshot: Path
    minutes: float = 90.0
    steps: int | None = None
    seed: int = 22
    threads: int = 2
    micro_rows: int = 4
    accumulate: int = 2
    muon_lr: float = 0.006
    adam_lr: float = 0.003
    weight_decay: float = 0.1
    warmup: float = 0.01
    stable: float = 0.30
    clip: float = 1.0
    heldout_rows: int = 64
    log_steps: int = 10
    checkpoint_s: float = 300.0
    evaluate_s: float = 600.0
    snapshot_s: float = 900.0


@dataclass
class Progress:
    """Where a run stands; saved in every checkpoint."""

    step: int = 0
    row: int = 0
    elapsed: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """One training run: model, optimizers, data and what is written on the way."""

    def __init__(self, settings: TrainSettings, samples: SampleSettings) -> None:
        """Set up the model and map the rows."""
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        self.settings = settings
        model = Model(samples.context)
        self.master = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
        self.model = model.to(torch.bfloat16)
        self.tables = model.tables(torch.bfloat16)
        self.rows = np.load(settings.work / "train.npy", mmap_mode="r")
        heldout = np.load(settings.work / "heldout.npy")
        chosen = np.random.default_rng(settings.seed).permutation(len(heldout))
        self.heldout = heldout[chosen[: settings.heldout_rows]]
        self.progress = Progress()
        self.optimizers = self._optimizers()

    def _optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        s = self.settings
        matrices = [p for n, p in self.master.items() if p.ndim == 2 and "layers" in n]
        vectors = [p for p in self.master.values() if p.ndim == 1]
        muon = torch.optim.Muon(
            matrices,
            lr=s.muon_lr,
            weight_decay=s.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        groups = [
            {"params": [self.master["embed_tokens.weight"]], "weight_decay": 0.01},
            {"params": vectors, "weight_decay": 0.0},
        ]
        adam = torch.optim.AdamW(groups, lr=s.adam_lr, betas=(0.9, 0.95), fused=True)
        for group in [*muon.param_groups, *adam.param_groups]:
            group["peak"] = group["lr"]
        return muon, adam

    def gone(self) -> float:
        """Share of the budget that is used up: of the steps if they are set, else of the time."""
        s, p = self.settings, self.progress
        return p.elapsed / (60 * s.minutes) if s.steps is None else p.step / s.steps

    def rate(self) -> float:
        """Share of the peak learning rate that applies now: warm up, hold, fall to zero."""
        s, gone = self.settings, self.gone()
        return max(0.0, min(1.0, (gone + 1e-4) / s.warmup, (1 - gone) / (1 - s.stable)))

    def loss(self, rows: np.ndarray) -> Tensor:
        """Mean next-token loss of some rows."""
        ids = torch.from_numpy(rows.astype(np.int64))
        hidden = self.model(ids[:, :-1], *self.tables).flatten(0, 1)
        return TiedLoss.apply(hidden, self.model.embed_tokens.weight, ids[:, 1:].flatten(), 1024)

    def step(self) -> float:
        """Take one optimizer step; return its loss."""
        s, total = self.settings, 0.0
        for _ in range(s.accumulate):
            index = np.arange(self.progress.row, self.progress.row + s.micro_rows) % len(self.rows)
            loss = self.loss(self.rows[index])
            (loss / s.accumulate).backward()
            total += loss.item() / s.accumulate
            self.progress.row += s.micro_rows
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            self.master[name].grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.master.values(), s.clip, foreach=True)
        rate = self.rate()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
        self._publish()
        self.progress.step += 1
        return total

    def _publish(self) -> None:
        """Copy the float32 weights into the bfloat16 model that computes."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master[name])

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on the held-out rows."""
        parts = np.array_split(self.heldout, max(1, len(self.heldout) // self.settings.micro_rows))
        return sum(self.loss(part).item() * len(part) for part in parts) / len(self.heldout)

    def save(self) -> None:
        """Write a checkpoint, replacing the last one only when complete."""
        state = {
            "master": {name: p.detach() for name, p in self.master.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
            "rng": torch.get_rng_state(),
        }
        target = self.settings.work / "checkpoint.pt"
        torch.save(state, target.with_suffix(".new"))
        target.with_suffix(".new").replace(target)

    def resume(self) -> None:
        """Go on from the last checkpoint."""
        state = torch.load(self.settings.work / "checkpoint.pt", weights_only=True)
        with torch.no_grad():
            for name, parameter in self.master.items():
                parameter.copy_(state["master"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        torch.set_rng_state(state["rng"])
        self._publish()

    def run(self) -> None:
        """Train until the time is used up, then export."""
        s, p = self.settings, self.progress
        due = {"checkpoint": s.checkpoint_s, "evaluate": s.evaluate_s, "snapshot": s.snapshot_s}
        begun = time.monotonic() - p.elapsed
        last = dict.fromkeys(due, p.elapsed)
        losses: list[float] = []
        while self.gone() < 1:
            losses.append(self.step())
            p.elapsed = time.monotonic() - begun
            ready = {name for name, every in due.items() if p.elapsed - last[name] >= every}
            last.update(dict.fromkeys(ready, p.elapsed))
            if p.step % s.log_steps == 0 or "evaluate" in ready:
                self.log(losses, self.evaluate() if "evaluate" in ready else None)
                losses.clear()
            if "snapshot" in ready:
                self.export(s.snapshot)
            if "checkpoint" in ready:
                self.save()
        self.log(losses or [p.history[-1]["loss"]], self.evaluate())
        self.save()
        self.export(s.out)

    def log(self, losses: list[float], heldout: float | None) -> None:
        """Add a line to the history and to standard output."""
        p, s = self.progress, self.settings
        entry = {
            "step": p.step,
            "seconds": round(p.elapsed, 1),
            "tokens": p.row * self.model.context,
            "rate": round(self.rate(), 5),
            "loss": round(sum(losses) / len(losses), 4),
        }
        if heldout is not None:
            entry["heldout"] = round(heldout, 4)
        p.history.append(entry)
        if heldout is not None or p.step % (10 * s.log_steps) == 0:
            print(json.dumps(entry), flush=True)

    def export(self, folder: Path) -> None:
        """Write the model as a complete Hugging Face folder, replacing an older one at once."""
        new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        new.mkdir(parents=True)
        weights = {f"model.{n}": p.detach().bfloat16() for n, p in self.master.items()}
        save_file(weights, new / "model.safetensors", metadata={"format": "pt"})
        generation = {"bos_token_id": 0, "eos_token_id": 0, "_from_model_config": True}
        for name, value in (("config", CONFIG), ("generation_config", generation)):
            (new / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        for name in TOKENIZER_FILES:
            shutil.copy(self.settings.work / "tokenizer" / name, new / name)
        size = sum(path.stat().st_size for path in new.iterdir())
        if size > MAX_SHIPPED_BYTES:
            raise ValueError(f"the exported model takes {size} bytes")
        write_history(self.progress.history, new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def write_history(history: list[dict[str, float]], folder: Path) -> None:
    """Write loss.csv and loss.png."""
    from matplotlib.figure import Figure

    with (folder / "loss.csv").open("w", newline="", encoding="utf-8") as file:
        columns = ("step", "seconds", "tokens", "rate", "loss", "heldout")
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(history)
    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).add_subplot()
    axes.plot([e["step"] for e in history], [e["loss"] for e in history], lw=0.7, label="training")
    held = [e for e in history if "heldout" in e]
    axes.plot([e["step"] for e in held], [e["heldout"] for e in held], "o-", label="held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Tiny StarCoder2")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=110)


@torch.no_grad()
def check(folder: Path, context: int, tolerance: float = 1e-4) -> None:
    """Compare logits with transformers' for the exported weights, both in float32."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = Model(context)
    weights = load_file(folder / "model.safetensors")
    ours.load_state_dict({n.removeprefix("model."): w.float() for n, w in weights.items()})
    ids = torch.randint(0, CONFIG["vocab_size"], (2, context), generator=torch.manual_seed(0))
    logits = ours(ids, *ours.tables(torch.float32)) @ ours.embed_tokens.weight.T
    error = (logits - theirs(ids).logits).abs().max().item()
    print(f"largest difference from transformers' logits: {error:.2e}")
    if error > tolerance:
        raise ValueError("the logits differ")


def main() -> None:
    """Run the steps that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = ("corpus", "tokenizer", "rows", "train", "check")
    parser.add_argument("step", choices=("all", *steps), help="what to do")
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="work folder")
    parser.add_argument("--out", type=Path, help="where the model goes [WORK/out]")
    parser.add_argument("--minutes", type=float, default=90.0, help="training time [90]")
    parser.add_argument("--steps", type=int, help="train for so many steps instead of a time")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads [2]")
    parser.add_argument("--resume", action="store_true", help="go on from WORK/checkpoint.pt")
    options = parser.parse_args()
    work, samples = options.work, SampleSettings()
    out = options.out or work / "out"
    wanted = steps if options.step == "all" else (options.step,)
    work.mkdir(parents=True, exist_ok=True)
    if "corpus" in wanted:
        build_corpus(work)
    if "tokenizer" in wanted:
        train_tokenizer(read_documents(work / "train.jsonl"), work / "tokenizer")
    if "rows" in wanted:
        for name in ("heldout", "train"):
            tokenizer = work / "tokenizer" / "tokenizer.json"
            build_rows(work / f"{name}.jsonl", tokenizer, work / f"{name}.npy", samples)
    if "train" in wanted:
        settings = TrainSettings(
            work,
            out,
            work / "snapshot",
            minutes=options.minutes,
            steps=options.steps,
            threads=options.threads,
        )
        trainer = Trainer(settings, samples)
        if options.resume:
            trainer.resume()
        trainer.run()
    if "check" in wanted:
        check(out, samples.context)


if __name__ == "__main__":
    main()
