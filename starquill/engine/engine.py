"""`Engine`: requests in, deltas out."""

from __future__ import annotations

import logging
import operator
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from starquill.engine.chat import Message
from starquill.engine.fim import fill_request
from starquill.engine.generation import Generation
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import chat_request, new_request_id, plain_request
from starquill.engine.running import Deliver, Running
from starquill.engine.stepper import Stepper
from starquill.errors import BadRequestError, BusyError
from starquill.types import (
    Delta,
    EngineOptions,
    EngineStats,
    GenerateRequest,
    Hole,
    SamplingParams,
)

GREEDY = SamplingParams()
DEFAULTS = EngineOptions()
log = logging.getLogger("starquill")

Adapter = str | Mapping[str, float] | None


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
        self.model = model
        self.options = options
        self._stepper = Stepper(model, options)
        self._lock = threading.Lock()  # held for a step
        self._inbox: deque[Running] = deque()
        self._changed = threading.Condition()

    def submit(self, request: GenerateRequest, deliver: Deliver) -> Running:
        """Queue a request; each of its deltas, or the error that ends it, goes to `deliver`.

        May be called from any thread; `deliver` is called by the one that steps. Raises
        BadRequestError, CapacityError or BusyError at once for what cannot run.
        """
        running = self._stepper.checked(request, deliver)
        waiting = len(self._stepper.scheduler) + len(self._inbox)
        if waiting >= self.options.slots + self.options.queue:
            running.end()
            raise BusyError(f"{waiting} requests run or wait already; try again later")
        self._inbox.append(running)
        with self._changed:
            self._changed.notify()
        return running

    def step(self) -> bool:
        """Work for one step; whether there was anything to do."""
        with self._lock:
            self._admit()
            return self._stepper.step()

    def wait(self, seconds: float) -> None:
        """Until there may be something to do."""
        with self._changed:
            if not self._inbox:
                self._changed.wait(seconds)

    def end(self, running: Running) -> Delta | None:
        """End a request now: its last delta, or None if it had ended."""
        with self._lock:
            self._admit()
            return self._stepper.end(running)

    def abandon(self, running: Running) -> None:
        """Nobody reads this request any more: it ends at the next step. Never waits."""
        running.abandoned = True

    def stats(self) -> EngineStats:
        return self._stepper.stats(waiting=len(self._inbox))

    def _admit(self) -> None:
        while self._inbox:
            self._stepper.scheduler.add(self._inbox.popleft())

    def generate(
        self,
        request: GenerateRequest | Hole | str | SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        heal: bool = True,
        parse_special: bool = True,
        adapter: Adapter = None,
    ) -> Generation:
        """Start a request; iterate over the result for its `Delta`s.

        A string is completed at its end (`heal` and `parse_special` as in `plain_request`), a
        `Hole` is filled, a sequence of token ids is run as it is. `params` and `adapter` (a loaded
        one's alias, or several with their weights) belong to those; a `GenerateRequest` has its
        own. Raises BadRequestError or CapacityError before anything is computed.
        """
        if isinstance(request, GenerateRequest):
            if params is not None or adapter is not None:
                raise BadRequestError(
                    "a GenerateRequest has its own params and adapter; give no others"
                )
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
        return self._start(replace(made, adapter=adapter))

    def _start(self, request: GenerateRequest) -> Generation:
        return Generation(self, lambda deliver: self.submit(request, deliver))

    def complete(
        self,
        prompt: str,
        params: SamplingParams | None = None,
        *,
        heal: bool = True,
        parse_special: bool = True,
        adapter: Adapter = None,
    ) -> str:
        """The text that follows `prompt`, beginning exactly where it ends."""
        generation = self.generate(
            prompt, params, heal=heal, parse_special=parse_special, adapter=adapter
        )
        return _text(generation)

    def fill(
        self, hole: Hole, params: SamplingParams | None = None, *, adapter: Adapter = None
    ) -> str:
        """The text that belongs into `hole`; what does not fit the context is left out."""
        return _text(self.generate(hole, params, adapter=adapter))

    def chat(
        self,
        messages: SequenceOf[Message],
        params: SamplingParams = GREEDY,
        *,
        adapter: Adapter = None,
    ) -> str:
        """The model's answer to `messages`, for models with a chat template."""
        request = chat_request(self.model, messages, params)
        return _text(self.generate(replace(request, adapter=adapter)))


def _text(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas)
