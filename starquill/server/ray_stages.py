"""A model's stages as processes on a Ray cluster, and the way to them from the first.

They belong to the process that started them: when that ends, Ray ends them too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from starquill.adapters.adapter import AdapterPart
from starquill.engine.loaded import LoadedModel
from starquill.engine.stages import LayerStage
from starquill.errors import StageLostError, StarquillError
from starquill.nn.stages import StageStep

# A stage's number -> its layers; called in the process that is to have them.
LoadStage = Callable[[int], LoadedModel]
CONTROL = "control"  # calls that are answered while a step is computed
_CONTROL_THREADS = 3  # one of them waits for the end


class StageProcess:
    """The layers of one stage, in a process of its own."""

    def __init__(self, load: LoadStage, number: int) -> None:
        self._stage = LayerStage(load(number))

    def ready(self) -> tuple[range, int | None]:
        """Its layers, and the blocks of a cache that there is room for."""
        return self._stage.layers, self._stage.most_blocks()

    def open(self, blocks: int) -> int:
        return self._stage.open(blocks)

    def forward(self, step: StageStep) -> np.ndarray:
        return self._stage.forward(step)

    def fill(self, slot: int, parts: Mapping[str, AdapterPart]) -> None:
        self._stage.fill(slot, parts)

    def empty(self, slot: int) -> None:
        self._stage.empty(slot)

    def until_the_end(self) -> None:
        """Never answered: whoever waits for it learns when this process has ended."""
        threading.Event().wait()


class RayStage:
    """A `StageProcess` from outside; a `Stage`."""

    def __init__(self, actor: Any) -> None:
        """Waits until it has loaded; raises what kept it from that."""
        self._actor = actor
        self.is_alive = True
        self.layers, self._blocks = self._ask("ready")
        threading.Thread(target=self._watch, name="stage", daemon=True).start()

    def most_blocks(self) -> int | None:
        return self._blocks

    def open(self, blocks: int) -> int:
        key: int = self._ask("open", blocks)
        return key

    def forward(self, step: StageStep) -> np.ndarray:
        array: np.ndarray = self._ask("forward", step)
        return array

    def fill(self, slot: int, parts: Mapping[str, AdapterPart]) -> None:
        self._ask("fill", slot, dict(parts), group=CONTROL)

    def empty(self, slot: int) -> None:
        self._ask("empty", slot, group=CONTROL)

    def _watch(self) -> None:
        try:
            self._ask("until_the_end", group=CONTROL)
        except Exception:  # that it ends is all there is to know
            self.is_alive = False

    def _ask(self, name: str, *arguments: Any, group: str | None = None) -> Any:
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        method = getattr(self._actor, name)
        if group is not None:
            method = method.options(concurrency_group=group)
        try:
            return ray.get(method.remote(*arguments))
        except RayTaskError as error:
            # Our own errors are told as they would be from this process.
            if isinstance(error.cause, StarquillError):
                raise error.cause from None
            raise
        except RayActorError as error:
            self.is_alive = False
            raise StageLostError(f"a stage was lost ({type(error).__name__})") from None


def begin_stages(load: LoadStage, count: int, cpus: float) -> Callable[[], Sequence[RayStage]]:
    """Let all stages but the first load, each where the group of this process has a place for it.

    What is returned waits for them.
    """
    import ray
    from ray.util import get_current_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group: Any = get_current_placement_group()
    made: Any = ray.remote
    remote = made(num_cpus=cpus, concurrency_groups={CONTROL: _CONTROL_THREADS})(StageProcess)
    actors = [
        remote.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            )
        ).remote(load, number)
        for number in range(1, count)
    ]
    return lambda: [RayStage(actor) for actor in actors]
