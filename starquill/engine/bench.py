"""Prefill and decode rates of a loaded model. Measures and computes; prints nothing."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from starquill import __version__
from starquill.adapters.store import Lease
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.errors import BadRequestError, listing
from starquill.kernels.native import native
from starquill.nn.cache import blocks_for
from starquill.nn.experts import ExpertLinear
from starquill.nn.linear import Embedding, Linear
from starquill.nn.lora import AdapterMix

MOST_BATCH = 1024
Clock = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    `prefill` computes a prompt of `tokens` into an empty cache; `decode` appends `tokens` to each
    of `batch` sequences together, one at a time, with `depth` tokens before them.
    """

    kind: Literal["prefill", "decode"]
    tokens: int
    depth: int = 0
    batch: int = 1

    def __str__(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.tokens}"
        return f"decode {self.tokens} at depth {self.depth}, batch {self.batch}"


@dataclass(frozen=True)
class BenchPlan:
    """What to measure: prompts of each length, then decoding at each depth with each batch."""

    prompts: tuple[int, ...] = (16, 256, 1024)
    depths: tuple[int, ...] = (0, 512)
    batches: tuple[int, ...] = (1, 4)
    tokens: int = 32
    rounds: int = 3

    def cases(self) -> list[Case]:
        """A prompt of 0 tokens stands for none, as does decoding 0 tokens."""
        cases = [Case("prefill", prompt) for prompt in self.prompts if prompt]
        if self.tokens:
            cases += [
                Case("decode", self.tokens, depth, batch)
                for depth in self.depths
                for batch in self.batches
            ]
        return cases

    def check(self) -> None:
        """Raise BadRequestError for what makes no sense with any model."""
        if self.rounds < 1:
            raise BadRequestError(f"rounds is {self.rounds} (expected at least 1)")
        lengths = (*self.prompts, *self.depths, self.tokens)
        if min(lengths) < 0:
            raise BadRequestError(f"a length is {min(lengths)} (expected at least 0)")
        for batch in self.batches:
            if not 1 <= batch <= MOST_BATCH:
                raise BadRequestError(f"batch is {batch} (expected 1 to {MOST_BATCH})")
        if not self.cases():
            raise BadRequestError(
                "there is nothing to measure: prompt lengths and tokens to decode are all 0"
            )

    def check_context(self, context: int) -> None:
        """Raise BadRequestError naming every length that does not fit."""
        over = [f"a prompt of {length}" for length in self.prompts if length > context]
        if self.tokens:
            over += [
                f"{self.tokens} more at depth {depth}"
                for depth in self.depths
                if depth + self.tokens > context
            ]
        if over:
            raise BadRequestError(
                f"the context has {context} tokens, too few for {listing(over)}; choose less"
            )


@dataclass(frozen=True)
class Measurement:
    """What a case took: `seconds` of each round; `weight_bytes` are read by a step of decoding."""

    case: Case
    seconds: tuple[float, ...]
    weight_bytes: int

    @property
    def rate(self) -> float:
        """Tokens a second, of all sequences together: the median of the rounds."""
        return statistics.median(self._rates())

    @property
    def deviation(self) -> float:
        """The standard deviation of the rounds' rates; 0 for one round."""
        return statistics.stdev(self._rates()) if len(self.seconds) > 1 else 0.0

    @property
    def milliseconds(self) -> float:
        """For each token of a sequence: how long who reads it waits for the next."""
        return 1000 * statistics.median(self.seconds) / self.case.tokens

    @property
    def bytes_rate(self) -> float | None:
        """Bytes of weights read a second. None for prefill, which computes more than it reads."""
        if self.case.kind == "prefill":
            return None
        return self.weight_bytes * self.case.tokens / statistics.median(self.seconds)

    def _rates(self) -> list[float]:
        return [self.case.tokens * self.case.batch / seconds for seconds in self.seconds]


@dataclass(frozen=True)
class Subject:
    """What was measured, and on what. `schemes` counts how matrices of each kind are stored."""

    model: str
    schemes: dict[str, dict[str, int]]
    dtype: str
    weight_bytes: int
    threads: int
    instruction_set: str | None  # None where the native kernels are missing
    versions: dict[str, str] = field(default_factory=dict)
    adapters: dict[str, float] = field(default_factory=dict)


