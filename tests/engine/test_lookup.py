"""Prompt lookup: what it proposes, when it pays, and that it never changes a text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.lookup import PromptLookup, StepCost
from starquill.loading import load
from starquill.types import EngineOptions, SamplingParams
from tests import tiny

NO_END = {0: -100.0}
SIX_TOKENS = dict.fromkeys(range(10, 16), 50.0)  # so that even a random text repeats itself


def cost_of(further: float) -> StepCost:
    """Steps in which each further row costs `further` of the first."""
    cost = StepCost()
    for rows in (1, 5):
        cost.observe(rows, 1 + further * (rows - 1))
    return cost


FREE = cost_of(0.01)


@pytest.mark.parametrize(
    ("ids", "limit", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5], 2, [6, 7]),
        ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5], 4, [6, 7, 1, 2]),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], 1, [9]),  # the latest
        ([7, 7, 7, 7, 7, 7], 3, [7, 7, 7]),  # goes on past its own end
        ([1, 2, 1, 2, 1, 2, 1], 4, [2, 1, 2, 1]),
        ([1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5], 3, []),
        ([1, 2, 3, 4], 3, []),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5], 0, []),
    ],
)
def test_what_followed_before_is_proposed(ids: list[int], limit: int, expected: list[int]) -> None:
    lookup = PromptLookup(ids, 8)
    lookup.chance = 0.99
    assert list(lookup.propose(FREE, 1, limit)) == expected


@given(st.lists(st.integers(0, 3), max_size=40))
def test_added_one_by_one_or_given_at_once(ids: list[int]) -> None:
    one, other = PromptLookup(ids, 8), PromptLookup([], 8)
    for token in ids:
        other.add(token)
    one.chance = other.chance = 0.9
    assert one.propose(FREE, 1, 8) == other.propose(FREE, 1, 8)


def test_it_stops_when_it_does_not_pay_and_begins_again() -> None:
    """A match whose guess is wrong lowers the chance, one that is right raises it: both are seen
    without proposing anything."""
    lookup, cost = PromptLookup([], 8), cost_of(0.2)
    chance = random.Random(0)
    for _ in range(60):
        for token in (1, 2, 3, 4, 5, chance.randrange(10, 10**6)):
            lookup.add(token)
    for token in (1, 2, 3, 4, 5):
        lookup.add(token)
    assert list(lookup.propose(cost, 1, 8)) == []
    for _ in range(30):
        for token in (1, 2, 3, 4, 5, 6):
            lookup.add(token)
    for token in (1, 2, 3, 4, 5):
        lookup.add(token)
    assert list(lookup.propose(cost, 1, 8)) == [6, 1, 2, 3, 4, 5, 6, 1]


def test_dear_rows_and_much_company_make_proposals_short() -> None:
    lookup = PromptLookup([1, 2, 3] * 5, 8)
    lookup.chance = 0.8
    lengths = [len(lookup.propose(cost_of(further), 1, 8)) for further in (0.02, 0.2, 0.5, 1.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert (lengths[0], lengths[-1]) == (8, 0)
    beside = [len(lookup.propose(cost_of(0.2), rows, 8)) for rows in (1, 4, 16, 64)]
    assert beside == sorted(beside, reverse=True)
    assert beside[-1] < beside[0]


def test_the_cost_of_a_row_is_that_of_measured_steps() -> None:
    assert StepCost().of(1) == (1, StepCost().of(5)[1])
    cost = StepCost()
    for _ in range(50):
        for rows in (1, 3, 9):
            cost.observe(rows, 0.02 + 0.003 * rows)
    assert cost.of(1)[1] == pytest.approx(0.003 / 0.023)
    assert cost.of(5)[0] == pytest.approx(0.035 / 0.023)


@pytest.fixture(scope="module", params=["4-g32", None], ids=["quantized", "dense"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    raw = tiny.config(sliding_window=100, max_position_embeddings=400)
    folder = tiny.write_checkpoint(tmp_path_factory.mktemp("model"), raw)
    return load(folder, quant=request.param)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_the_text_is_the_same_to_the_last_bit(
    loaded: LoadedModel, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also past the window, with penalties, beside others, and where proposals fail."""
    # How much is proposed, and so whether some of it fails, must not depend on how long steps take.
    cost = cost_of(0.2)
    monkeypatch.setattr("starquill.engine.stepper.StepCost", lambda: cost)
    monkeypatch.setattr(StepCost, "observe", lambda *_: None)
    proposed = accepted = 0
    for seed in range(6):
        prompt = [10, 11, 12, 13, 14, 15] * 12
        params = SamplingParams(
            max_tokens=120, temperature=temperature, seed=seed, logprobs=0,
            repetition_penalty=1.0 if seed % 2 else 0.7, logit_bias=SIX_TOKENS,
        )  # fmt: skip
        found = []
        for lookup in (0, 8):
            engine = Engine(loaded, EngineOptions(lookup=lookup))
            beside = engine.generate([5], SamplingParams(max_tokens=100, logit_bias=NO_END))
            next(beside)
            generation = engine.generate(prompt, params)
            found.append([(d.token_id, d.logprobs and d.logprobs.chosen) for d in generation])
            beside.cancel()
            if lookup:
                proposed += generation.stats.proposed_tokens
                accepted += generation.stats.accepted_tokens
        assert found[0] == found[1]
    assert proposed > accepted > 0


@pytest.mark.parametrize("end", ["stop", "length", "token"])
def test_what_ends_a_text_ends_it_inside_a_proposal(tmp_path: Path, end: str) -> None:
    plain = tiny.load_tiny(tmp_path, max_position_embeddings=400)
    text = "abcdefgh" * 8
    ids = plain.require_tokenizer().encode(text)
    script = [*ids, 0] if end == "token" else ids * 2
    params = SamplingParams(
        max_tokens=30 if end == "length" else 200, stop=("efgha",) if end == "stop" else ()
    )
    found = []
    for lookup in (0, 8):
        loaded = tiny.scripted(plain, script, len(ids))
        generation = Engine(loaded, EngineOptions(lookup=lookup)).generate(ids, params)
        found.append([(d.token_id, d.text, d.finish_reason) for d in generation])
        if lookup:
            assert generation.stats.accepted_tokens > 0
    assert found[0] == found[1]
