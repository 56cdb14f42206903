"""Steps of one token a row, run again without Python between their operations."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from starquill.engine.loaded import LoadedModel
from starquill.kernels.native import native
from starquill.kernels.program import Arena, Program, recording
from starquill.models.causal import CausalLM
from starquill.models.spec import StepBatch
from starquill.nn.attention import AttentionStep
from starquill.nn.route import OneDevice

log = logging.getLogger("starquill")

MOST_SHAPES = 64  # of one mix of adapters
Shape = tuple[int, int]  # rows, and how wide their tables are


@dataclass(eq=False)
class _Known:
    """How often steps of one shape have come, and what one of them was written down as.

    `program` keeps the weights, the cache and the adapters' parts that it points to; `out` is what
    comes out of the layers. It is tried when `times` is a power of two: what is in the way, such
    as what weights and adapters make ready at their first use, may be gone later.
    """

    times: int = 0
    program: Program | None = None
    out: Tensor | None = None

    @property
    def is_due(self) -> bool:
        return self.program is None and self.times & (self.times - 1) == 0


class Replay:
    """`hidden` of a model: the first step of a shape is written down, others are run from there.

    A program is of one version of the weights, and none is kept when they begin to change.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._arena = Arena()
        self._version = 0
        self.forget()
        if loaded.requantizer is not None:
            loaded.requantizer.watchers.add(self)

    def forget(self) -> None:
        """Let go of all weights; from any thread. A step that runs goes on with those it has."""
        # By mix of adapters: they go when it does. This itself stands for none.
        self._known: WeakKeyDictionary[Any, OrderedDict[Shape, _Known]] = WeakKeyDictionary()

    def hidden(self, batch: StepBatch) -> Tensor:
        """Final hidden states `[B, T, D]`, as the model's own to the last bit."""
        model = self._loaded.model
        if not self._takes(batch):
            hidden: Tensor = model.hidden(batch)
            return hidden
        x, step = model.embed(batch.ids, batch.mix), model.step(batch)
        finished: Tensor = model.finish(self._layers(x, step), batch.mix)
        return finished

    def _takes(self, batch: StepBatch) -> bool:
        if self._version != (version := self._loaded.weights_version):
            self.forget()
            self._version = version
        model = self._loaded.model
        if native is None or version % 2 or not isinstance(model, CausalLM):
            return False
        # X-LoRA's mix is another one at every step.
        same = batch.mix is None or batch.mix.scales.dim() == 2
        here = isinstance(model.route, OneDevice) and batch.routes is None
        return here and same and batch.ids.shape[1] == 1

    def _layers(self, x: Tensor, step: AttentionStep) -> Tensor:
        """`[B, 1, D]` from the embedding to what comes out of the last layer."""
        known = self._known_of(step, (x.shape[0], step.plan.paged.tables.shape[1]))
        known.times += 1
        if known.is_due and step.plan.native:
            return self._write(x, step, known)
        if known.program is None or known.out is None:
            return self._through(x, step)
        known.program.run(_inputs(x, step))
        return known.out

    def _known_of(self, step: AttentionStep, shape: Shape) -> _Known:
        shapes = self._known.setdefault(step.mix or self, OrderedDict())
        known = shapes.setdefault(shape, _Known())
        shapes.move_to_end(shape)
        if len(shapes) > MOST_SHAPES:
            shapes.popitem(last=False)
        return known

    def _through(self, x: Tensor, step: AttentionStep) -> Tensor:
        model = self._loaded.model
        out: Tensor = model.route.through(model.model.layers, x, lambda _: step)
        return out

    def _write(self, x: Tensor, step: AttentionStep, known: _Known) -> Tensor:
        """Do this step, and write it down unless torch has a part in it."""
        program = Program([part.contiguous().clone() for part in _inputs(x, step)], self._arena)
        own_x, cos, sin, tables, starts = program.inputs
        paged = replace(step.plan.paged, tables=tables, starts=starts)
        own = replace(step, cos=cos, sin=sin, plan=replace(step.plan, paged=paged))
        with recording(program):
            out = self._through(own_x, own)
        if self._version != self._loaded.weights_version:
            program.native.refuse("the weights began to change")
        if program.refusal is None:
            known.program, known.out = program, out
        else:
            log.debug("steps of %d rows are not written down: %s", len(x), program.refusal)
        return out


def _inputs(x: Tensor, step: AttentionStep) -> tuple[Tensor, ...]:
    return (x, step.cos, step.sin, step.plan.paged.tables, step.plan.paged.starts)
