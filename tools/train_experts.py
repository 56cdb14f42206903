"""Fine-tune the embedded model's MLPs on C and on JavaScript: experts for docs/anymoe.md.

The code is what lies on this machine (C headers below /usr/include, npm's JavaScript); nothing of
it is kept but files to train gates on, to choose settings by and to measure with, split by file.
Python, which is what the model knows, comes from this repository: tests to train gates, the package
to choose and to measure.

    python tools/train_experts.py --out build/anymoe --steps 130

writes OUT/c and OUT/js (whole checkpoints, of which only the MLPs differ from the base's),
OUT/gates/KIND/*, OUT/choosing/KIND/* and OUT/heldout/KIND/*.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_model import Model

from starquill.checkpoint.hub import embedded_model
from starquill.checkpoint.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent
CONTEXT, ROWS = 256, 8


@dataclass(frozen=True)
class Kind:
    """A kind of code: where its files are, and whether an expert is made for it."""

    folders: tuple[Path, ...]
    suffix: str
    is_expert: bool = True


KINDS = {
    "c": Kind((Path("/usr/include"),), ".h"),
    "js": Kind((Path("/usr/lib/node_modules"), Path("/usr/share/nodejs")), ".js"),
    "base": Kind((ROOT / "tests", ROOT / "tools"), ".py", is_expert=False),
}


def texts_of(kind: Kind, seed: int) -> list[str]:
    """Files of a readable size, each once, in a shuffled order that `seed` settles."""
    found: dict[str, str] = {}
    for folder in kind.folders:
        for path in sorted(folder.rglob(f"*{kind.suffix}")):
            if not path.is_file() or not 1_000 <= path.stat().st_size <= 60_000:
                continue
            text = path.read_bytes().decode("utf-8", "replace")
            if "\ufffd" not in text and len(text) < 60 * text.count("\n"):  # no minified code
                found.setdefault(hashlib.sha256(text.encode()).hexdigest(), text)
    texts = [found[key] for key in sorted(found)]
    random.Random(seed).shuffle(texts)
    return texts


def write_texts(folder: Path, texts: list[str], suffix: str) -> None:
    """From the middle of each file: beginnings are licences."""
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        lines = text.splitlines(keepends=True)
        piece = "".join(lines[len(lines) // 4 :])[:4_000]
        (folder / f"{number:03}{suffix}").write_text(piece, encoding="utf-8")


def rows_of(texts: list[str], most: int) -> np.ndarray:
    """`[N, CONTEXT + 1]` token ids, files one behind the other."""
    tokenizer = load_tokenizer(embedded_model())
    assert tokenizer is not None
    ids: list[int] = []
    for text in texts:
        ids += [0, *tokenizer.encode(text)]
        if len(ids) >= most:
            break
    count = len(ids) // (CONTEXT + 1)
    return np.array(ids[: count * (CONTEXT + 1)]).reshape(count, CONTEXT + 1)


def fine_tune(rows: np.ndarray, steps: int, seed: int) -> dict[str, torch.Tensor]:
    """The embedded model's tensors with MLPs trained on `rows`; the rest stays to the bit."""
    torch.manual_seed(seed)
    weights = load_file(embedded_model() / "model.safetensors")
    model = Model(CONTEXT)
    model.load_state_dict({n.removeprefix("model."): w.float() for n, w in weights.items()})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".mlp." in name)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    tables, order = model.tables(torch.float32), np.random.default_rng(seed)
    begun = time.monotonic()
    for step in range(steps):
        rate = min(1.0, (step + 1) / 10) * (1 - step / steps)
        optimizer.param_groups[0]["lr"] = 2e-3 * rate
        ids = torch.from_numpy(rows[order.integers(0, len(rows), ROWS)])
        logits = model(ids[:, :-1], *tables) @ model.embed_tokens.weight.T
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            seconds = round(time.monotonic() - begun, 1)
            print(
                json.dumps({"step": step, "loss": round(loss.item(), 3), "s": seconds}), flush=True
            )
    new = {f"model.{n}": p.detach().bfloat16() for n, p in trained.items()}
    return {**weights, **new}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/anymoe"))
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--tokens", type=int, default=600_000, help="of a kind, to train on")
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True)
    for name, kind in KINDS.items():
        texts = texts_of(kind, options.seed)
        held, gates, choosing, rest = texts[:24], texts[24:72], texts[72:96], texts[96:]
        if not kind.is_expert:  # what the package is written in, beside tests
            package = texts_of(Kind((ROOT / "starquill",), kind.suffix), options.seed)
            held, choosing = package[:24], package[24:48]
        for folder, part in (("heldout", held), ("gates", gates), ("choosing", choosing)):
            write_texts(options.out / folder / name, part, kind.suffix)
        if not kind.is_expert:
            continue
        rows = rows_of(rest, options.tokens)
        print(f"{name}: {len(texts)} files, {rows.size} tokens to train on", flush=True)
        tensors = fine_tune(rows, options.steps, options.seed)
        folder = options.out / name
        shutil.copytree(embedded_model(), folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
