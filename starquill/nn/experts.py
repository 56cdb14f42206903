"""Experts as stacked weights: tokens are grouped by expert, and only those that are chosen work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from starquill.kernels import elementwise
from starquill.kernels.elementwise import ACTS
from starquill.kernels.experts import ExpertMatrix, weighted
from starquill.nn.activation import ACTIVATIONS
from starquill.nn.disk import LayerExperts
from starquill.nn.linear import Linear
from starquill.nn.lora import AdapterMix
from starquill.nn.lora_experts import ExpertBank, Run, runs_of
from starquill.nn.router import Router, Routes
from starquill.quant.affine import AffineWeight
from starquill.quant.weight import DenseWeight, Weight


@dataclass(frozen=True)
class Groups:
    """N rows in the order of their experts: whose each is `[N]`, and how many each has `[E]`.

    `one` says that they are single tokens of several sequences, each of which must come out the
    same in any company. `mix` says which adapters act on which of `batch` `[N]`, each row's row of
    the batch.
    """

    experts: Tensor
    counts: Tensor
    one: bool
    batch: Tensor | None = None
    mix: AdapterMix | None = None

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Where adapters act. Those of X-LoRA never act on experts."""
        if self.mix is None or self.batch is None or self.mix.scales.dim() != 2:
            return ()
        return runs_of(self.experts, self.batch, self.mix)

    def each(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`function` of every row of `x` `[N, I]`, in a shape that tells what the rows are."""
        between = 1 if self.one else 0
        return function(x.unsqueeze(between)).squeeze(between)


class ExpertLinear(nn.Module):
    """One `Linear` of each of E experts, and what adapters add.

    Weight `[E, out, in]`, bias `[E, out]` or None.
    """

    weight: Weight
    bias: nn.Parameter | None
    lora: ExpertBank | None = None

    def __init__(self, experts: int, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.weight = DenseWeight(torch.empty(experts, out_features, in_features, device="meta"))
        empty = torch.empty(experts, out_features, device="meta")
        self.bias = nn.Parameter(empty, requires_grad=False) if bias else None

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """`[N, in] -> [N, out]`."""
        y = self.weight.matmul_grouped(x, groups.counts, one=groups.one)
        if groups.mix is not None and self.lora is not None:
            y = self.lora.add_to(y, x, groups.runs, groups.mix.scales, one=groups.one)
        bias = self._parameters.get("bias")
        return y if bias is None else y + bias[groups.experts]

    def matrix(self) -> ExpertMatrix | None:
        """For the native operation over all experts; None where the weight is no such matrix."""
        kernel = self.weight.rounding if isinstance(self.weight, AffineWeight) else None
        return None if kernel is None else ExpertMatrix(kernel, self._parameters.get("bias"))


# Of each expert: a gate's matrices or None, those that lead to its inner width, and back.
Stacks = tuple[ExpertLinear | None, ExpertLinear, ExpertLinear]


@dataclass(frozen=True, eq=False)
class OneExpert:
    """The `Linear` of one expert in a stack: weight `[out, in]`, bias `[out]` or None."""

    stack: ExpertLinear
    expert: int

    @property
    def weight(self) -> Weight:
        weight = self.stack.weight
        assert isinstance(weight, DenseWeight | AffineWeight), weight.scheme
        return weight[self.expert]

    @property
    def bias(self) -> Tensor | None:
        return None if self.stack.bias is None else self.stack.bias.data[self.expert]


@dataclass(frozen=True)
class ExpertShape:
    """E experts from D to D by way of F, with biases or without."""

    experts: int
    hidden_size: int
    intermediate_size: int
    hidden_act: str
    bias: bool = False


class GatedExperts(nn.Module):
    """Each is `down(act(gate x) · up x)`. `disk` fetches those that stay there."""

    disk: LayerExperts | None = None

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        count, width, inner = shape.experts, shape.hidden_size, shape.intermediate_size
        self.gate_proj = ExpertLinear(count, width, inner, shape.bias)
        self.up_proj = ExpertLinear(count, width, inner, shape.bias)
        self.down_proj = ExpertLinear(count, inner, width, shape.bias)
        self.act = ACTIVATIONS[shape.hidden_act]
        self.act_name = shape.hidden_act

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        if self.disk is not None:
            self.disk.fetch(groups.counts)
        gate = groups.each(self.act, self.gate_proj(x, groups))
        return self.down_proj(gate * self.up_proj(x, groups), groups)

    @property
    def stacks(self) -> Stacks:
        return (self.gate_proj, self.up_proj, self.down_proj)


class PlainExperts(nn.Module):
    """Each is `c_proj(act(c_fc x))`. `disk` fetches those that stay there."""

    disk: LayerExperts | None = None

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        count, width, inner = shape.experts, shape.hidden_size, shape.intermediate_size
        self.c_fc = ExpertLinear(count, width, inner, shape.bias)
        self.c_proj = ExpertLinear(count, inner, width, shape.bias)
        self.act = ACTIVATIONS[shape.hidden_act]
        self.act_name = shape.hidden_act

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        if self.disk is not None:
            self.disk.fetch(groups.counts)
        return self.c_proj(groups.each(self.act, self.c_fc(x, groups)), groups)

    @property
    def stacks(self) -> Stacks:
        return (None, self.c_fc, self.c_proj)


class DeltaLinear(nn.Module):
    """One `Linear` that all experts share, and what each but the first adds: `x Aᵀ Bᵀ`."""

    def __init__(self, shape: ExpertShape, in_features: int, out_features: int, rank: int) -> None:
        super().__init__()
        self.base = Linear(in_features, out_features, shape.bias)
        self.a = ExpertLinear(shape.experts - 1, in_features, rank, bias=False)
        self.b = ExpertLinear(shape.experts - 1, rank, out_features, bias=False)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        y = groups.each(self.base, x)
        own = int(groups.counts[0])
        if own == len(x):
            return y
        others = Groups(groups.experts[own:] - 1, groups.counts[1:], groups.one)
        added = self.b(self.a(x[own:], others), others)
        return torch.cat([y[:own], y[own:] + added])


class DeltaExperts(nn.Module):
    """Each is `c_proj(act(c_fc x))`, and differs from the first by a LoRA."""

    def __init__(self, shape: ExpertShape, rank: int) -> None:
        super().__init__()
        self.c_fc = DeltaLinear(shape, shape.hidden_size, shape.intermediate_size, rank)
        self.c_proj = DeltaLinear(shape, shape.intermediate_size, shape.hidden_size, rank)
        self.act = ACTIVATIONS[shape.hidden_act]

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        return self.c_proj(groups.each(self.act, self.c_fc(x, groups)), groups)


Experts = GatedExperts | PlainExperts | DeltaExperts


class SparseMlp(nn.Module):
    """A mixture: `gate` scores the experts, `route` chooses, the chosen ones work."""

    def __init__(self, gate: Linear, experts: Experts, route: Router) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.route = route

    def forward(self, x: Tensor, mix: AdapterMix | None) -> Tensor:
        routes = self.route(self.gate(x, mix))
        return mixed(x, routes, self.gate.weight.shape[0], self.experts, mix)


class PooledMlp(nn.Module):
    """A mixture whose gate chooses once for a sequence, by the mean of its prompt's tokens.

    `layer` is its number in the model. Parts are those of `SparseMlp`, under the same names.
    """

    def __init__(self, inner: SparseMlp, layer: int) -> None:
        super().__init__()
        self.gate = inner.gate
        self.experts = inner.experts
        self.route = inner.route
        self.layer = layer

    def choose(self, mean: Tensor, mix: AdapterMix | None) -> Routes:
        """`[B, D] -> [B, A]`; each row comes out the same in any company."""
        routes = self.route(self.gate(mean[:, None], mix))
        return Routes(routes.experts[:, 0], routes.weights[:, 0])

    def forward(self, x: Tensor, mix: AdapterMix | None, routes: Routes | None = None) -> Tensor:
        """`[B, T, D] -> [B, T, D]`. Without `routes` the rows are whole prompts, and choose."""
        if routes is None:
            found = self.choose(mean_of(x.shape[1], [x]).to(x.dtype), mix)
            routes = Routes(found.experts[:, None], found.weights[:, None]).of_layer(0, x)
        else:
            routes = routes.of_layer(self.layer, x)
        return mixed(x, routes, self.gate.weight.shape[0], self.experts)


def mean_of(tokens: int, pieces: Iterable[Tensor]) -> Tensor:
    """`[B, D]` float32: the mean over all `tokens` of `pieces` `[B, t, D]`.

    Summed in float64, so that it hardly matters how they were cut.
    """
    total: Tensor = sum(piece.double().sum(1) for piece in pieces)  # type: ignore[assignment]
    return (total / tokens).float()


def mixed(
    x: Tensor,
    routes: Routes,
    count: int,
    experts: Callable[[Tensor, Groups], Tensor],
    mix: AdapterMix | None = None,
) -> Tensor:
    """`[B, T, D] -> [B, T, D]`: for each token the weighted sum of what its experts make of it.

    `count` is how many there are; `mix` says which adapters act on them. Each row of the batch goes
    the way that its own adapters decide, so that it does not depend on who else is there.
    """
    if not isinstance(experts, GatedExperts | PlainExperts):
        return _one_by_one(x, routes, count, experts, mix)
    stacks, adapted = _native(x, experts), _adapted_rows(experts, mix)
    if stacks is None or len(adapted) == len(x):
        return _one_by_one(x, routes, count, experts, mix)
    if not adapted:
        return _at_once(x, routes, count, experts, stacks)
    assert mix is not None
    others, own = sorted(set(range(len(x))) - set(adapted)), mix.scales[adapted]
    y = torch.empty_like(x)
    y[adapted] = _one_by_one(
        x[adapted], routes.of(adapted), count, experts, AdapterMix(mix.slots, own)
    )
    y[others] = _at_once(x[others], routes.of(others), count, experts, stacks)
    return y


def _adapted_rows(experts: GatedExperts | PlainExperts, mix: AdapterMix | None) -> list[int]:
    """The rows of the batch on whose experts an adapter acts. X-LoRA's never do."""
    if mix is None or mix.scales.dim() != 2:
        return []
    banks = [layer.lora for layer in experts.stacks if layer is not None and layer.lora is not None]
    slots = {slot for bank in banks for slot in bank.parts}
    return [
        row
        for row, shares in enumerate(mix.rows)
        if any(share and slot in slots for slot, share in zip(mix.slots, shares, strict=True))
    ]


def _one_by_one(
    x: Tensor,
    routes: Routes,
    count: int,
    experts: Callable[[Tensor, Groups], Tensor],
    mix: AdapterMix | None,
) -> Tensor:
    """Each expert's own rows, with what adapters add. A token's sum goes by rank."""
    top = routes.experts.shape[-1]
    chosen = routes.experts.flatten()  # [N·A]
    order = chosen.argsort(stable=True)
    tokens, length = order // top, x.shape[-2]
    batch = None if mix is None else tokens // length
    counts = chosen.bincount(minlength=count)
    groups = Groups(chosen[order], counts, length == 1, batch, mix)
    made = experts(x.flatten(0, -2)[tokens], groups).float()
    y = torch.empty_like(made).index_copy_(0, order, made).view(*x.shape[:-1], top, -1)
    y = y * routes.weights[..., None]
    # One sum after the other: torch's own order of a sum may depend on how many rows there are.
    total = y[..., 0, :]
    for rank in range(1, top):
        total = total + y[..., rank, :]
    return total.to(x.dtype)


NativeStacks = tuple[ExpertMatrix | None, ExpertMatrix, ExpertMatrix]


def _native(x: Tensor, experts: GatedExperts | PlainExperts) -> NativeStacks | None:
    """What the operation over all experts takes; None for other weights or another dtype.

    How many tokens there are does not matter: a row has the same sum in any company.
    """
    if experts.act_name not in ACTS or not elementwise.takes(x):
        return None
    gate, *others = experts.stacks
    first = None if gate is None else gate.matrix()
    up, down = (layer.matrix() for layer in others)
    if up is None or down is None or (gate is not None and first is None):
        return None
    return first, up, down


def _at_once(
    x: Tensor,
    routes: Routes,
    count: int,
    experts: GatedExperts | PlainExperts,
    stacks: NativeStacks,
) -> Tensor:
    """All experts in one native operation, without adapters.

    Of one token's sum the order is by rank, of a piece's by the experts' numbers.
    """
    if experts.disk is not None:
        experts.disk.fetch(routes.experts.flatten().bincount(minlength=count))
    return weighted(x, (routes.experts, routes.weights), stacks, count, experts.act_name)
