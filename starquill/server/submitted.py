"""A request in the engine as a route sees it: its deltas, and afterwards what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from starquill.engine.sequence import has_own_space
from starquill.server.metrics import MeasuredEngine
from starquill.server.together import Together
from starquill.types import Delta, GenerateRequest, GenerationStats

Ending = Literal["eos", "word", "limit", "none"]


class Submitted:
    """Submits `request` at once, so that what cannot run is told before an answer begins.

    Raises what `Engine.submit` raises. Ends with its reader, as `Together` does.
    """

    def __init__(self, engine: MeasuredEngine, request: GenerateRequest) -> None:
        self.request = request
        self.read: list[Delta] = []
        self._loaded = engine.model
        self._work = Together(engine, [request])

    async def deltas(self) -> AsyncIterator[Delta]:
        try:
            async for _, delta in self._work:
                self.read.append(delta)
                yield delta
        finally:
            self.abandon()

    async def finish(self) -> None:
        """Read to the end."""
        async for _ in self.deltas():
            pass

    def abandon(self) -> None:
        """End at the engine's next step."""
        self._work.close()

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.read)

    @property
    def ids(self) -> list[int]:
        """Tokens of the output; those that only spell a healed prompt again are not."""
        return [d.token_id for d in self.read if d.token_id is not None and not d.is_prompt]

    @property
    def stats(self) -> GenerationStats:
        return self._work.running[0].stats()

    def ending(self) -> tuple[Ending, str]:
        """Why the output ended, and the stop string if it was one."""
        last = self.read[-1]
        if last.finish_reason != "stop":
            return ("limit" if last.finish_reason == "length" else "none"), ""
        tokenizer = self._loaded.tokenizer
        stop = self.request.params.stop
        if last.token_id in self._loaded.end_ids | self.request.stop_ids:
            name = tokenizer.added.get(last.token_id or 0, "") if tokenizer else ""
            return ("word", name) if name in stop else ("eos", "")
        word = _first_complete(self._spelled(), stop)
        return ("word", word) if word else ("eos", "")

    def _spelled(self) -> str:
        """The output with the stop string that ended it."""
        tokenizer = self._loaded.tokenizer
        table = tokenizer.token_bytes if tokenizer else []
        ids = [d.token_id for d in self.read if d.token_id is not None]
        spelled = b"".join(table[i] for i in ids if i < len(table))
        if has_own_space(tokenizer, self.request):
            spelled = spelled.removeprefix(b" ")
        return spelled[len(self.request.heal) :].decode("utf-8", errors="replace")


def submit_all(engine: MeasuredEngine, requests: Sequence[GenerateRequest]) -> list[Submitted]:
    """All of them, or none."""
    works: list[Submitted] = []
    try:
        for request in requests:
            works.append(Submitted(engine, request))  # noqa: PERF401 - those before must be known
    except Exception:
        for work in works:
            work.abandon()
        raise
    return works


async def finish_all(works: Sequence[Submitted]) -> None:
    """Read all to their ends; if one fails or nobody waits any more, none goes on."""
    tasks = [asyncio.ensure_future(work.finish()) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _first_complete(text: str, stop: tuple[str, ...]) -> str:
    ends = [(at + len(s), at, s) for s in stop if s and (at := text.find(s)) >= 0]
    return min(ends)[2] if ends else ""
