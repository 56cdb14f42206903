"""Answers to lines on the machines of a Ray cluster, by Ray Data."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starquill.batch.answering import Answering, Json, Make
from starquill.batch.lines import Line
from starquill.server.on_ray import ClusterOptions, connected

BATCH = 32  # lines that a worker takes at once: it tells answers when it has all of them


class Worker:
    """A model on one of the machines; Ray Data makes it, and another one where it is lost."""

    def __init__(self, make: Make, settings: Mapping[str, Any]) -> None:
        self._answering = Answering(make, settings)
        self._answering.__enter__()

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        lines = [
            Line(int(i), bytes(text)) for i, text in zip(batch["index"], batch["text"], strict=True)
        ]
        answers = asyncio.run(self._all(lines))
        return {
            "index": [line.index for line in lines],
            "answer": [json.dumps(answer) for answer in answers],
        }

    async def _all(self, lines: Sequence[Line]) -> list[Json]:
        return [answer async for _, answer in self._answering.answers(lines, ordered=True)]


def answers_on_ray(
    make: Make,
    settings: Mapping[str, Any],
    lines: Sequence[Line],
    cluster: ClusterOptions,
    *,
    ordered: bool,
) -> Iterator[tuple[Line, Json]]:
    """Each line with its answer. What a lost worker had begun is begun again by another."""
    if not lines:
        return
    with connected(cluster):
        import ray.data

        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order = ordered
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        # A block is what one worker takes; few lines are shared out too.
        workers = min(cluster.least, len(lines))
        blocks = max(-(-len(lines) // BATCH), workers)
        rows = [{"index": line.index, "text": line.text} for line in lines]
        answered = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            Worker,
            fn_constructor_args=(make, settings),
            batch_size=None,
            compute=ray.data.ActorPoolStrategy(min_size=workers, max_size=cluster.most),
            num_cpus=cluster.cpus,
            num_gpus=cluster.gpus,
        )
        by_index = {line.index: line for line in lines}
        for row in answered.iter_rows():
            yield by_index.pop(row["index"]), json.loads(row["answer"])
