"""Sampling against plain numpy, transformers and OpenAI's formula; every bad value is named."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from starquill.engine.params import check_params
from starquill.engine.sampling import Sampler, logprobs
from starquill.errors import BadRequestError
from starquill.types import SamplingParams

VOCAB = 12
thorough = settings(deadline=None, derandomize=True, max_examples=40)


def random_logits(seed: int = 0, size: int = VOCAB) -> Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def draws(params: SamplingParams, logits: Tensor, count: int) -> list[int]:
    sampler = Sampler(params, ())
    return [sampler.choose(logits) for _ in range(count)]


# --- greedy, seeds, distribution ---


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30, unique=True))
@thorough
def test_temperature_zero_takes_the_likeliest(values: list[float]) -> None:
    token = Sampler(SamplingParams(), ()).choose(torch.tensor(values))
    assert token == int(np.argmax(np.array(values)))


@pytest.mark.parametrize("extra", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_filters_at_their_strictest_are_greedy(extra: dict[str, Any]) -> None:
    logits = random_logits()
    chosen = draws(SamplingParams(temperature=2.0, seed=0, **extra), logits, 50)
    assert set(chosen) == {int(logits.argmax())}


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63, -(2**63)])
def test_a_seed_repeats(seed: int) -> None:
    params = SamplingParams(temperature=1.5, seed=seed)
    logits = random_logits()
    assert draws(params, logits, 60) == draws(params, logits, 60)


def test_seeds_differ() -> None:
    logits = random_logits()
    runs = {tuple(draws(SamplingParams(temperature=2.0, seed=s), logits, 40)) for s in range(8)}
    assert len(runs) == 8


def test_without_a_seed_one_is_chosen_and_told() -> None:
    logits = random_logits()
    first, second = (Sampler(SamplingParams(temperature=2.0), ()) for _ in range(2))
    assert first.seed is not None
    assert first.seed != second.seed
    chosen = [first.choose(logits) for _ in range(60)]
    assert chosen == draws(SamplingParams(temperature=2.0, seed=first.seed), logits, 60)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_samples_have_the_softmax_distribution(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -0.5, 0.7, -1.5])
    count = 4000
    chosen = draws(SamplingParams(temperature=temperature, seed=7), logits, count)
    weights = np.exp(logits.numpy().astype(np.float64) / temperature)
    expected = count * weights / weights.sum()
    seen = np.bincount(chosen, minlength=5)
    # Chi-square with 4 degrees of freedom passes 25 once in 20,000 runs; the seed is fixed.
    assert ((seen - expected) ** 2 / expected).sum() < 25


# --- filters ---


def allowed_by_filters(values: Sequence[float], params: SamplingParams) -> set[int]:
    """The tokens that top-k, then top-p, then min-p leave: plain sorting and adding."""
    order = sorted(range(len(values)), key=lambda i: -values[i])
    if params.top_k:
        order = order[: params.top_k]
    weights = {i: math.exp((values[i] - values[order[0]]) / params.temperature) for i in order}
    total = sum(weights.values())
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if mass >= params.top_p:
            break
    return {i for i in kept if weights[i] >= params.min_p * weights[order[0]]}


# Values 1/8 apart and at most 1 from each other: every allowed token is drawn soon.
near = st.lists(st.integers(0, 8), min_size=2, max_size=6, unique=True).map(
    lambda steps: [step / 8 for step in steps]
)


def assert_draws_exactly_the_allowed(values: list[float], **filters: Any) -> None:
    params = SamplingParams(temperature=0.9, seed=3, **filters)
    chosen = set(draws(params, torch.tensor(values), 400))
    assert chosen == allowed_by_filters(values, params)


@given(near, st.integers(0, 8))
@thorough
def test_top_k(values: list[float], top_k: int) -> None:
    assert_draws_exactly_the_allowed(values, top_k=top_k)


# Odd multiples of 1/256: rounding never decides on which side of a limit a token is.
limits = st.integers(0, 127).map(lambda n: (2 * n + 1) / 256)


@given(near, limits)
@thorough
def test_top_p(values: list[float], top_p: float) -> None:
    assert_draws_exactly_the_allowed(values, top_p=top_p)


@given(near, limits)
@thorough
def test_min_p(values: list[float], min_p: float) -> None:
    assert_draws_exactly_the_allowed(values, min_p=min_p)


@given(near, st.integers(0, 6), limits, limits)
@thorough
def test_filters_together(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    assert_draws_exactly_the_allowed(values, top_k=top_k, top_p=top_p, min_p=min_p)


def test_filters_work_within_the_allowed_ids() -> None:
    """Healing's restriction comes first: filters choose among what it leaves."""
    logits = torch.tensor([9.0, 8.0, 1.0, 0.9, 0.8])
    params = SamplingParams(temperature=1.0, seed=0, top_k=2)
    sampler = Sampler(params, ())
    assert {sampler.choose(logits, [2, 3, 4]) for _ in range(100)} == {2, 3}
    assert Sampler(SamplingParams(), ()).choose(logits, [4, 3]) == 3


