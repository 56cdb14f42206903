"""LoRA (arXiv 2106.09685): what adapters add to a `Linear`, chosen for each row of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from starquill.kernels.lora import LoraTerm, add_packed, pack, takes
from starquill.kernels.native import as_rows
from starquill.kernels.program import keep
from starquill.quant.weight import DenseWeight, Weight


@dataclass(frozen=True, eq=False)
class AdapterMix:
    """Which adapters act on which row.

    `slots` are the K adapters that act on any; `scales` `[B, K]` is how strongly on each row, 0 for
    not at all. For X-LoRA `[B, T, M, K]`: for each token and each `Linear` that carries adapters.
    What a `Linear` prepares for a mix is kept in it: give the same one to as many steps as it fits.
    """

    slots: tuple[int, ...]
    scales: Tensor
    plans: dict[tuple[int, bool], _Plan] = field(default_factory=dict)

    @cached_property
    def rows(self) -> list[list[float]]:
        """`scales` of a mix that is the same for all tokens and layers, as numbers."""
        rows: list[list[float]] = self.scales.tolist()
        return rows


@dataclass(frozen=True, eq=False)
class LoraPart:
    """What one adapter adds to the `y = x Wᵀ + bias` of one `Linear`.

    `scale·(x Aᵀ) B + gain·(y - bias) + shift`, `a` `[R, in]`, `b` `[R, out]`, as stored; `gain` and
    `shift` `[out]` float32. Or `whole`, another weight and bias in place of its own.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    gain: Tensor | None = None
    shift: Tensor | None = None
    whole: tuple[Weight, Tensor | None] | None = None


