"""`Engine`: requests in, deltas out."""

from __future__ import annotations

import logging
import operator
import sys
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

from starquill.engine.chat import Message
from starquill.engine.fim import fill_request
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import chat_request, new_request_id, plain_request
from starquill.engine.runner import PREFILL_CHUNK, Runner
from starquill.engine.sequence import Sequence
from starquill.errors import BadRequestError
from starquill.types import Delta, GenerateRequest, GenerationStats, Hole, SamplingParams

GREEDY = SamplingParams()
log = logging.getLogger("starquill")


def peak_memory_bytes() -> int | None:
    """The largest resident size that this process has had; None where none is counted."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


class Generation(Iterator[Delta]):
    """A running request: iterate for its deltas; `cancel` ends it early.

    Each has a cache of its own, so several can run over one model.
    """

    def __init__(self, loaded: LoadedModel, request: GenerateRequest, prefill_chunk: int) -> None:
        self._sequence = Sequence(loaded, request)
        self._loaded = loaded
        self._prefill_chunk = prefill_chunk
        self._runner: Runner | None = None
        self._failed = False
        self._started = time.perf_counter()
        self._first = self._last = self._started

    def __next__(self) -> Delta:
        if self._sequence.finish_reason is not None or self._failed:
            self._runner = None
            raise StopIteration
        try:
            return self._step()
        except Exception:
            # The cache may be half a step ahead: nothing sound can follow.
            self._failed = True
            raise

    def _step(self) -> Delta:
        sequence, request = self._sequence, self._sequence.request
        if request.params.max_tokens == 0:
            return sequence.finish("length")
        if self._runner is None:
            self._started = time.perf_counter()
            self._runner = Runner(self._loaded, prefill_chunk=self._prefill_chunk)
            logits = self._runner.prefill(0, request.prompt_ids, sequence.span)
            delta = sequence.accept(logits)
            self._first = self._last = time.perf_counter()
            return delta
        logits = self._runner.decode([0], sequence.output_ids[-1:], [sequence.span])[0]
        delta = sequence.accept(logits)
        self._last = time.perf_counter()
        return delta

    def cancel(self) -> Delta | None:
        """End now; the last delta, with withheld text, or None when it had ended already."""
        if self._sequence.finish_reason is not None:
            return None
        return self._sequence.finish("cancelled")

    @property
    def request(self) -> GenerateRequest:
        return self._sequence.request

    @property
    def stats(self) -> GenerationStats:
        """Counts and times up to now."""
        return GenerationStats(
            prompt_tokens=self.request.prompt_tokens,
            generated_tokens=len(self._sequence.output_ids) - self._sequence.respelled,
            time_to_first_token=self._first - self._started,
            generation_seconds=self._last - self._first,
            peak_memory_bytes=peak_memory_bytes(),
            seed=self._sequence.sampler.seed,
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

    def __init__(self, model: LoadedModel, *, prefill_chunk: int = PREFILL_CHUNK) -> None:
        """`prefill_chunk` is how many prompt tokens are computed in one pass."""
        if prefill_chunk < 1:
            raise BadRequestError(f"prefill_chunk is {prefill_chunk} (expected 1 or more)")
        self.model = model
        self._prefill_chunk = prefill_chunk

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
            return Generation(self.model, request, self._prefill_chunk)
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
        return Generation(self.model, made, self._prefill_chunk)

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