# --- penalties and bias ---


def assert_score(
    params: SamplingParams, history: tuple[list[int], list[int]], logits: Tensor, expected: Tensor
) -> None:
    """Each token's changed logit is `expected`: it loses to a probe just above, not below."""
    prompt, output = history
    probe = logits.numel()
    for token, above in itertools.product(range(probe), (True, False)):
        sampler = Sampler(params, tuple(prompt))
        for earlier in output:
            sampler.choose(torch.zeros(probe + 1), [earlier])
        rival = expected[token] + (1e-3 if above else -1e-3)
        chosen = sampler.choose(torch.cat((logits, rival[None])), [token, probe])
        assert chosen == (probe if above else token)


histories = st.tuples(
    st.lists(st.integers(0, VOCAB - 1), max_size=6), st.lists(st.integers(0, VOCAB - 1), max_size=6)
)


@given(histories, st.sampled_from([0.5, 1.0, 1.1, 1.3, 5.0]), st.integers(0, 5))
@thorough
def test_repetition_penalty_equals_transformers(
    history: tuple[list[int], list[int]], penalty: float, seed: int
) -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = random_logits(seed)
    expected = logits.clone()
    if any(history):
        seen = torch.tensor([history[0] + history[1]])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(seen, logits[None].clone())[0]
    assert_score(SamplingParams(repetition_penalty=penalty), history, logits, expected)


