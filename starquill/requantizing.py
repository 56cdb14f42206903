"""Another scheme for a model that is loaded: its matrices are read from their source again."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakSet

import torch

from starquill.checkpoint.build import Fit, assign, compare, tie, weight_of
from starquill.checkpoint.opening import Checkpoint
from starquill.engine.loaded import Watcher
from starquill.errors import StarquillError
from starquill.isq import IsqPlan, apply_isq
from starquill.quant.weight import Computing
from starquill.quantizing import QuantOptions, plan_checkpoint, stored_infos
from starquill.types import RequantizeReport


@dataclass(eq=False)
class Requantizer:
    """Knows where a loaded model's weights came from, and how it computes."""

    model: Any
    checkpoint: Checkpoint
    computing: Computing
    times: int = 0  # that weights began or ended to change
    watchers: WeakSet[Watcher] = field(default_factory=WeakSet)
    _one: Lock = field(default_factory=Lock)

    def __call__(self, quant: str | QuantOptions | None) -> RequantizeReport:
        """Give every matrix its scheme in `quant`, or its stored values for None.

        One matrix at a time: it is read, quantized and only then put in place of the old one, so
        a running request sees either. One that fails keeps what it had and is reported.
        Raises BadRequestError for a scheme that makes no sense, before anything changes. A second
        call waits for the first.
        """
        with self._one:
            return self._all(quant)

    def _all(self, quant: str | QuantOptions | None) -> RequantizeReport:
        checkpoint, spec = self.checkpoint, self.checkpoint.spec
        plan = IsqPlan({})
        if quant is not None:
            options = QuantOptions(quant) if isinstance(quant, str) else quant
            plan = plan_checkpoint(checkpoint, options)
        fit = compare(spec, spec.Model(checkpoint.config), checkpoint.source.infos)
        fit.check()
        tied = weight_of(self.model, spec.head) is weight_of(self.model, spec.embedding)
        names = [n for n in self._matrices(fit) if not (tied and n == f"{spec.head}.weight")]
        kept: dict[str, str] = {}
        self.times += 1
        try:
            for watcher in list(self.watchers):
                watcher.forget()
            for name in names:
                try:
                    self._replace(name, fit, plan)
                except (StarquillError, OSError, MemoryError) as error:
                    kept[name] = str(error) or type(error).__name__
        finally:
            if tied:
                tie(self.model, spec)
            self.times += 1
        changed = len(names) - len(kept)
        infos = stored_infos(checkpoint)
        return RequantizeReport(changed, kept, plan.summary(infos) if plan.schemes else "")

    @staticmethod
    def _matrices(fit: Fit) -> list[str]:
        return [name for name in fit.names if len(fit.expected.get(name, ())) > 1]

    @torch.inference_mode()
    def _replace(self, name: str, fit: Fit, plan: IsqPlan) -> None:
        value = apply_isq(plan, name, self.checkpoint.source.read(fit.names[name]))
        assign(self.model, name, value, self.computing)
