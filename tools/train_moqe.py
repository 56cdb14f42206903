"""Train the small mixture of experts that `benchmarks/moqe.py` quantizes, and its dense twin.

    python tools/train_tiny.py corpus rows ...     # the embedded model's data, see there
    python tools/train_moqe.py --work build/tiny --out benchmarks/data/moqe --minutes 36 --threads 2

The mixture is a `starcoder2_moe` of 4 layers of width 128, 8 experts of 192, two for each token;
the twin a `starcoder2` whose MLPs are 384 wide: as many weights work on a token. Both see the same
rows in the same order in turns, in one process. Their embeddings begin as the 128 main directions
of the embedded model's, so that half an hour is enough to learn something.

The mixture's loss has Switch's term for even load (arXiv 2101.03961). Computes in bfloat16 while
the optimizers keep float32 weights, like `tools/train_tiny.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tiny_model import BLOCK, CONFIG, BlockAttention, TiedLoss
from torch import Tensor, nn
from torch.nn import functional

EMBEDDED = Path(__file__).parents[1] / "starquill" / "assets" / "tiny"
HIDDEN, HEADS, KV_HEADS, LAYERS = 128, 4, 2, 4
HEAD = HIDDEN // HEADS
EXPERTS, TOP, INNER = 8, 2, 192
EVEN_LOAD = 0.01

Tables = tuple[tuple[Tensor, Tensor], list[tuple[int, int, int, Tensor]]]


def config(mixture: bool) -> dict[str, Any]:
    """`config.json` of the mixture or of its twin."""
    family = "starcoder2_moe" if mixture else "starcoder2"
    raw = {
        **CONFIG,
        "architectures": ["Starcoder2MoeForCausalLM" if mixture else "Starcoder2ForCausalLM"],
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER if mixture else TOP * INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    if mixture:
        raw |= {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP, "norm_topk_prob": True}
    return raw


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and a sliding window."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        (cos, sin), blocks = tables
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (
            y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin for y in (q, k)
        )
        q = (q * HEAD**-0.5).unflatten(1, (KV_HEADS, -1))
        out = BlockAttention.apply(q.contiguous(), k.contiguous(), v.contiguous(), blocks)
        return self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """An MLP, or one expert."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(HIDDEN, inner)
        self.c_proj = nn.Linear(inner, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class Mixture(nn.Module):
    """Two experts of eight for each token; `uneven` is Switch's measure of the last call's load."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Mlp(INNER) for _ in range(EXPERTS))
        self.uneven = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        shares = self.gate(flat).float().softmax(-1)
        weights, chosen = shares.topk(TOP, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        self.uneven = EXPERTS * (counts / chosen.numel() * shares.mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)
        rows = order // TOP
        parts = flat[rows].split(counts.tolist())
        made = torch.cat([expert(p) for expert, p in zip(self.experts, parts, strict=True)])
        made = made * weights.flatten()[order, None]
        return torch.zeros_like(flat).index_add(0, rows, made).view_as(x)


class Layer(nn.Module):
    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN, CONFIG["norm_epsilon"])
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN, CONFIG["norm_epsilon"])
        self.mlp = Mixture() if mixture else Mlp(TOP * INNER)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Without its head, which is the embedding; names below `model.`."""

    def __init__(self, mixture: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(Layer(mixture) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN, CONFIG["norm_epsilon"])
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("o_proj.weight", "c_proj.weight"))
                std = HIDDEN**-0.5 / (math.sqrt(2 * LAYERS) if residual else 1)
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        with torch.no_grad():
            self.embed_tokens.weight.copy_(main_directions())

    def forward(self, ids: Tensor, tables: Tables) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, tables)
        return self.norm(x)

    def uneven(self) -> Tensor:
        mixtures = [each.mlp for each in self.layers if isinstance(each.mlp, Mixture)]
        return torch.stack([mixture.uneven for mixture in mixtures]).sum()


def main_directions() -> Tensor:
    """The embedded model's embedding in as many dimensions as there are here."""
    whole = load_file(EMBEDDED / "model.safetensors")["model.embed_tokens.weight"].float()
    _, _, directions = torch.linalg.svd(whole, full_matrices=False)
    return whole @ directions[:HIDDEN].T