def openai_logits(logits: Tensor, output: list[int], params: SamplingParams) -> Tensor:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence"""
    counts = np.bincount(output, minlength=len(logits)) if output else np.zeros(len(logits))
    subtracted = counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    return logits - torch.tensor(subtracted, dtype=torch.float32)


@given(histories, st.sampled_from([-2.0, 0.0, 0.7, 2.0]), st.sampled_from([-1.5, 0.0, 0.3, 2.0]))
@thorough
def test_presence_and_frequency_penalties_are_openais(
    history: tuple[list[int], list[int]], presence: float, frequency: float
) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    logits = random_logits()
    assert_score(params, history, logits, openai_logits(logits, history[1], params))


@given(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=16)))
@thorough
def test_logit_bias_is_added(bias: dict[int, float]) -> None:
    logits = random_logits()
    expected = logits + torch.tensor([bias.get(i, 0.0) for i in range(VOCAB)])
    assert_score(SamplingParams(logit_bias=bias), ([], []), logits, expected)


def test_bias_and_penalties_together_in_the_documented_order() -> None:
    params = SamplingParams(
        logit_bias={1: 4.0, 2: -3.0},
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    )
    history = ([2, 3], [1, 1, 4])
    logits = random_logits(3)
    biased = logits.clone()
    biased[1] += 4.0
    biased[2] -= 3.0
    for token in {1, 2, 3, 4}:
        biased[token] *= 1 / 1.5 if biased[token] > 0 else 1.5
    assert_score(params, history, logits, openai_logits(biased, history[1], params))


EVERYTHING = SamplingParams(
    temperature=0.8,
    seed=0,
    top_k=5,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.4,
    presence_penalty=1.0,
    frequency_penalty=0.5,
    logit_bias={0: 5.0},
)


@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING])
@pytest.mark.parametrize("allowed", [None, [0, 3, 4]])
def test_logits_are_left_as_they_are(params: SamplingParams, allowed: list[int] | None) -> None:
    logits = random_logits()
    before = logits.clone()
    sampler = Sampler(params, (1, 2, 3))
    for _ in range(5):
        sampler.choose(logits, allowed)
        logprobs(logits, 2, 4)
    assert torch.equal(logits, before)


# --- log probabilities ---


@given(st.integers(0, 20), st.integers(0, VOCAB - 1), st.integers(0, 9))
@thorough
def test_logprobs_are_the_log_softmax(top: int, token: int, seed: int) -> None:
    logits = random_logits(seed)
    values = logits.numpy().astype(np.float64)
    expected = values - np.log(np.exp(values).sum())
    result = logprobs(logits, token, top)
    assert result.chosen == pytest.approx(expected[token], abs=1e-5)
    best = np.argsort(-expected)[:top]
    assert [entry.token_id for entry in result.top] == best.tolist()
    assert [entry.logprob for entry in result.top] == pytest.approx(expected[best], abs=1e-5)


def test_probabilities_sum_to_one() -> None:
    result = logprobs(random_logits(size=20), 0, 20)
    assert math.fsum(math.exp(entry.logprob) for entry in result.top) == pytest.approx(1, abs=1e-5)


# --- parameters ---

BAD: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.5, "3", None, True],
    "temperature": [-0.1, 101, math.nan, math.inf, "1", None, True, 10**400],
    "top_p": [-0.1, 1.1, math.nan, -math.inf, "1", None],
    "min_p": [-0.1, 1.1, math.nan, "1", None],
    "top_k": [-1, 0.5, "3", None, False],
    "repetition_penalty": [0, -1, 101, math.nan, "1"],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.inf],
    "seed": [0.5, "7", True],
    "logprobs": [-1, 21, 1.0, True, "5"],
    "stop": [b"bytes", [1], (1,), None],
    "logit_bias": [{-1: 0.0}, {VOCAB: 0.0}, {"1": 0.0}, {True: 0.0}, {1: math.nan}, {1: "x"}],
}


CASES = [
    pytest.param(name, value, id=f"{name}={value!r}"[:40])
    for name, values in BAD.items()
    for value in values
]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(BadRequestError, match=rf"^{name} .*") as caught:
        check_params(SamplingParams(**{name: value}), VOCAB)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_every_bad_value_is_named_at_once() -> None:
    with pytest.raises(BadRequestError) as caught:
        check_params(SamplingParams(**{name: values[0] for name, values in BAD.items()}), VOCAB)
    for name in BAD:
        assert len(re.findall(rf"(?:^|; ){name} ", str(caught.value))) == 1


@pytest.mark.parametrize(
    "good",
    [
        SamplingParams(),
        EVERYTHING,
        SamplingParams(max_tokens=0, temperature=100, top_p=0, min_p=1, top_k=10**9, logprobs=20),
        SamplingParams(seed=-(2**63), stop=("", "x"), logit_bias={VOCAB - 1: -100}, logprobs=0),
    ],
)
def test_good_values_pass(good: SamplingParams) -> None:
    check_params(good, VOCAB)


any_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100) | st.sampled_from([1e-300, 1e-40, 1e-30, 5e-324]),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 20),
    min_p=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**70),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB - 1),
        st.floats(-100, 100) | st.sampled_from([1e39, -1e39, 3e38, 1e300]),
    ),
)


BIG_BIAS = SamplingParams(temperature=1.0, repetition_penalty=0.01, logit_bias={0: 3e38})
BIG_BAN = SamplingParams(temperature=1.0, repetition_penalty=100, logit_bias={0: -3e38})


@given(any_params, st.sets(st.integers(0, VOCAB - 1), min_size=1) | st.none(), st.integers(0, 3))
@example(BIG_BIAS, None, 0)
@example(BIG_BAN, {0}, 0)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_what_check_params_accepts_can_be_sampled(
    params: SamplingParams, allowed: set[int] | None, seed: int
) -> None:
    try:
        check_params(params, VOCAB)
    except BadRequestError:
        return
    sampler = Sampler(params, (0, 1))
    for _ in range(3):
        token = sampler.choose(random_logits(seed), None if allowed is None else sorted(allowed))
        assert token in (allowed or range(VOCAB))


@pytest.mark.parametrize("temperature", [1e-3, 1e-9, 1e-38, 1e-45, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = random_logits()
    chosen = draws(SamplingParams(temperature=temperature, seed=0), logits, 20)
    assert set(chosen) == {int(logits.argmax())}
