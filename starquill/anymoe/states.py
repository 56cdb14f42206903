"""What gates see: the inputs of the MLPs, computed once and kept in a mapped file.

The base model runs layer by layer. In layers that become mixtures a row goes through its own
expert's MLP, as it will once the gates are right, so that later layers learn from what they will
see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from starquill.anymoe.experts import Base, Expert, mlp_of
from starquill.errors import NumericsError
from starquill.models.spec import StepBatch
from starquill.nn.cache import KvCache, blocks_for
from starquill.nn.residual import residual

_CHUNK = 512
_AHEAD = 32  # tokens by which an expert is judged at a token, by the loss
_FEW = 1 << 27  # values; half a gigabyte as float32
_KEPT = np.float16  # of what a norm puts out; half of float32's disk and reading

Keep = Callable[[int, int, Tensor], None]  # number among the chosen layers, row, [T, D]


def nothing() -> None:
    """For who need not know that a layer is done."""


@dataclass(frozen=True, eq=False)
class States:
    """MLP inputs `[L, N, D]` of all tokens, row by row."""

    hidden: np.ndarray
    lengths: tuple[int, ...]

    @cached_property
    def ends(self) -> list[int]:
        return np.cumsum(self.lengths).tolist()

    def span(self, row: int) -> slice:
        return slice(self.ends[row] - self.lengths[row], self.ends[row])

    def of(self, rows: Sequence[int]) -> Tensor:
        """`[L, n, D]` float32: the tokens of `rows`, one row behind the other."""
        if self._whole is not None:
            return torch.cat([self._whole[:, self.span(row)] for row in rows], dim=1)
        parts = [self.hidden[:, self.span(row)] for row in rows]
        return torch.from_numpy(np.concatenate(parts, axis=1)).float()

    @cached_property
    def _whole(self) -> Tensor | None:
        """All of them, where they are few: an epoch then converts nothing."""
        if self.hidden.size > _FEW:
            return None
        return torch.from_numpy(np.array(self.hidden, dtype=np.float32))

    def means(self) -> Tensor:
        """`[L, rows, D]`: of each row the mean over its tokens; nothing pads them."""
        found = [self.of([row]).mean(1, keepdim=True) for row in range(len(self.lengths))]
        return torch.cat(found, dim=1)


def state_shape(
    base: Base, layers: Sequence[int], texts: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    return (len(layers), sum(map(len, texts)), base.config.hidden_size)


def open_states(path: Path, shape: tuple[int, ...], texts: Sequence[Sequence[int]]) -> States:
    """States that were written before."""
    return States(np.memmap(path, _KEPT, "r", shape=shape), tuple(map(len, texts)))


@dataclass(frozen=True, eq=False)
class Pass:
    """The base model with `experts` in `layers`, over rows of token ids."""

    base: Base
    experts: Sequence[Expert]
    layers: Sequence[int]
    texts: Sequence[Sequence[int]]

    @torch.inference_mode()
    def run(
        self,
        choice: Sequence[int],
        keep: Keep | None = None,
        on_layer: Callable[[], None] = nothing,
    ) -> list[Tensor]:
        """Final hidden states `[1, T, D]` of each row with its expert of `choice`.

        In memory are the hidden states of all tokens, and one layer of the experts.
        """
        model, config = self.base.model, self.base.config
        ids = [torch.tensor([list(text)]) for text in self.texts]
        states = [model.embed(i).float() for i in ids]
        for number, layer in enumerate(model.model.layers):
            mlps: dict[int, nn.Module] = {}
            if number in self.layers:
                mlps = {e: mlp_of(self.experts[e], config, number) for e in sorted(set(choice))}
            for row, text in enumerate(ids):
                mlp = mlps.get(choice[row], layer.mlp)
                seen = self._advance(layer, mlp, text, states[row])
                if keep is not None and number in self.layers:
                    keep(self.layers.index(number), row, seen)
            on_layer()
        return states

    def _advance(self, layer: Any, mlp: nn.Module, ids: Tensor, x: Tensor) -> Tensor:
        """Replace `x` by what `layer` makes of it; returns what the MLP was given `[T, D]`."""
        model, shape = self.base.model, replace(self.base.config.cache_shape(), layers=1)
        cache = KvCache(shape, torch.float32, blocks_for(ids.shape[1]), shared=True)
        place, seen = cache.place(ids.shape[1]), []
        for new, part in zip(ids.split(_CHUNK, 1), x.split(_CHUNK, 1), strict=True):
            step = model.step(StepBatch.after(place, new, cache))
            attended = residual(part, layer.self_attn(layer.input_layernorm(part), step))
            given = layer.post_attention_layernorm(attended)
            part.copy_(residual(attended, mlp(given, None)))
            seen.append(given[0])
            place.length += new.shape[1]
        return torch.cat(seen)

    @torch.inference_mode()
    def losses(self, choice: Sequence[int], on_layer: Callable[[], None] = nothing) -> list[Tensor]:
        """Of each row -log p `[T - 1]` of every token but the first."""
        model, found = self.base.model, []
        for text, hidden in zip(self.texts, self.run(choice, None, on_layer), strict=True):
            parts, targets = [], torch.tensor(list(text))[1:]
            for start in range(0, len(targets), _CHUNK):
                wanted = targets[start : start + _CHUNK]
                logits = model.logits(model.finish(hidden[:, start : start + len(wanted)]))[0]
                parts.append(F.cross_entropy(logits, wanted, reduction="none"))
            found.append(torch.cat(parts))
        return found


def write_states(
    run: Pass, choice: Sequence[int], path: Path, on_layer: Callable[[], None] = nothing
) -> States:
    """Compute the states of all rows into the file `path`, which is complete or not there."""
    shape = state_shape(run.base, run.layers, run.texts)
    unfinished = path.with_suffix(".new")
    states = States(np.memmap(unfinished, _KEPT, "w+", shape=shape), tuple(map(len, run.texts)))

    def keep(layer: int, row: int, seen: Tensor) -> None:
        kept = seen.to(torch.float16)
        if not bool(kept.isfinite().all()):
            raise NumericsError(
                f"hidden states of layer {run.layers[layer]} are not finite for row {row} with "
                f"expert {run.experts[choice[row]].name}: its weights are damaged, or float16 "
                "cannot hold what its norm puts out"
            )
        states.hidden[layer, states.span(row)] = kept.numpy()

    run.run(choice, keep, on_layer)
    assert isinstance(states.hidden, np.memmap)
    states.hidden.flush()
    unfinished.replace(path)
    return open_states(path, shape, run.texts)


def costs(losses: Sequence[Sequence[Tensor]]) -> tuple[list[int], list[Tensor]]:
    """From -log p by expert and row: the best expert of each row, and by row `[T, E]`.

    The latter is how much worse an expert does than the best on the tokens to come, a mean over a
    window of them; the last token has none to come and counts for nothing.
    """
    best, found = [], []
    for by_expert in zip(*losses, strict=True):
        table = torch.stack(list(by_expert), dim=1)  # [T - 1, E]
        if not bool(table.isfinite().all()):
            raise NumericsError("an expert's loss on a row is not finite: its weights are damaged")
        best.append(int(table.mean(0).argmin()))
        total = torch.cat([table.new_zeros(1, table.shape[1]), table.cumsum(0)])
        start = torch.arange(len(table))
        end = (start + _AHEAD).clamp(max=len(table))
        ahead = (total[end] - total[start]) / (end - start)[:, None]
        regret = ahead - ahead.min(1, keepdim=True).values
        found.append(torch.cat([regret, regret.new_zeros(1, table.shape[1])]))
    return best, found
