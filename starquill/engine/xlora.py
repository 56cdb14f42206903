"""X-LoRA's first pass: what weighs the adapters of a sequence's tokens, before they are computed.

It has keys and values of its own, in blocks of the same cache. Neither pass shares any with other
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from starquill.adapters.xlora import XLora
from starquill.engine.runner import Runner
from starquill.engine.seat import Seat
from starquill.errors import BadRequestError
from starquill.nn.cache import Place
from starquill.nn.lora import AdapterMix
from starquill.types import GenerateRequest


@dataclass(eq=False)
class Scalings:
    """One request's: `rows` has `[M, K]` or `[1, K]` for each token that was computed.

    `seat` is where the scaling pass writes, `prompt` the length of the request's prompt.
    """

    xlora: XLora
    seat: Seat
    prompt: int
    rows: list[Tensor] = field(default_factory=list)

    def back_to(self, length: int) -> None:
        """Forget what was computed past `length`: proposals that were wrong, a step that failed."""
        del self.rows[length:]
        self.seat.place.length = min(self.seat.place.length, length)

    def settle(self, length: int, ids: Sequence[int]) -> None:
        """`ids` were computed up to `length`, and stay."""
        self.back_to(length)
        before = length - len(ids)
        if self.seat.place.length > before:
            self.seat.record(ids[: self.seat.place.length - before])

    def array(self) -> Tensor:
        """`[T, M, K]`: how strongly each adapter acted, on each token in each layer."""
        rows = list(self.rows)
        layers, adapters = len(self.xlora.layers), len(self.xlora.names)
        if not rows:
            return torch.empty(0, layers, adapters)
        return self.xlora.acting(torch.stack(rows)).expand(-1, layers, -1)


class ScalingPass:
    """Runs before every step of a model that has an X-LoRA; its results are the step's mix."""

    def __init__(self, xlora: XLora, runner: Runner) -> None:
        self._xlora = xlora
        self._runner = runner

    def check(self, request: GenerateRequest) -> None:
        if request.adapters:
            raise BadRequestError(
                "the model has an X-LoRA, which weighs its own adapters; give no adapter"
            )

    def begin(self, seat: Seat, prompt: int) -> Scalings:
        return Scalings(self._xlora, seat, prompt)

    def piece(self, own: Scalings, place: Place, ids: Sequence[int]) -> AdapterMix:
        """For the next `ids` of a prompt, which is at `place`."""
        own.back_to(place.length)
        own.seat.make_room(len(ids))
        hidden = self._runner.advance(own.seat.place, ids, self._xlora.pass_mix(1))
        found = self._xlora.scalings(hidden[None])  # [1, T, M, K]
        own.rows += found[0].unbind(0)
        return self._xlora.mix(found)

    def step(
        self, all_own: Sequence[Scalings], places: Sequence[Place], ids: Sequence[Sequence[int]]
    ) -> AdapterMix:
        """For a step of several sequences, each with its next tokens; see `Runner.decode`."""
        todo = []
        for own, place, new in zip(all_own, places, ids, strict=True):
            own.back_to(place.length)
            if weighed := new[: self._weighed(own, place)]:
                own.seat.make_room(len(weighed))
                todo.append((own, weighed))
        if todo:
            self._weigh(todo)
        rows: list[Tensor] = []
        for own, place, new in zip(all_own, places, ids, strict=True):
            frozen = place.length + len(new) - len(own.rows)
            own.rows += [own.rows[-1]] * frozen
            rows += own.rows[place.length :]
        assert len(rows) == sum(map(len, ids)), "native code would read past them"
        return self._xlora.mix(torch.stack(rows)[:, None])

    def _weighed(self, own: Scalings, place: Place) -> int | None:
        """How many of the next tokens get scalings of their own; None for all."""
        freeze = self._xlora.freeze
        return None if freeze is None else max(0, own.prompt + freeze - place.length)

    def _weigh(self, todo: Sequence[tuple[Scalings, Sequence[int]]]) -> None:
        places, ids = [own.seat.place for own, _ in todo], [new for _, new in todo]
        hidden = self._runner.step(places, ids, self._xlora.pass_mix(sum(map(len, ids))))
        found = iter(self._xlora.scalings(hidden[:, None])[:, 0].unbind(0))
        for own, new in todo:
            own.rows += [next(found) for _ in new]


def last_token(mix: AdapterMix | None) -> AdapterMix | None:
    """Of a piece's mix, what acts on its last token."""
    if mix is None or mix.scales.dim() == 2:
        return mix
    return AdapterMix(mix.slots, mix.scales[:, -1:])
