"""LoRA (arXiv 2106.09685): what adapters add to a `Linear`, chosen for each row of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdapterMix:
    """Which adapters act on which row.

    `slots` are the K adapters that act on any; `scales` `[B, K]` is how strongly on each row, 0 for
    not at all. For X-LoRA `[B, T, M, K]`: for each token and each `Linear` that carries adapters.
    """

    slots: tuple[int, ...]
    scales: Tensor

    def of(self, index: int) -> Tensor:
        """The scales for `Linear` number `index`: `[B, 1, K]` or `[B, T, K]`."""
        return self.scales[:, None] if self.scales.dim() == 2 else self.scales[:, :, index]


@dataclass(frozen=True, eq=False)
class LoraPart:
    """What one adapter adds to one `Linear`: `x Aᵀ Bᵀ`; `a` `[R, in]`, `b` `[out, R]`, scaled."""

    a: Tensor
    b: Tensor


@dataclass(eq=False)
class LoraBank:
    """The adapters that one `Linear` carries, by slot; it is number `index` of all that do."""

    index: int
    parts: dict[int, LoraPart] = field(default_factory=dict)

    def add_to(self, y: Tensor, x: Tensor, mix: AdapterMix) -> Tensor:
        """`y` `[B, T, out]` for `x` `[B, T, in]`, with what the adapters of `mix` add."""
        scales = mix.of(self.index)
        for place, slot in enumerate(mix.slots):
            if part := self.parts.get(slot):
                y = y + (x @ part.a.T) @ part.b.T * scales[..., place, None]
        return y

    def add_rows_to(self, y: Tensor, ids: Tensor, mix: AdapterMix) -> Tensor:
        """The same where x is one-hot, as in an embedding: `y` `[B, T, D]` for `ids` `[B, T]`."""
        scales = mix.of(self.index)
        for place, slot in enumerate(mix.slots):
            if part := self.parts.get(slot):
                y = y + part.a.T[ids] @ part.b.T * scales[..., place, None]
        return y