def tables(context: int, dtype: torch.dtype) -> Tables:
    """Rotary tables, and for each block of queries the keys in reach and their mask."""
    exponent = torch.arange(0, HEAD, 2).float() / HEAD
    angles = torch.outer(torch.arange(context).float(), CONFIG["rope_theta"] ** -exponent)
    angles = torch.cat([angles, angles], -1)
    positions, window, blocks = torch.arange(context), CONFIG["sliding_window"], []
    for start in range(0, context, BLOCK):
        end, first = min(start + BLOCK, context), max(0, start - window)
        distance = positions[start:end, None] - positions[None, first:end]
        hidden = (distance < 0) | (distance >= window)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        blocks.append((start, end, first, mask))
    return (angles.cos().to(dtype), angles.sin().to(dtype)), blocks


@dataclass(frozen=True)
class Rates:
    """Peak learning rates of matrices and of all else."""

    muon: float = 0.01
    adam: float = 0.004
    decay: float = 0.1
    clip: float = 1.0


class Student:
    """One of the two: the model that computes, its float32 weights, their optimizers."""

    def __init__(self, mixture: bool, rates: Rates) -> None:
        self.mixture, self.rates = mixture, rates
        model = Model(mixture)
        self.master = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
        self.model = model.to(torch.bfloat16)
        matrices = [p for n, p in self.master.items() if p.ndim == 2 and "layers" in n]
        others = [p for n, p in self.master.items() if p.ndim == 1 or "layers" not in n]
        self.optimizers = (
            torch.optim.Muon(
                matrices, lr=rates.muon, weight_decay=rates.decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, rates.adam, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )
        self.peaks = (rates.muon, rates.adam)

    def loss(self, rows: np.ndarray, made: Tables) -> Tensor:
        ids = torch.from_numpy(rows.astype(np.int64))
        hidden = self.model(ids[:, :-1], made).flatten(0, 1)
        return TiedLoss.apply(hidden, self.model.embed_tokens.weight, ids[:, 1:].flatten(), 1024)

    def learn(self, rows: np.ndarray, made: Tables, rate: float) -> float:
        loss = self.loss(rows, made)
        (loss + EVEN_LOAD * self.model.uneven() if self.mixture else loss).backward()
        for name, parameter in self.model.named_parameters():
            # An expert that saw no token has no gradient.
            given = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            self.master[name].grad = given.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_(self.master.values(), self.rates.clip, foreach=True)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * rate
            optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.master[name])
        return loss.item()

    @torch.no_grad()
    def evaluate(self, rows: np.ndarray, made: Tables) -> float:
        return float(np.mean([self.loss(row[None], made).item() for row in rows]))

    def export(self, folder: Path) -> None:
        """Write the folder that `starquill.load` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {f"model.{n}": p.detach().bfloat16() for n, p in self.master.items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(config(self.mixture), indent=2) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copyfile(EMBEDDED / name, folder / name)


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    rows = np.load(options.work / "train.npy", mmap_mode="r")
    heldout = np.load(options.work / "heldout.npy")[: options.heldout_rows]
    made = tables(rows.shape[1] - 1, torch.bfloat16)
    students = {name: Student(name == "mixture", Rates()) for name in ("mixture", "dense")}
    begun, step, shown = time.monotonic(), 0, dict.fromkeys(students, 0.0)
    while (gone := (time.monotonic() - begun) / (60 * options.minutes)) < 1:
        rate = max(0.0, min(1.0, (gone + 1e-3) / 0.02, (1 - gone) / 0.7))
        at = step * options.rows % (len(rows) - options.rows)
        for name, student in students.items():
            loss = student.learn(rows[at : at + options.rows], made, rate)
            shown[name] = loss if step == 0 else 0.95 * shown[name] + 0.05 * loss
        step += 1
        if step % 25 == 0:
            losses = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
            print(f"{gone:5.1%} step {step}: {losses}", flush=True)
    found = {"steps": step, "tokens": step * options.rows * (rows.shape[1] - 1)}
    for name, student in students.items():
        student.export(options.out / name)
        found[f"{name} held-out loss"] = round(student.evaluate(heldout, made), 4)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/tiny"), help="train_tiny's folder")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/data/moqe"))
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--rows", type=int, default=4, help="of a step")
    parser.add_argument("--heldout-rows", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=23)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
