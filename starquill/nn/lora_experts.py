"""LoRA on the experts of a mixture: what adapters add to the rows that each expert works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from starquill.kernels.lora import LoraTerm, add_packed, pack, takes
from starquill.kernels.native import as_rows
from starquill.nn.lora import AdapterMix, LoraPart, add_plainly


@dataclass(frozen=True)
class Run:
    """Rows `first` to `first + count` of a step's: one expert's, of one row of the batch.

    `acting` are the adapters that act there: their slot, how strongly, and where that stands in
    `AdapterMix.scales`.
    """

    expert: int
    first: int
    count: int
    acting: tuple[tuple[int, float, int], ...]


def runs_of(experts: Tensor, rows: Tensor, mix: AdapterMix) -> tuple[Run, ...]:
    """The runs on which any adapter acts.

    `experts` and `rows` `[N]` are each row's expert and its row of the batch, in the order of
    experts, and of `rows` within one.
    """
    batch, slots = mix.scales.shape
    acting = [
        tuple(
            (slot, share, row * slots + place)
            for place, (slot, share) in enumerate(zip(mix.slots, shares, strict=True))
            if share
        )
        for row, shares in enumerate(mix.rows)
    ]
    keys, counts = (experts * batch + rows).unique_consecutive(return_counts=True)
    runs, first = [], 0
    for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
        if adapters := acting[key % batch]:
            runs.append(Run(key // batch, first, count, adapters))
        first += count
    return tuple(runs)


@dataclass(eq=False)
class ExpertBank:
    """The adapters that a stack of experts carries: by slot, and then by expert.

    An adapter may leave experts out. `parts` is only replaced, as a `LoraBank`'s.
    """

    parts: dict[int, Mapping[int, LoraPart]] = field(default_factory=dict)

    def add_to(
        self, y: Tensor, x: Tensor, runs: Sequence[Run], scales: Tensor, *, one: bool
    ) -> Tensor:
        """`y` `[N, out]` for `x` `[N, in]`, with what adapters add; `y` is without biases.

        Rows come out the same in any company; those of no run stay as they are. `one` says that
        they are single tokens of several sequences. Writes into `y`.
        """
        parts, terms, wholes = self.parts, [], []
        weights = as_rows(scales)
        for run in runs:
            for slot, share, at in run.acting:
                part = parts.get(slot, _NONE).get(run.expert)
                if part is None:
                    continue
                if part.whole is not None:
                    wholes.append((run, share, part))
                else:
                    terms.append(_term(run, part, weights, at))
        base = y.clone() if wholes else y
        if terms and takes(weights, terms):
            rows = as_rows(y)
            add_packed(rows, as_rows(x), None, pack(terms))
            y = rows if y.dtype is torch.float32 else rows.to(y.dtype)
        elif terms:
            between = 1 if one else 0
            add_plainly(y.unsqueeze(between), x.unsqueeze(between), None, terms)
        for run, share, part in wholes:
            here = slice(run.first, run.first + run.count)
            y[here] += share * (_whole(part, x[here], one=one) - base[here])
        return y


_NONE: Mapping[int, LoraPart] = {}


def _term(run: Run, part: LoraPart, weights: Tensor, at: int) -> LoraTerm:
    own = (part.a, part.b, part.scale, part.gain, part.shift)
    return LoraTerm(run.first, run.count, *own, weights, at)


def _whole(part: LoraPart, x: Tensor, *, one: bool) -> Tensor:
    """`[N, in] -> [N, out]` by another weight; a bias of its own comes in place of the stack's."""
    assert part.whole is not None
    weight, _ = part.whole
    between = 1 if one else 0  # the shape says which way a product goes
    y = weight.matmul(x.unsqueeze(between)).squeeze(between)
    return y if part.shift is None else y + part.shift
