"""`Engine`: requests in, deltas out."""

from __future__ import annotations

import logging
import operator
import sys
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from starquill.engine.chat import Message
from starquill.engine.fim import fill_request
from starquill.engine.generation import Deliver, Event, Generation, Running
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import chat_request, new_request_id, plain_request
from starquill.engine.runner import Runner
from starquill.engine.sequence import Sequence
from starquill.errors import BadRequestError, BusyError
from starquill.types import (
    Delta,
    EngineOptions,
    EngineStats,
    GenerateRequest,
    GenerationStats,
    Hole,
    SamplingParams,
)

GREEDY = SamplingParams()
DEFAULTS = EngineOptions()
log = logging.getLogger("starquill")


def peak_memory_bytes() -> int | None:
    """The largest resident size that this process has had; None where none is counted."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class _Running:
    """A request in the engine."""

    def __init__(self, loaded: LoadedModel, request: GenerateRequest, deliver: Deliver) -> None:
        self.request = request
        self.sequence = Sequence(loaded, request)
        self.deliver = deliver
        self.abandoned = False
        self.runner: Runner | None = None
        self.started = self.first = self.last = time.perf_counter()

    def stats(self) -> GenerationStats:
        return GenerationStats(
            prompt_tokens=self.request.prompt_tokens,
            generated_tokens=len(self.sequence.output_ids) - self.sequence.respelled,
            time_to_first_token=self.first - self.started,
            generation_seconds=self.last - self.first,
            peak_memory_bytes=peak_memory_bytes(),
            seed=self.sequence.sampler.seed,
        )


def _whole_numbers(ids: Iterable[object]) -> tuple[int, ...]:
    """Token ids from any library's integers."""
    if isinstance(ids, bytes | bytearray):
        raise BadRequestError("the prompt is bytes (expected a string or token ids)")
    try:
        return tuple(operator.index(i) for i in ids)  # type: ignore[arg-type]
    except TypeError:
        raise BadRequestError("the prompt's token ids must be whole numbers") from None


class Engine:
    """Runs requests on a loaded model.

    >>> engine = Engine(starquill.load("default"))
    >>> engine.complete("def add(a, b):", SamplingParams(max_tokens=16))
    """

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions = DEFAULTS,
        *,
        prefill_chunk: int | None = None,
    ) -> None:
        """`prefill_chunk` is how many prompt tokens are computed in one pass."""
        if prefill_chunk is not None:
            options = replace(options, prefill_chunk=prefill_chunk)
        if options.prefill_chunk < 1:
            raise BadRequestError(f"prefill_chunk is {options.prefill_chunk} (expected 1 or more)")
        self.model = model
        self.options = options
        self._active: list[_Running] = []
        self._lock = threading.RLock()
        self._changed = threading.Condition()

    def submit(self, request: GenerateRequest, deliver: Deliver) -> Running:
        """Queue a request; each of its deltas, or the error that ends it, goes to `deliver`.

        May be called from any thread; `deliver` is called by the one that steps. Raises
        BadRequestError, CapacityError or BusyError at once for what cannot run.
        """
        running = _Running(self.model, request, deliver)
        if len(self._active) >= self.options.slots + self.options.queue:
            raise BusyError(f"{len(self._active)} requests run or wait already; try again later")
        self._active.append(running)
        with self._changed:
            self._changed.notify()
        return running

    def step(self) -> bool:
        """Work for one step; whether there was anything to do."""
        with self._lock:
            active = list(self._active)
            for running in active:
                self._advance(running)
            return bool(active)

    def wait(self, seconds: float) -> None:
        """Until there may be something to do."""
        with self._changed:
            if not self._active:
                self._changed.wait(seconds)

    def end(self, running: Running) -> Delta | None:
        """End a request now: its last delta, or None if it had ended."""
        assert isinstance(running, _Running)
        with self._lock:
            if running not in self._active:
                return None
            self._active.remove(running)
            return running.sequence.finish("cancelled")

    def abandon(self, running: Running) -> None:
        """Nobody reads this request any more: it ends at the next step. Never waits."""
        assert isinstance(running, _Running)
        running.abandoned = True

    def stats(self) -> EngineStats:
        return EngineStats(len(self._active), 0, 0, 0, 0, 0, 0, 0, 0, 0)

    def _advance(self, running: _Running) -> None:
        if running.abandoned:
            self._active.remove(running)
            return
        try:
            event: Event = self._next(running)
        except Exception as error:
            event = error
        if isinstance(event, Exception) or event.finish_reason is not None:
            self._active.remove(running)
        running.deliver(event)

    def _next(self, running: _Running) -> Delta:
        sequence, request = running.sequence, running.request
        if request.params.max_tokens == 0:
            return sequence.finish("length")
        if running.runner is None:
            running.runner = Runner(self.model, prefill_chunk=self.options.prefill_chunk)
            logits = running.runner.prefill(0, request.prompt_ids, sequence.span)
            delta = sequence.accept(logits)
            running.first = running.last = time.perf_counter()
            return delta
        logits = running.runner.decode([0], sequence.output_ids[-1:], [sequence.span])[0]
        delta = sequence.accept(logits)
        running.last = time.perf_counter()
        return delta

    def generate(
        self,
        request: GenerateRequest | Hole | str | SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        heal: bool = True,
        parse_special: bool = True,
    ) -> Generation:
        """Start a request; iterate over the result for its `Delta`s.

        A string is completed at its end (`heal` and `parse_special` as in `plain_request`), a
        `Hole` is filled, a sequence of token ids is run as it is. `params` belongs to those; a
        `GenerateRequest` has its own. Raises BadRequestError or CapacityError before anything
        is computed.
        """
        if isinstance(request, GenerateRequest):
            if params is not None:
                raise BadRequestError("a GenerateRequest has its own params; give no others")
            return self._start(request)
        params = GREEDY if params is None else params
        if not isinstance(params, SamplingParams):
            raise BadRequestError(f"params is {params!r:.60} (expected SamplingParams)")
        if isinstance(request, str):
            made = plain_request(
                self.model, request, params, heal=heal, parse_special=parse_special
            )
        elif isinstance(request, Hole):
            made, trimmed = fill_request(self.model, request, params)
            if trimmed:
                log.warning("left out to fit the context: %s", trimmed)
        else:
            made = GenerateRequest(new_request_id(), _whole_numbers(request), params)
        return self._start(made)

    def _start(self, request: GenerateRequest) -> Generation:
        return Generation(self, lambda deliver: self.submit(request, deliver))

    def complete(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        heal: bool = True,
        parse_special: bool = True,
    ) -> str:
        """The text that follows `prompt`, beginning exactly where it ends."""
        generation = self.generate(prompt, params, heal=heal, parse_special=parse_special)
        return _text(generation)

    def fill(self, hole: Hole, params: SamplingParams | None = None) -> str:
        """The text that belongs into `hole`; what does not fit the context is left out."""
        return _text(self.generate(hole, params))

    def chat(self, messages: SequenceOf[Message], params: SamplingParams = GREEDY) -> str:
        """The model's answer to `messages`, for models with a chat template."""
        return _text(self.generate(chat_request(self.model, messages, params)))


def _text(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas)
