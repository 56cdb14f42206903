"""The engine's contract: deltas, ends, limits, cancelling, and text equal to transformers'."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import starquill
from starquill.engine.engine import Engine
from starquill.engine.generation import Generation
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError, CapacityError, NumericsError, UnsupportedError
from starquill.loading import load
from starquill.types import Delta, GenerateRequest, SamplingParams
from tests import tiny

CONTEXT = 64
END, ISSUE = 0, 7
LONG = SamplingParams(max_tokens=200, logit_bias={END: -100.0})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    return tiny.load_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Engine:
    return Engine(loaded)


def ids_of(loaded: LoadedModel, text: str) -> list[int]:
    return loaded.require_tokenizer().encode(text)


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def scripted_run(
    loaded: LoadedModel, tokens: Sequence[int | Sequence[int]], **params: Any
) -> list[Delta]:
    """What a model that writes `tokens` after a prompt of one token gives."""
    return list(Engine(tiny.scripted(loaded, tokens, 1)).generate("p", SamplingParams(**params)))


# --- the package's door ---


def test_the_package_gives_functions_not_modules() -> None:
    """However often, and after the module of the same name was imported."""
    for _ in range(2):
        assert callable(starquill.load)
        assert starquill.Engine is Engine
    for name in starquill.__all__:
        assert getattr(starquill, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        starquill.no_such_name  # noqa: B018


# --- ends ---


@pytest.mark.parametrize("prompt", ["p", "x\n", "(de"])
def test_no_tokens_asked_for(engine: Engine, prompt: str) -> None:
    deltas = list(engine.generate(prompt, SamplingParams(max_tokens=0)))
    assert [(d.token_id, d.text, d.finish_reason) for d in deltas] == [(None, "", "length")]


def test_no_tokens_asked_for_after_any_prompt(engine: Engine) -> None:
    """Even one longer than the context: nothing is computed."""
    assert engine.complete("x" * 200, SamplingParams(max_tokens=0)) == ""


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_limit_ends_with_length(engine: Engine, limit: int) -> None:
    params = SamplingParams(max_tokens=limit, logit_bias={END: -100.0})
    deltas = list(engine.generate("p", params))
    assert len(deltas) == limit
    assert [d.finish_reason for d in deltas] == [None] * (limit - 1) + ["length"]


@pytest.mark.parametrize("length", [1, 40, CONTEXT - 2, CONTEXT - 1])
def test_a_full_context_ends_with_length(engine: Engine, length: int) -> None:
    deltas = list(engine.generate(tiny.random_ids(length), LONG))
    assert len(deltas) == CONTEXT - length
    assert deltas[-1].finish_reason == "length"


def test_an_end_token_ends_with_stop_and_is_not_shown(loaded: LoadedModel) -> None:
    deltas = scripted_run(loaded, [*ids_of(loaded, "ab"), END, *ids_of(loaded, "c")])
    assert [(d.text, d.finish_reason) for d in deltas] == [("a", None), ("b", None), ("", "stop")]
    assert deltas[-1].token_id == END


def test_every_named_end_token_ends(tmp_path: Path) -> None:
    """Config, generation config and tokenizer together; ids outside the vocabulary dropped."""
    folder = tiny.write_checkpoint(tmp_path, tiny.config(eos_token_id=[40, 50_256]))
    tiny.write_json(folder / "generation_config.json", {"eos_token_id": [41, 500]})
    loaded = load(folder)
    for end in (0, 40, 41):
        deltas = scripted_run(loaded, [60, end, 61])
        assert [d.token_id for d in deltas] == [60, end]
        assert deltas[-1].finish_reason == "stop"
    warned = " ".join(loaded.warnings)
    assert "50256" in warned
    assert "500 " in warned


def test_the_prompt_may_hold_end_tokens(loaded: LoadedModel) -> None:
    """Begin and end of text are one token; only what is written ends a text."""
    running = Engine(tiny.scripted(loaded, [*ids_of(loaded, "ab"), END], 3)).generate([0, 70, 0])
    assert text_of(list(running)) == "ab"


def test_stop_ids_of_a_request(loaded: LoadedModel) -> None:
    a, b = ids_of(loaded, "ab")
    request = GenerateRequest("r", (70,), stop_ids=frozenset({b}))
    deltas = list(Engine(tiny.scripted(loaded, [a, b, a], 1)).generate(request))
    assert [(d.text, d.finish_reason) for d in deltas] == [("a", None), ("", "stop")]


def test_control_tokens_are_hidden_but_counted(loaded: LoadedModel) -> None:
    a, space, b = ids_of(loaded, "a b")
    deltas = scripted_run(loaded, [a, ISSUE, space, b], max_tokens=4, logprobs=0)
    assert [d.text for d in deltas] == ["a", "", " ", "b"]
    assert [d.token_id for d in deltas] == [a, ISSUE, space, b]
    assert all(d.logprobs is not None for d in deltas)
    assert deltas[-1].finish_reason == "length"


# --- requests that cannot run ---


@pytest.mark.parametrize("ids", [[320], [-1], [5, 320, 6], [10**12]])
def test_ids_outside_the_vocabulary(engine: Engine, ids: list[int]) -> None:
    bad = next(i for i in ids if not 0 <= i < 320)
    with pytest.raises(BadRequestError, match=rf"{bad}.*0 to 319"):
        engine.generate(ids)


@pytest.mark.parametrize("ids", [[1.5], ["5"], [None], [[5]]])
def test_ids_that_are_no_numbers(engine: Engine, ids: list[Any]) -> None:
    with pytest.raises(BadRequestError):
        engine.generate(ids)


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor, iter])
def test_ids_of_other_libraries(engine: Engine, convert: Callable[[list[int]], Any]) -> None:
    ids = tiny.random_ids(5)
    expected = [d.token_id for d in engine.generate(ids, SamplingParams(max_tokens=3))]
    running = engine.generate(convert(ids), SamplingParams(max_tokens=3))
    assert [d.token_id for d in running] == expected
    assert running.request.prompt_ids == tuple(ids)


def test_a_prompt_of_no_tokens(engine: Engine) -> None:
    with pytest.raises(BadRequestError, match="no tokens"):
        engine.generate([])


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 6, 5000])
def test_a_prompt_longer_than_the_context(engine: Engine, length: int) -> None:
    with pytest.raises(CapacityError, match=rf"\b{length} tokens.*\b{CONTEXT}\b"):
        engine.generate(tiny.random_ids(length))


def test_bad_parameters_are_refused_before_anything_runs(engine: Engine) -> None:
    with pytest.raises(BadRequestError, match=r"temperature.*; top_p"):
        engine.generate("p", SamplingParams(temperature=-1, top_p=2))


def test_text_without_bytes_is_refused(engine: Engine) -> None:
    """Lone surrogates are what Python makes of arguments that are not UTF-8."""
    with pytest.raises(BadRequestError, match="UTF-8"):
        engine.complete("a\udcff")


def test_a_checkpoint_without_a_tokenizer_runs_on_ids(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    engine = Engine(load(folder))
    deltas = list(engine.generate([5, 6], SamplingParams(max_tokens=3, logit_bias={0: -100})))
    assert [d.text for d in deltas] == [""] * 3
    assert all(d.token_id is not None for d in deltas)
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
        engine.complete("p")


def test_a_model_without_a_chat_template_does_not_chat(engine: Engine) -> None:
    with pytest.raises(UnsupportedError, match="chat template"):
        engine.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template", [5, [5], {"a": 1}, [{"name": [], "template": "a"}], [{"name": "default"}], "{% if"]
)
def test_a_strange_chat_template_does_not_stop_completion(tmp_path: Path, template: Any) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    tiny.write_json(folder / "tokenizer_config.json", {"chat_template": template})
    engine = Engine(load(folder))
    assert len(list(engine.generate("p", SamplingParams(max_tokens=1)))) == 1


def test_logits_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    """Not an end token: the likeliest of NaNs is id 0, which would look like a clean stop."""
    raw = tiny.config()
    state = tiny.weights(raw)
    state["model.norm.weight"].fill_(3e38)
    engine = Engine(load(tiny.write_checkpoint(tmp_path, raw, state)))
    with pytest.raises(NumericsError, match="float32"):
        engine.complete("p")


# --- deltas ---


def test_fields_of_deltas(engine: Engine) -> None:
    params = SamplingParams(max_tokens=6, logprobs=3, logit_bias={END: -100.0})
    running = engine.generate("def f", params)
    deltas = list(running)
    assert {d.id for d in deltas} == {running.request.id}
    assert [d.finish_reason is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]
    for delta in deltas:
        assert delta.token_id is not None
        assert delta.logprobs is not None
        assert delta.logprobs.chosen < 0
        top = delta.logprobs.top
        assert len(top) == 3
        assert top[0].logprob >= top[1].logprob >= top[2].logprob
        by_id = {entry.token_id: entry.logprob for entry in top}
        if delta.token_id in by_id:
            assert delta.logprobs.chosen == pytest.approx(by_id[delta.token_id])


def test_no_logprobs_unless_asked(engine: Engine) -> None:
    assert all(d.logprobs is None for d in engine.generate("p", SamplingParams(max_tokens=3)))


def test_logprobs_are_the_models_own(loaded: LoadedModel, engine: Engine) -> None:
    """Before bias, penalties and temperature, at every position, and they sum."""
    params = SamplingParams(
        max_tokens=5, temperature=1.5, seed=1, logit_bias={END: -100.0}, logprobs=0,
        repetition_penalty=1.3, presence_penalty=1.0,
    )  # fmt: skip
    prompt = tiny.random_ids(12)
    deltas = list(engine.generate(prompt, params))
    written = [d.token_id for d in deltas if d.token_id is not None]
    expected = tiny.our_logits(loaded, [*prompt, *written]).double().log_softmax(-1)
    rows = range(len(prompt) - 1, len(prompt) + len(written) - 1)
    values = [float(expected[row, token]) for row, token in zip(rows, written, strict=True)]
    chosen = [d.logprobs.chosen for d in deltas if d.logprobs is not None]
    assert chosen == pytest.approx(values, abs=1e-4)
    assert sum(chosen) == pytest.approx(math.fsum(values), abs=1e-3)


def test_ids_differ_between_requests(engine: Engine) -> None:
    names = {engine.generate(prompt).request.id for prompt in ("p", "p", [5], [5])}
    assert len(names) == 4


# --- cancelling ---


def test_cancel_midway(engine: Engine) -> None:
    running = engine.generate("p", LONG)
    first = [next(running) for _ in range(3)]
    last = running.cancel()
    assert last is not None
    assert (last.token_id, last.finish_reason, last.id) == (None, "cancelled", first[0].id)
    assert list(running) == []
    assert running.cancel() is None
    assert running.stats.generated_tokens == 3


def test_cancel_before_the_first_token(engine: Engine) -> None:
    running = engine.generate("p", LONG)
    last = running.cancel()
    assert last is not None
    assert (last.text, last.finish_reason) == ("", "cancelled")
    assert list(running) == []


def test_cancel_after_the_end(engine: Engine) -> None:
    running = engine.generate("p", SamplingParams(max_tokens=2, logit_bias={END: -100.0}))
    assert len(list(running)) == 2
    assert running.cancel() is None
    assert list(running) == []


# --- several at once ---


def taking_turns(*running: Generation) -> list[list[Delta]]:
    deltas: list[list[Delta]] = [[] for _ in running]
    active: list[tuple[int, Iterator[Delta]]] = list(enumerate(running))
    while active:
        for index, iterator in tuple(active):
            delta = next(iterator, None)
            if delta is None:
                active.remove((index, iterator))
            else:
                deltas[index].append(delta)
    return deltas


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_interleaved_equals_alone(engine: Engine, temperature: float) -> None:
    prompts = [tiny.random_ids(3, seed=3), tiny.random_ids(25, seed=4)]
    params = [
        SamplingParams(max_tokens=20, temperature=temperature, seed=seed, logit_bias={END: -100.0})
        for seed in (1, 2)
    ]
    starts = list(zip(prompts, params, strict=True))
    alone = [list(engine.generate(*start)) for start in starts]
    together = taking_turns(*(engine.generate(*start) for start in starts))
    for one, other in zip(alone, together, strict=True):
        assert [(d.token_id, d.text) for d in one] == [(d.token_id, d.text) for d in other]


@pytest.mark.parametrize("chunk", [1, 3, 8, 512])
def test_text_does_not_depend_on_the_prefill_chunk(loaded: LoadedModel, chunk: int) -> None:
    prompt = tiny.random_ids(30)
    expected = [d.token_id for d in Engine(loaded).generate(prompt, LONG)]
    assert [
        d.token_id for d in Engine(loaded, prefill_chunk=chunk).generate(prompt, LONG)
    ] == expected


# --- stats ---


def test_stats(engine: Engine) -> None:
    running = engine.generate(
        tiny.random_ids(9), SamplingParams(max_tokens=5, seed=3, temperature=1.0)
    )
    count = len(list(running))
    stats = running.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.seed) == (9, count, 3)
    assert stats.time_to_first_token > 0
    assert stats.generation_seconds >= 0
    assert stats.prompt_rate == pytest.approx(9 / stats.time_to_first_token)
    assert stats.peak_memory_bytes is not None
    assert stats.peak_memory_bytes > 10_000_000
    assert running.stats == stats


def test_a_seed_that_was_chosen_is_told(engine: Engine) -> None:
    params = SamplingParams(max_tokens=5, temperature=2.0)
    running = engine.generate("p", params)
    text = text_of(list(running))
    again = SamplingParams(max_tokens=5, temperature=2.0, seed=running.stats.seed)
    assert running.stats.seed is not None
    assert engine.complete("p", again) == text


@pytest.mark.parametrize("limit", [0, 1])
def test_rates_of_what_did_not_happen_are_zero(engine: Engine, limit: int) -> None:
    running = engine.generate("p", SamplingParams(max_tokens=limit))
    assert running.stats.prompt_rate == 0
    list(running)
    assert running.stats.generation_rate == 0
    assert (running.stats.prompt_rate > 0) == (limit > 0)


def test_a_prompts_tokens_are_all_counted(loaded: LoadedModel, engine: Engine) -> None:
    """The token that healing takes back is one of the prompt's."""
    running = engine.generate("x(de", SamplingParams(max_tokens=1))
    assert running.stats.prompt_tokens == len(ids_of(loaded, "x(de"))


