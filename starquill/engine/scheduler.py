"""`Scheduler`: which request's turn it is. Policy, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Job(Protocol):
    """A request as the scheduler sees it: `need` is the blocks that it may come to hold."""

    @property
    def need(self) -> int: ...


J = TypeVar("J", bound=Job)


@dataclass(frozen=True)
class Work(Generic[J]):
    """One step: a piece of `fill`'s prompt, or one step of writing for all of `write`."""

    fill: J | None = None
    write: tuple[J, ...] = ()


class Scheduler(Generic[J]):
    """First come, first served; at most `slots` at once, whose needs fit in `room` blocks together.

    A request is admitted only when all that it may come to need is free, so that none is ever
    stopped half-way. Prompts are computed one after the other, so that equal beginnings are
    computed once; between two pieces of a prompt those that write get their step.
    """

    def __init__(self, slots: int, room: int) -> None:
        self.waiting: deque[J] = deque()
        self.writing: list[J] = []
        self._filling: J | None = None
        self._slots = slots
        self._room = room
        self._write_next = False

    def __iter__(self) -> Iterator[J]:
        """All requests, those that wait too."""
        yield from self.running
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def running(self) -> list[J]:
        return self.writing if self._filling is None else [*self.writing, self._filling]

    def add(self, job: J) -> None:
        self.waiting.append(job)

    def filled(self, job: J) -> None:
        """`job`'s prompt is computed: from now on it writes."""
        assert job is self._filling
        self._filling = None
        self.writing.append(job)

    def remove(self, job: J) -> None:
        if job is self._filling:
            self._filling = None
        elif job in self.writing:
            self.writing.remove(job)
        elif job in self.waiting:
            self.waiting.remove(job)

    def next(self) -> Work[J] | None:
        """What to do now; None when there is nothing to do."""
        if self._filling is None:
            self._filling = self._admitted()
        if self._filling is not None and not (self._write_next and self.writing):
            self._write_next = True
            return Work(fill=self._filling)
        self._write_next = False
        return Work(write=tuple(self.writing)) if self.writing else None

    def _admitted(self) -> J | None:
        if not self.waiting or len(self.writing) >= self._slots:
            return None
        taken = sum(job.need for job in self.writing)
        return self.waiting.popleft() if taken + self.waiting[0].need <= self._room else None