@dataclass(frozen=True, eq=False)
class RowsPart:
    """What one adapter adds to the rows `y` of an `Embedding`: `scale·a[id] Bᵀ + gain·y`.

    `a` `[V, R]`, `b` `[D, R]`, as stored; `gain` `[D]` float32. Or `whole`, another weight.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    gain: Tensor | None = None
    whole: Weight | None = None


@dataclass(frozen=True, eq=False)
class _Plan:
    """What a mix does to one `Linear`, for `x` of one shape `[B, T]`.

    `parts` are what the bank had then: with others there the plan is void. They also keep alive
    what `packed` points to. `wholes` are the rows that have another weight, each with its share.
    """

    parts: dict[int, LoraPart]
    shape: tuple[int, int]
    terms: tuple[LoraTerm, ...]
    packed: bytes | None
    wholes: tuple[tuple[LoraPart, int, float], ...]


@dataclass(eq=False)
class LoraBank:
    """The adapters that one `Linear` carries, by slot; it is number `index` of all that do.

    `parts` is never changed, only replaced: a step that runs goes on with what it began with.
    """

    index: int
    parts: dict[int, LoraPart] = field(default_factory=dict)

    def add_to(self, y: Tensor, x: Tensor, mix: AdapterMix, bias: Tensor | None) -> Tensor:
        """`y` `[B, T, out]` for `x` `[B, T, in]`, with what the adapters of `mix` add.

        `bias` is in `y` already. Rows come out the same in any company; those that no adapter acts
        on stay as they are. Writes into `y`.
        """
        plan = self._plan(mix, (x.shape[0], x.shape[1]))
        base = y.clone() if plan.wholes else y
        if plan.packed is not None:
            keep(plan)
            rows = as_rows(y)
            add_packed(rows, as_rows(x), None if bias is None else as_rows(bias), plan.packed)
            y = rows if y.dtype is torch.float32 else rows.to(y.dtype)
        elif plan.terms:
            add_plainly(y, x, bias, plan.terms)
        for part, row, share in plan.wholes:
            assert part.whole is not None
            weight, own_bias = part.whole
            y[row] += share * (weight.matmul(x[row : row + 1], own_bias)[0] - base[row])
        return y

    def _plan(self, mix: AdapterMix, shape: tuple[int, int]) -> _Plan:
        # A step's plan and that of a prompt's piece, which the same mix may be for.
        key = (self.index, shape[1] == 1)
        parts, known = self.parts, mix.plans.get(key)
        if known is not None and known.parts is parts and known.shape == shape:
            return known
        if mix.scales.dim() == 2:
            terms, wholes = _same_for_all_tokens(parts, mix, shape), _wholes(parts, mix)
        else:
            terms, wholes = _by_token(parts, mix, self.index), ()
        able = bool(terms) and takes(mix.scales, terms)
        plan = _Plan(parts, shape, terms, pack(terms) if able else None, wholes)
        if mix.scales.dim() == 2:
            mix.plans[key] = plan
        return plan


def _term(part: LoraPart, first: int, rows: int, weights: Tensor, offset: int) -> LoraTerm:
    return LoraTerm(first, rows, part.a, part.b, part.scale, part.gain, part.shift, weights, offset)


def _same_for_all_tokens(
    parts: dict[int, LoraPart], mix: AdapterMix, shape: tuple[int, int]
) -> tuple[LoraTerm, ...]:
    """Rows that follow each other and have the same adapters are one piece of work."""
    tokens = shape[1]
    acting = [
        tuple(
            (slot, share)
            for slot, share in zip(mix.slots, row, strict=True)
            if share and slot in parts and parts[slot].whole is None
        )
        for row in mix.rows
    ]
    assert len(acting) == shape[0], f"a mix for {len(acting)} rows, and {shape[0]} are there"
    weights = torch.tensor([share for row in acting for _, share in row])
    terms, row, offset = [], 0, 0
    for adapters, same in groupby(acting):
        count = len(list(same))
        for place, (slot, _) in enumerate(adapters):
            terms.append(_term(parts[slot], row * tokens, count * tokens, weights, offset + place))
        row, offset = row + count, offset + count * len(adapters)
    return tuple(terms)


def _by_token(parts: dict[int, LoraPart], mix: AdapterMix, index: int) -> tuple[LoraTerm, ...]:
    """X-LoRA: every adapter acts on every token, with a weight of its own."""
    weights = as_rows(mix.scales[:, :, index]).flatten(0, 1)  # [B·T, K]
    rows, count = weights.shape
    terms = []
    for place, slot in enumerate(mix.slots):
        if part := parts.get(slot):
            assert part.whole is None, "X-LoRA does not weigh whole weights"
            terms.append(
                LoraTerm(0, rows, part.a, part.b, part.scale, part.gain, part.shift, weights,
                         place, count)
            )  # fmt: skip
    return tuple(terms)


def _wholes(parts: dict[int, LoraPart], mix: AdapterMix) -> tuple[tuple[LoraPart, int, float], ...]:
    return tuple(
        (parts[slot], row, share)
        for row, shares in enumerate(mix.rows)
        for slot, share in zip(mix.slots, shares, strict=True)
        if share and slot in parts and parts[slot].whole is not None
    )


def add_plainly(y: Tensor, x: Tensor, bias: Tensor | None, terms: Sequence[LoraTerm]) -> None:
    """In plain torch what the native kernel does; single tokens one by one, as it does."""
    flat_y, flat_x, base = y.flatten(0, 1), x.flatten(0, 1), y.flatten(0, 1).clone()
    for term, here in _pieces(terms, one=x.shape[1] == 1):
        own, weights = base[here].float(), term.row_weights()
        weights = weights[here.start - term.first : here.stop - term.first, None].to(y.device)
        added = torch.zeros_like(own)
        if term.a is not None and term.b is not None:
            added = term.scale * (flat_x[here].float() @ term.a.float().T @ term.b.float())
        if term.gain is not None:
            added = added + term.gain * (own if bias is None else own - bias)
        if term.shift is not None:
            added = added + term.shift
        flat_y[here] += torch.where(weights == 0, 0.0, weights * added).to(y.dtype)


def _pieces(terms: Sequence[LoraTerm], *, one: bool) -> Iterator[tuple[LoraTerm, slice]]:
    for term in terms:
        step = 1 if one else term.rows
        for start in range(term.first, term.first + term.rows, step):
            yield term, slice(start, start + step)


@dataclass(eq=False)
class RowsBank:
    """The adapters that one `Embedding` carries, by slot. `parts` is only replaced, as a bank's."""

    index: int
    parts: dict[int, RowsPart] = field(default_factory=dict)

    def add_to(self, y: Tensor, ids: Tensor, mix: AdapterMix) -> Tensor:
        """`y` `[B, T, D]` for `ids` `[B, T]`, with what the adapters of `mix` add."""
        if mix.scales.dim() != 2:
            return y  # X-LoRA acts on products alone
        parts, base = self.parts, y.clone()
        for row, shares in enumerate(mix.rows):
            for slot, share in zip(mix.slots, shares, strict=True):
                if share and (part := parts.get(slot)):
                    y[row] += (share * _rows_added(part, base[row], ids[row])).to(y.dtype)
        return y


def _rows_added(part: RowsPart, y: Tensor, ids: Tensor) -> Tensor:
    """`[T, D]` for one sequence's `y` `[T, D]`."""
    if part.whole is not None:
        return part.whole.rows(ids) - y
    added = torch.zeros_like(y, dtype=torch.float32)
    if part.a is not None and part.b is not None:
        # As single rows: each then comes out the same however many there are.
        picked = part.scale * part.a[ids].float()
        added = DenseWeight(part.b).matmul(picked[:, None])[:, 0].float()
    return added if part.gain is None else added + part.gain * y