# --- transformers ---


@pytest.mark.parametrize("head", [False, True], ids=["tied", "own head"])
def test_greedy_text_equals_transformers(tmp_path: Path, head: bool) -> None:
    """40 tokens from a prompt longer than the window of 8."""
    import tokenizers

    raw = tiny.config(tie_word_embeddings=not head, max_position_embeddings=128)
    state = tiny.weights(raw, head, seed=5)
    engine = Engine(load(tiny.write_checkpoint(tmp_path, raw, state)))
    reference = tiny.reference_model(raw, state)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for seed in range(4):
        prompt = tiny.random_ids(12, seed=seed)
        with torch.inference_mode():
            full = reference.generate(
                torch.tensor([prompt]), max_new_tokens=40, do_sample=False,
                eos_token_id=None, pad_token_id=0, suppress_tokens=[END],
            )  # fmt: skip
        expected = full[0, len(prompt) :].tolist()
        params = SamplingParams(max_tokens=40, logit_bias={END: -1000.0})
        deltas = list(engine.generate(prompt, params))
        assert [d.token_id for d in deltas] == expected
        # Ours drops a character that the limit cut; theirs shows that it was there.
        theirs = library.decode(expected)
        assert text_of(deltas) in (theirs, theirs.removesuffix("\ufffd"))