def subject(loaded: LoadedModel) -> Subject:
    schemes: dict[str, Counter[str]] = {}
    for name, module in loaded.model.named_modules():
        if isinstance(module, Linear | Embedding | ExpertLinear):
            stacked = isinstance(module, ExpertLinear)
            kind = ".".join(name.split(".")[-2 if stacked else -1 :])
            schemes.setdefault(kind, Counter())[module.weight.scheme] += 1
    return Subject(
        model=loaded.name,
        schemes={kind: dict(counts.most_common()) for kind, counts in schemes.items()},
        dtype=str(loaded.dtype).removeprefix("torch."),
        weight_bytes=weight_bytes(loaded),
        threads=torch.get_num_threads(),
        instruction_set=None if native is None else native.isa(),
        versions={
            "starquill": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )


def weight_bytes(loaded: LoadedModel, batch: int = 1) -> int:
    """Bytes of all matrices that a step of `batch` tokens is multiplied with.

    Of an embedding a token needs a row. Of experts those count that tokens go to: with several
    tokens as many as differ on average, were each expert as likely as any other.
    """
    matrices = [m.weight for m in loaded.model.modules() if isinstance(m, Linear)]
    stacks = [m.weight for m in loaded.model.modules() if isinstance(m, ExpertLinear)]
    total = sum({id(matrix): matrix.nbytes for matrix in matrices}.values())
    if stacks:
        share = loaded.config.num_experts_per_tok / loaded.config.num_experts  # type: ignore[attr-defined]
        total += round(sum(s.nbytes for s in stacks) * (1 - (1 - share) ** batch))
    return total


def measure(
    loaded: LoadedModel,
    case: Case,
    rounds: int,
    clock: Clock = time.perf_counter,
    *,
    lease: Lease | None = None,
) -> Measurement:
    """Run `case` once to warm up, then `rounds` times; with the adapters of `lease` in all rows."""
    run = (_prefills if case.kind == "prefill" else _decodes)(loaded, case, lease)
    seconds = []
    for _ in range(rounds + 1):
        action = next(run)
        started = clock()
        action()
        seconds.append(clock() - started)
    return Measurement(case, tuple(seconds[1:]), weight_bytes(loaded, case.batch))


def _mix(loaded: LoadedModel, lease: Lease | None, rows: int) -> AdapterMix | None:
    return loaded.adapters.mix_of([lease] * rows, [1] * rows)


def _prefills(loaded: LoadedModel, case: Case, lease: Lease | None) -> Iterator[Callable[[], None]]:
    """Each prompt into a cache of its own, which grows as it does for a new request."""
    ids, mix = _random_ids(loaded, case.tokens), _mix(loaded, lease, 1)
    while True:
        runner = Runner(loaded, blocks_for(case.tokens))

        def prefill(runner: Runner = runner) -> None:
            runner.prefill(runner.cache.place(case.tokens), ids, mix)

        yield prefill


def _decodes(loaded: LoadedModel, case: Case, lease: Lease | None) -> Iterator[Callable[[], None]]:
    """Each time from the same depth on."""
    mix = _mix(loaded, lease, case.batch)
    span = case.depth + case.tokens
    runner = Runner(loaded, case.batch * blocks_for(span))
    places = [runner.cache.place(span) for _ in range(case.batch)]
    if case.depth:
        for place in places:
            runner.prefill(place, _random_ids(loaded, case.depth), _mix(loaded, lease, 1))
    elif loaded.config.pools:  # some prompt must choose the experts
        for place in places:
            runner.prefill(place, _random_ids(loaded, 1), _mix(loaded, lease, 1))
    steps = [_random_ids(loaded, case.batch) for _ in range(case.tokens)]

    def decode() -> None:
        for ids in steps:
            runner.decode(places, [[token] for token in ids], mix)

    while True:
        # Not computed again for every round, which would take longer than what is measured.
        for place in places:
            place.length = case.depth
        yield decode


def _random_ids(loaded: LoadedModel, count: int) -> list[int]:
    return random.Random(count).choices(range(loaded.config.vocab_size), k=count)
