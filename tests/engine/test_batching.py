"""Many requests in one engine: each gets what it would get alone, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from starquill.engine.engine import Engine
from starquill.engine.generation import Generation
from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.errors import BadRequestError, BusyError, CapacityError, NumericsError
from starquill.loading import load
from starquill.types import Delta, EngineOptions, GenerateRequest, SamplingParams
from tests import tiny

CONTEXT, WINDOW = 600, 150
NO_END = {0: -100.0}
Outcome = list[tuple[int | None, str, float | None]]


def _load(folder: Path, quant: str | None, window: int | None = WINDOW) -> LoadedModel:
    torch.set_num_threads(1)
    raw = tiny.config(sliding_window=window, max_position_embeddings=CONTEXT)
    return load(tiny.write_checkpoint(folder, raw), quant=quant)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return _load(tmp_path_factory.mktemp("quantized"), "4-g32")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return _load(tmp_path_factory.mktemp("dense"), None)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Computes in bfloat16, for which attention has no native kernel."""
    torch.set_num_threads(1)
    raw = tiny.config(sliding_window=WINDOW, max_position_embeddings=CONTEXT)
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("half"), raw)
    return load(folder, dtype="bfloat16")


@pytest.fixture(params=["quantized", "dense", "half"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    model: LoadedModel = request.getfixturevalue(request.param)
    return model


def outcome(deltas: Iterable[Delta]) -> Outcome:
    """Ids, text and the chosen tokens' log probabilities, to the last bit."""
    return [(d.token_id, d.text, d.logprobs.chosen if d.logprobs else None) for d in deltas]


def requests(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of mixed lengths, some beginning alike, with mixed ways to choose."""
    chance = random.Random(seed)
    common = tiny.random_ids(300, seed=seed)
    made = []
    for n in range(count):
        own = tiny.random_ids(chance.randrange(1, 60), seed=100 * seed + n)
        prompt = [*common[: chance.choice([0, 0, 70, 200, 300])], *own]
        params = SamplingParams(
            max_tokens=chance.randrange(1, 40),
            temperature=chance.choice([0.0, 0.0, 1.5]),
            top_p=chance.choice([1.0, 0.8]),
            repetition_penalty=chance.choice([1.0, 1.2]),
            seed=n,
            logprobs=0,
            logit_bias=NO_END,
        )
        made.append((prompt, params))
    return made


def arriving(engine: Engine, starts: Sequence[tuple[Any, ...]], seed: int) -> list[Outcome]:
    """All of `starts`, joining at random times; a few more come and are cancelled."""
    chance = random.Random(seed)
    seen: list[Outcome] = [[] for _ in starts]
    running: dict[int, Generation] = {}
    waiting = list(range(len(starts)))
    extras: list[Generation] = []
    while waiting or running:
        if waiting and chance.random() < 0.5:
            n = waiting.pop(0)
            running[n] = engine.generate(*starts[n])
        if chance.random() < 0.2:
            prompt = tiny.random_ids(chance.randrange(1, 300), seed=len(waiting))
            extras.append(engine.generate(prompt))
        if extras and chance.random() < 0.3:
            extras.pop().cancel()
        for n, generation in list(running.items()):
            if (delta := next(generation, None)) is None:
                del running[n]
            else:
                seen[n] += outcome([delta])
    for extra in extras:
        extra.cancel()
    return seen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_company_changes_nothing(loaded: LoadedModel, seed: int, slots: int) -> None:
    """Not a bit of a log probability, with mixed lengths, seeds, arrivals and cancellations."""
    starts = requests(8, seed)
    options = EngineOptions(slots=slots, prefix_cache=False, prefill_chunk=64)
    alone = [outcome(Engine(loaded, options).generate(*start)) for start in starts]
    engine = Engine(loaded, options)
    assert arriving(engine, starts, seed) == alone
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cache_bytes_used) == (0, 0, 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("room", [None, 16], ids=["plenty", "little room"])
def test_a_cached_run_equals_a_cold_one(quantized: LoadedModel, seed: int, room: Any) -> None:
    """To the last bit where kernels are native, also past the window and where blocks were lost."""
    starts = requests(10, seed)
    block = tiny.cache_block_bytes(quantized)
    options = EngineOptions(
        slots=4, prefill_chunk=64, cache_bytes=None if room is None else room * block
    )
    cold = [outcome(Engine(quantized, options).generate(*start)) for start in starts]
    engine = Engine(quantized, options)
    assert arriving(engine, starts, seed) == cold
    assert arriving(engine, starts, seed + 10) == cold
    assert engine.stats().cached_tokens > 100
    assert engine.stats().cache_bytes_used <= engine.stats().cache_bytes


@pytest.mark.parametrize("window", [8, 100, None])
@pytest.mark.parametrize("cut", [0, 1, 12, 63, 64, 65, 119])
def test_b09_a_prompt_that_turns_off_midway(tmp_path: Path, window: int | None, cut: int) -> None:
    """B09: after the ring had wrapped, rewinding it scrambled keys; here they are found or not."""
    loaded = _load(tmp_path, "4-g32", window)
    ids = tiny.random_ids(120)
    params = SamplingParams(max_tokens=30, logprobs=0, logit_bias=NO_END)
    other = [*ids[:cut], *tiny.random_ids(9, seed=5)]
    engine = Engine(loaded)
    for prompt in (ids, other, ids, other[:-1], ids[:cut] or [3]):
        generation = engine.generate(prompt, params)
        cold = outcome(Engine(loaded).generate(prompt, params))
        assert outcome(generation) == cold


def test_keys_that_turn_otherwise_are_not_reused(tmp_path: Path) -> None:
    """Dynamic rotary turns a sequence's keys by the length that it may get."""
    scaling = {"type": "dynamic", "factor": 4.0}
    raw = tiny.config(max_position_embeddings=64, rope_scaling=scaling, sliding_window=None)
    loaded = load(tiny.write_checkpoint(tmp_path, raw))
    ids = tiny.random_ids(90)
    engine = Engine(loaded)
    for limit, cached in ((20, 0), (60, 0), (20, 88)):
        params = SamplingParams(max_tokens=limit, logprobs=0, logit_bias=NO_END)
        generation = engine.generate(ids, params)
        found = [logprob for *_, logprob in outcome(generation)]
        cold = [logprob for *_, logprob in outcome(Engine(loaded).generate(ids, params))]
        assert found == pytest.approx(cold, abs=1e-5)
        assert generation.stats.cached_tokens == cached


def test_keys_of_other_weights_are_not_reused(tmp_path: Path) -> None:
    """B43's kind: a cache that outlives what it was computed with."""
    loaded = _load(tmp_path, "8-g32")
    engine, ids = Engine(loaded), tiny.random_ids(100)
    params = SamplingParams(max_tokens=5, logprobs=0, logit_bias=NO_END)
    before = outcome(engine.generate(ids, params))
    loaded.requantize("3-g32")
    after = outcome(engine.generate(ids, params))
    assert after == outcome(Engine(loaded).generate(ids, params)) != before


def test_a_healed_prompt_may_take_more_tokens_than_it_gave(tmp_path: Path) -> None:
    """The text of one token spelled in three, over the end of the last block that was planned."""
    loaded = _load(tmp_path, None)
    d, e, f = loaded.require_tokenizer().encode("d e f")[::2]
    for beside in (0, 2):
        engine = Engine(loaded, EngineOptions(lookup=0))
        others = [engine.generate([5], SamplingParams(max_tokens=80)) for _ in range(beside)]
        for other in others:
            next(other)
        params = SamplingParams(max_tokens=4, logit_bias={d: 90.0, e: 80.0, f: 70.0, **NO_END})
        request = GenerateRequest("r", tuple(tiny.random_ids(60)), params, heal=b"def")
        deltas = list(engine.generate(request))
        assert [delta.is_prompt for delta in deltas] == [True] * 3 + [False] * 4
        for other in others:
            other.cancel()


def test_native_code_never_sees_a_place_past_a_table(dense: LoadedModel) -> None:
    runner = Runner(dense, 4)
    place = runner.cache.place(60)
    runner.prefill(place, tiny.random_ids(64))
    with pytest.raises(IndexError, match="past a sequence of 60"):
        runner.decode([place], [[5]])
    with pytest.raises(IndexError, match="past a sequence of 60"):
        runner.advance(place, [5, 6])


def test_what_an_answer_wrote_is_found_too(dense: LoadedModel) -> None:
    engine = Engine(dense)
    prompt = tiny.random_ids(30)
    written = [
        d.token_id or 0 for d in engine.generate(prompt, SamplingParams(40, logit_bias=NO_END))
    ]
    again = engine.generate([*prompt, *written, 9, 9, 9])
    next(again)
    assert again.stats.cached_tokens == 30 + 39  # the last was never computed
    again.cancel()


def test_a_cached_prompt_is_told(dense: LoadedModel) -> None:
    engine = Engine(dense)
    prompt = tiny.random_ids(100)
    for expected in (0, 98):
        generation = engine.generate(prompt, SamplingParams(max_tokens=2))
        list(generation)
        assert generation.stats.cached_tokens == expected
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (200, 98)
    assert stats.cache_bytes_used > 0


def test_no_prefix_cache(dense: LoadedModel) -> None:
    engine = Engine(dense, EngineOptions(prefix_cache=False))
    for _ in range(2):
        generation = engine.generate(tiny.random_ids(100), SamplingParams(max_tokens=2))
        list(generation)
        assert generation.stats.cached_tokens == 0
    assert engine.stats().cache_bytes_used == 0


def test_streams_flow_while_a_long_prompt_is_computed(dense: LoadedModel) -> None:
    engine = Engine(dense, EngineOptions(prefill_chunk=50, lookup=0))
    stream = engine.generate([5], SamplingParams(max_tokens=100, logit_bias=NO_END))
    next(stream)
    long = engine.generate(tiny.random_ids(500), SamplingParams(max_tokens=1))
    before = engine.stats().steps
    for _ in range(10):
        next(stream)
    assert engine.stats().steps - before == 19  # a step of writing after every piece
    assert len(list(long)) == 1


# --- limits ---


def test_a_full_queue_is_busy(dense: LoadedModel) -> None:
    engine = Engine(dense, EngineOptions(slots=2, queue=1))
    running = [engine.generate([5], SamplingParams(max_tokens=5)) for _ in range(3)]
    with pytest.raises(BusyError, match="3 requests"):
        engine.generate([5])
    assert all(len(list(generation)) > 0 for generation in running)
    engine.generate([5]).cancel()


def test_an_abandoned_request_frees_its_place(dense: LoadedModel) -> None:
    """B53: also while it waits, and while its prompt is computed."""
    engine = Engine(dense, EngineOptions(slots=1, queue=2, prefill_chunk=50))
    params = SamplingParams(max_tokens=400, logit_bias=NO_END)
    writing = engine.generate([5], params)
    next(writing)
    queued = engine.generate([6], params)
    del writing
    other = engine.generate(tiny.random_ids(300), SamplingParams(max_tokens=1))
    del queued
    before = engine.stats().steps
    assert len(list(other)) == 1
    assert engine.stats().steps - before == 6  # the pieces of its own prompt, and no other's
    assert engine.stats().running == 0


def test_requests_wait_for_memory(dense: LoadedModel) -> None:
    block = tiny.cache_block_bytes(dense)
    engine = Engine(dense, EngineOptions(context=256, cache_bytes=7 * block, prefill_chunk=32))
    params = SamplingParams(max_tokens=150, logit_bias=NO_END)
    running = [engine.generate(tiny.random_ids(50, seed=n), params) for n in range(4)]
    engine.step()
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (1, 3)
    assert [len(list(generation)) for generation in running] == [150] * 4


def test_a_request_that_can_never_fit(dense: LoadedModel) -> None:
    block = tiny.cache_block_bytes(dense)
    with pytest.raises(CapacityError, match="sequence of 600 tokens"):
        Engine(dense, EngineOptions(cache_bytes=3 * block))
    engine = Engine(dense, EngineOptions(context=64, cache_bytes=3 * block))
    with pytest.raises(CapacityError, match="64"):
        engine.generate(tiny.random_ids(64))
    assert len(list(engine.generate(tiny.random_ids(60), SamplingParams(logit_bias=NO_END)))) == 4


@pytest.mark.parametrize(
    "options", [{"slots": 0}, {"queue": -1}, {"prefill_chunk": 0}, {"lookup": -1}, {"context": 1}]
)
def test_options_that_make_no_sense(dense: LoadedModel, options: dict[str, int]) -> None:
    with pytest.raises(BadRequestError, match=f"{next(iter(options))} is "):
        Engine(dense, EngineOptions(**options))  # type: ignore[arg-type]


# --- failures ---


class Failing:
    """A model that fails in a step that has `token` among its new ones."""

    def __init__(self, model: Any, token: int) -> None:
        self._model, self._token = model, token

    def hidden(self, batch: Any) -> Any:
        if bool((batch.ids == self._token).any()):
            raise RuntimeError("cannot compute this")
        return self._model.hidden(batch)

    def logits(self, hidden: Any) -> Any:
        return self._model.logits(hidden)


class Poisoned(Failing):
    """One whose values are not finite for sequences that end in `token`."""

    def hidden(self, batch: Any) -> Any:
        hidden = self._model.hidden(batch)
        return hidden.masked_fill((batch.ids == self._token)[..., None], float("nan"))


@pytest.mark.parametrize(("kind", "error"), [(Failing, RuntimeError), (Poisoned, NumericsError)])
@pytest.mark.parametrize("where", ["prompt", "written"])
def test_b54_a_failing_request_fails_alone(
    dense: LoadedModel, kind: Any, error: type[Exception], where: str
) -> None:
    """B54: one request that fails inside the model killed the worker, or the whole batch."""
    import dataclasses

    bad = 300
    broken = dataclasses.replace(dense, model=kind(dense.model, bad))
    params = SamplingParams(max_tokens=20, logprobs=0, logit_bias={0: -100.0, bad: -100.0})
    prompts = [tiny.random_ids(n, vocab_size=bad, seed=n) for n in (3, 80, 40)]
    alone = [outcome(Engine(dense).generate(prompt, params)) for prompt in prompts]
    engine = Engine(broken)
    running = [engine.generate(prompt, params) for prompt in prompts]
    for generation in running:
        next(generation)
    if where == "prompt":
        guilty = engine.generate([5, bad], params)
    else:
        guilty = engine.generate([5], SamplingParams(max_tokens=20, logit_bias={bad: 100.0}))
    with pytest.raises(error):
        list(guilty)
    assert [outcome(generation) for generation in running] == [rest[1:] for rest in alone]
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert outcome(engine.generate(prompts[0], params)) == alone[0]


def test_a_reader_that_fails_ends_only_its_request(dense: LoadedModel) -> None:
    engine = Engine(dense)

    def refuse(event: object) -> None:
        raise RuntimeError("gone")

    engine.submit(GenerateRequest("r", (5,), SamplingParams(max_tokens=30)), refuse)
    other = engine.generate([6], SamplingParams(max_tokens=5, logit_bias=NO_END))
    assert len(list(other)) == 5
    assert engine.stats().running == 0


# --- what else a request may ask for ---


@pytest.mark.parametrize("limit", [0, 3])
@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_log_probabilities_of_a_prompt(dense: LoadedModel, limit: int, chunk: int) -> None:
    prompt = tiny.random_ids(150)
    params = SamplingParams(max_tokens=limit, logprobs=2)
    request = GenerateRequest("r", tuple(prompt), params, prompt_logprobs=2)
    engine = Engine(dense, EngineOptions(prefill_chunk=chunk))
    list(engine.generate(prompt, SamplingParams(max_tokens=1)))  # cached, which must not matter
    deltas = list(engine.generate(request))
    expected = tiny.our_logits(dense, prompt).log_softmax(-1)
    told = deltas[0].prompt_logprobs
    assert told is not None
    assert told[0] is None
    assert len(told) == len(prompt)
    for n, entry in enumerate(told[1:], 1):
        assert entry is not None
        assert entry.chosen == pytest.approx(float(expected[n - 1, prompt[n]]), abs=1e-4)
        assert len(entry.top) == 2
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def test_a_prompt_too_long_to_score(dense: LoadedModel) -> None:
    params = SamplingParams(max_tokens=0)
    fits = GenerateRequest("r", tuple(tiny.random_ids(CONTEXT)), params, prompt_logprobs=0)
    assert len(list(Engine(dense).generate(fits))) == 1
    long = GenerateRequest("r", tuple(tiny.random_ids(CONTEXT + 1)), params, prompt_logprobs=0)
    with pytest.raises(CapacityError, match="601"):
        Engine(dense).generate(long)


def test_time_to_write_is_bounded(dense: LoadedModel) -> None:
    params = SamplingParams(max_tokens=500, logit_bias=NO_END)
    request = GenerateRequest("r", (5,), params, max_seconds=0.0)
    deltas = list(Engine(dense).generate(request))
    assert len(deltas) < 3
    assert deltas[-1].finish_reason == "length"
