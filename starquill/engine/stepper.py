"""`Stepper`: carries out what the scheduler decides, for all requests together."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from torch import Tensor

from starquill.engine.blocks import BlockPool
from starquill.engine.loaded import LoadedModel
from starquill.engine.lookup import PromptLookup, StepCost
from starquill.engine.runner import Runner
from starquill.engine.running import Deliver, Event, Running
from starquill.engine.sampling import logprobs
from starquill.engine.scheduler import Scheduler
from starquill.engine.seat import Seat
from starquill.engine.sequence import check_request
from starquill.engine.stages import blocks_with_room
from starquill.engine.xlora import ScalingPass, Scalings, last_token
from starquill.errors import BadRequestError, CapacityError
from starquill.kernels.native import is_finite
from starquill.nn.lora import AdapterMix
from starquill.types import Delta, EngineOptions, EngineStats, GenerateRequest

log = logging.getLogger("starquill")


def check_options(options: EngineOptions) -> None:
    """Raise BadRequestError naming every option that makes no sense."""
    least = {
        "slots": 1,
        "queue": 0,
        "context": 2,
        "cache_bytes": 1,
        "prefill_chunk": 1,
        "lookup": 0,
    }
    problems = []
    for name, low in least.items():
        value = getattr(options, name)
        if value is not None and value < low:
            problems.append(f"{name} is {value} (expected {low} or more)")
    if problems:
        raise BadRequestError("; ".join(problems))


class Stepper:
    """Not for several threads at once: its engine sees to that, but for `checked` and `stats`."""

    def __init__(self, loaded: LoadedModel, options: EngineOptions) -> None:
        check_options(options)
        self._loaded = loaded
        longest, most = loaded.room
        self._options = options = replace(options, slots=min(options.slots, most or options.slots))
        self.context = min(
            options.context or loaded.config.context_length,
            longest or loaded.config.context_length,
            loaded.config.context_length,
        )
        blocks = self._block_count()
        self._runner = Runner(loaded, blocks, options.prefill_chunk)
        self._pool = BlockPool(blocks, self._runner.cache.shape)
        self.scheduler: Scheduler[Running] = Scheduler(options.slots, blocks)
        self._xlora = None if loaded.xlora is None else ScalingPass(loaded.xlora, self._runner)
        self._cost = StepCost()
        self._steps = 0
        self._counts = dict.fromkeys(("prompt", "cached", "generated", "proposed", "accepted"), 0)

    def _need(self, span: int) -> int:
        """Blocks that a sequence may come to hold, and one to copy from; X-LoRA's two passes."""
        shape = self._loaded.config.cache_shape()
        chunk = max(self._options.prefill_chunk + 1, self._options.lookup + 1)
        passes = 1 if self._loaded.xlora is None else 2
        if self._loaded.config.pools:
            chunk = span  # a layer needs its whole prompt at once
        return passes * (shape.most_blocks(span, chunk) + 1)

    def _block_count(self) -> int:
        bytes_each = self._loaded.config.cache_shape().block_bytes(self._loaded.dtype)
        one = self._need(self.context)
        if self._options.cache_bytes is not None:
            count = self._options.cache_bytes // bytes_each
            if count < one:
                raise CapacityError(
                    f"cache memory of {self._options.cache_bytes:,} bytes is too little for one "
                    f"sequence of {self.context} tokens, which takes {one * bytes_each:,}; give "
                    "more, or a shorter context"
                )
            return count
        wanted = self._options.slots * one
        rooms = [blocks_with_room(self._loaded), *(s.most_blocks() for s in self._loaded.stages)]
        return max(one, min([wanted, *(room for room in rooms if room is not None)]))

    def checked(self, request: GenerateRequest, deliver: Deliver) -> Running:
        """`request` ready to be scheduled; raises what `check_request` does."""
        check_request(self._loaded, request, self.context)
        if self._xlora is not None:
            self._xlora.check(request)
        running = Running(self._loaded, request, deliver, self.context)
        running.need = 0 if running.is_empty else self._need(running.sequence.span)
        return running

    def step(self) -> bool:
        """One step; whether there was anything to do."""
        for running in [running for running in self.scheduler if running.abandoned]:
            self._leave(running)
        work = self.scheduler.next()
        if work is None:
            return False
        self._steps += 1
        if work.fill is not None:
            self._fill(work.fill)
        else:
            self._write(work.write)
        return True

    def end(self, running: Running) -> Delta | None:
        """End a request: its last delta, or None if it had ended."""
        if running.sequence.finish_reason is not None or running not in list(self.scheduler):
            return None
        self._leave(running)
        return running.sequence.finish("cancelled")

    def stats(self, waiting: int) -> EngineStats:
        cache = self._runner.cache
        block = cache.shape.block_bytes(cache.dtype)
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + waiting,
            prompt_tokens=self._counts["prompt"],
            cached_tokens=self._counts["cached"],
            generated_tokens=self._counts["generated"],
            proposed_tokens=self._counts["proposed"],
            accepted_tokens=self._counts["accepted"],
            steps=self._steps,
            cache_bytes=self._pool.count * block,
            cache_bytes_used=(self._pool.in_use + self._pool.kept) * block,
        )

    def _fill(self, running: Running) -> None:
        """The next piece of a prompt, and after the last one the first token."""
        try:
            self._fill_piece(running)
        except Exception as error:
            self._fail(running, error)

    def _fill_piece(self, running: Running) -> None:
        request, prompt = running.request, running.request.prompt_ids
        if running.seat is None:
            running.begin()
            if running.is_empty:
                self._give(running, running.sequence.finish("length"))
                return self._leave(running)
            running.seat = self._seat_for(running)
        seat = running.seat
        if self._loaded.config.pools:
            return self._pool_piece(running, seat)
        rest = prompt[seat.place.length :]
        # A piece of one token would be computed as written ones are, not as the rest of a prompt.
        ids = (
            rest
            if len(rest) <= self._options.prefill_chunk + 1
            else rest[: self._options.prefill_chunk]
        )
        seat.make_room(len(ids))
        if self._xlora is None:
            mix = self._loaded.adapters.mix_of([running.lease], [1])
        else:
            mix = self._xlora.piece(_scalings(running), seat.place, ids)
        hidden = self._runner.advance(seat.place, ids, mix)
        if request.prompt_logprobs is not None:
            rows = self._runner.all_logits(hidden, mix)
            self._score(running, rows, prompt[seat.place.length - len(ids) :])
        seat.record(ids)
        if running.scalings is not None:
            running.scalings.settle(seat.place.length, ids)
        if len(ids) == len(rest):
            self._begin_to_write(running, hidden, mix)
        return None

    def _pool_piece(self, running: Running, seat: Seat) -> None:
        """As much of a prompt that chooses its experts as a piece of another would be."""
        prompt = running.request.prompt_ids
        mix = self._loaded.adapters.mix_of([running.lease], [1])
        if running.pooling is None:
            seat.make_room(len(prompt))
            running.pooling = self._runner.pool(seat.place, prompt, mix)
        try:
            for _ in range(2 * self._loaded.config.num_hidden_layers):
                next(running.pooling)
        except StopIteration as ended:
            hidden: Tensor = ended.value
        else:
            return
        running.pooling = None
        if running.request.prompt_logprobs is not None:
            chunk = self._options.prefill_chunk
            for start, piece in zip(range(0, len(prompt), chunk), hidden.split(chunk), strict=True):
                self._score(running, self._runner.all_logits(piece, mix), prompt[start:])
        seat.record(prompt)
        self._begin_to_write(running, hidden, mix)

    def _begin_to_write(self, running: Running, hidden: Tensor, mix: AdapterMix | None) -> None:
        self._counts["prompt"] += len(running.request.prompt_ids)
        if running.request.params.max_tokens == 0:
            self._give(running, running.sequence.finish("length"))
        else:
            logits = self._runner.logits(hidden[-1:], last_token(mix))[0]
            self._runner.check(logits)
            self.scheduler.filled(running)
            self._accept(running, logits)
        if running.sequence.finish_reason is not None:
            self._leave(running)
        elif self._options.lookup:
            ids = (*running.request.prompt_ids, *running.sequence.output_ids)
            running.lookup = PromptLookup(ids, self._options.lookup)

    def _seat_for(self, running: Running) -> Seat:
        """With what the cache holds of the prompt, but for two tokens: see `_fill_piece`."""
        request = running.request
        # Keys are of the experts that a whole prompt chose, or of adapters that it weighed.
        own = self._xlora is not None or self._loaded.config.pools
        shared = self._options.prefix_cache and not own
        span = running.sequence.span
        adapters = () if running.lease is None else running.lease.key
        # What keys and values depend on besides the tokens.
        key = (self._loaded.config.turning(span), self._loaded.weights_version, adapters)
        seat = Seat(self._pool, self._runner.cache, span, key, shared=shared)
        if self._xlora is not None:
            first = Seat(self._pool, self._runner.cache, span, key, shared=False)
            running.scalings = self._xlora.begin(first, len(request.prompt_ids))
        if shared and request.prompt_logprobs is None:
            running.cached_tokens = seat.reuse(request.prompt_ids[:-2])
            self._counts["cached"] += running.cached_tokens
        return seat

    def _score(self, running: Running, rows: Tensor, ids: SequenceOf[int]) -> None:
        """Log probabilities of the prompt's tokens behind each of this piece."""
        wanted = running.request.prompt_logprobs
        assert wanted is not None
        for row, token in zip(rows, ids[1:], strict=False):
            running.prompt_logprobs.append(logprobs(row, token, wanted))

    def _write(self, all_running: SequenceOf[Running]) -> None:
        """A step of writing: a token for each, and as many more as were foreseen."""
        proposed = [self._proposed(running, len(all_running)) for running in all_running]
        started = time.perf_counter()
        try:
            rows = self._decode(all_running, proposed)
        except Exception as error:
            if len(all_running) == 1:
                return self._fail(all_running[0], error)
            log.warning("a step failed (%s); its requests go on one by one", error)
            for running in all_running:
                self._write((running,))
            return None
        self._cost.observe(len(rows), time.perf_counter() - started)
        sound = is_finite(rows, threads=1)
        at = 0
        for running, more in zip(all_running, proposed, strict=True):
            own = rows[at : at + 1 + len(more)]
            at += len(own)
            try:
                if not sound:
                    self._runner.check(own)
                self._take(running, own, more)
            except Exception as error:
                self._fail(running, error)
        return None

    def _proposed(self, running: Running, rows: int) -> SequenceOf[int]:
        place = _seat(running).place
        if running.lookup is None:
            return ()
        # One token of the span is left for what the last proposal's logits choose.
        return running.lookup.propose(self._cost, rows, place.span - place.length - 2)

    def _decode(
        self, all_running: SequenceOf[Running], proposed: SequenceOf[SequenceOf[int]]
    ) -> Tensor:
        """Logits `[N, V]` after each request's last token and after what was proposed."""
        ids = [
            [*running.last_ids, *more] for running, more in zip(all_running, proposed, strict=True)
        ]
        for running, new in zip(all_running, ids, strict=True):
            _seat(running).make_room(len(new))
        places = [_seat(running).place for running in all_running]
        if self._xlora is None:
            leases = [running.lease for running in all_running]
            mix = self._loaded.adapters.mix_of(leases, [len(new) for new in ids])
        else:
            mix = self._xlora.step([_scalings(running) for running in all_running], places, ids)
        return self._runner.decode(places, ids, mix)

    def _take(self, running: Running, rows: Tensor, proposed: SequenceOf[int]) -> None:
        """Choose from each row in turn, as long as the choice is what the next row was for."""
        seat, before = _seat(running), running.last_ids
        kept = 0
        for kept, row in enumerate(rows, 1):
            token = self._accept(running, row)
            if running.lookup is not None:
                running.lookup.add(token)
            ended = running.sequence.finish_reason is not None
            if ended or kept > len(proposed) or token != proposed[kept - 1]:
                break
        running.proposed_tokens += len(proposed)
        running.accepted_tokens += kept - 1
        self._counts["proposed"] += len(proposed)
        self._counts["accepted"] += kept - 1
        seat.place.length -= len(rows) - kept
        kept_ids = [*before, *proposed[: kept - 1]]
        seat.record(kept_ids)
        if running.scalings is not None:
            running.scalings.settle(seat.place.length, kept_ids)
        if running.sequence.finish_reason is not None:
            self._leave(running)

    def _accept(self, running: Running, logits: Tensor) -> int:
        delta = running.sequence.accept(logits)
        running.wrote()
        self._counts["generated"] += 1
        token = delta.token_id
        assert token is not None
        if delta.finish_reason is None and running.is_late:
            held = running.sequence.finish("length").text
            delta = replace(delta, text=delta.text + held, finish_reason="length")
        self._give(running, delta)
        return token

    def _give(self, running: Running, delta: Delta) -> None:
        if running.request.prompt_logprobs is not None and len(running.sequence.output_ids) <= 1:
            delta = replace(delta, prompt_logprobs=tuple(running.prompt_logprobs))
        self._deliver(running, delta)
        if delta.finish_reason is not None:
            self.scheduler.remove(running)

    def _fail(self, running: Running, error: Exception) -> None:
        self._leave(running, keep=False)
        self._deliver(running, error)

    def _deliver(self, running: Running, event: Event) -> None:
        try:
            running.deliver(event)
        except Exception:
            # Its reader is at fault, not the other requests.
            log.exception("request %s has no reader any more", running.request.id)
            running.abandoned = True

    def _leave(self, running: Running, *, keep: bool = True) -> None:
        self.scheduler.remove(running)
        running.end(keep=keep)


def _seat(running: Running) -> Seat:
    assert running.seat is not None, "it does not run"
    return running.seat


def _scalings(running: Running) -> Scalings:
    assert running.scalings is not None, "it does not run"
    return running.scalings
