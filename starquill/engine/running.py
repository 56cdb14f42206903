"""`Running`: a request in the engine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from starquill.engine.loaded import LoadedModel
from starquill.engine.lookup import PromptLookup
from starquill.engine.pooling import Pooling
from starquill.engine.seat import Seat
from starquill.engine.sequence import Sequence
from starquill.engine.xlora import Scalings
from starquill.types import Delta, GenerateRequest, GenerationStats, Logprobs

Event = Delta | Exception
Deliver = Callable[[Event], None]


def peak_memory_bytes() -> int | None:
    """The largest resident size that this process has had; None where none is counted."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Running:
    """What the engine keeps of a request: its text so far, its blocks, its counts.

    `need` is the blocks of the cache that it may come to hold, `pooling` what is left to compute of
    a prompt that chooses its experts. `seat` is None until its prompt's
    turn comes. `lease` holds on to its adapters until it ends. `scalings` are an X-LoRA's, which
    stay to be read.
    """

    def __init__(
        self, loaded: LoadedModel, request: GenerateRequest, deliver: Deliver, context: int
    ) -> None:
        self.request = request
        self.sequence = Sequence(loaded, request, context)
        self.lease = loaded.adapters.lease(request.adapters) if request.adapters else None
        self.deliver = deliver
        self.need = 0
        self.seat: Seat | None = None
        self.pooling: Pooling | None = None
        self.scalings: Scalings | None = None
        self.lookup: PromptLookup | None = None
        self.prompt_logprobs: list[Logprobs | None] = [None]
        self.abandoned = False
        self.cached_tokens = self.proposed_tokens = self.accepted_tokens = 0
        self._started = self._first = self._last = time.perf_counter()

    def end(self, *, keep: bool = True) -> None:
        """Give back what it holds; not `keep` what is in its blocks where that is unsound."""
        self.pooling = None
        if self.seat is not None:
            self.seat.leave(keep=keep)
            self.seat = None
            if self.scalings is not None:
                self.scalings.seat.leave(keep=False)
        if self.lease is not None:
            self.lease.release()

    def begin(self) -> None:
        """Its prompt's turn has come."""
        self._started = self._first = self._last = time.perf_counter()

    def wrote(self) -> None:
        self._last = time.perf_counter()
        if len(self.sequence.output_ids) == 1:
            self._first = self._last

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        request = self.request
        return request.params.max_tokens == 0 and request.prompt_logprobs is None

    @property
    def is_late(self) -> bool:
        """Whether it has written for longer than it may."""
        limit = self.request.max_seconds
        return limit is not None and time.perf_counter() - self._first > limit

    @property
    def last_ids(self) -> list[int]:
        """The token that was written last, whose keys and values are not computed yet."""
        return self.sequence.output_ids[-1:]

    def stats(self) -> GenerationStats:
        """Counts and times up to now."""
        return GenerationStats(
            prompt_tokens=self.request.prompt_tokens,
            generated_tokens=len(self.sequence.output_ids) - self.sequence.respelled,
            time_to_first_token=self._first - self._started,
            generation_seconds=self._last - self._first,
            peak_memory_bytes=peak_memory_bytes(),
            seed=self.sequence.sampler.seed,
            cached_tokens=self.cached_tokens,
            proposed_tokens=self.proposed_tokens,
            accepted_tokens=self.accepted_tokens,
        )
