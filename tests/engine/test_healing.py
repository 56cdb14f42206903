"""Token healing: the prompt's last token is chosen again, and the output begins where it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.engine import Engine
from starquill.engine.healing import HealingVocabulary, split_for_healing
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import plain_request
from starquill.errors import CapacityError
from starquill.types import Delta, SamplingParams
from tests import tiny

CONTEXT = 64
END = 0
thorough = settings(deadline=None, derandomize=True, max_examples=150)
# Words and white space that the tiny tokenizer has merges for, and characters of many bytes.
prompts = st.lists(
    st.sampled_from(
        ["def", "de", "d", "im", "imp", " ", "\n", "\t", "é", "😀", "1", "x", "<", "\r"]
    )
    | st.characters(exclude_categories=["Cs"]),
    max_size=10,
).map("".join)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    return tiny.load_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def tokenizer(loaded: LoadedModel) -> Tokenizer:
    return loaded.require_tokenizer()


def bytes_of(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    return b"".join(tokenizer.token_bytes[i] for i in ids)


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    found = tokenizer.id_of(piece)
    assert found is not None
    return found


def text_of(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def scripted_deltas(
    loaded: LoadedModel, prompt: str, tokens: Sequence[int | Sequence[int]], max_tokens: int = 99
) -> list[Delta]:
    """The healed run of a model that writes `tokens` after the prompt without its last token."""
    request = plain_request(loaded, prompt, SamplingParams(max_tokens=max_tokens))
    model = tiny.scripted(loaded, tokens, len(request.prompt_ids))
    return list(Engine(model).generate(request))


# --- which tokens may begin ---


def can_spell(table: Sequence[bytes], text: bytes) -> bool:
    """Whether some tokens in a row begin with `text`."""
    return not text or any(
        spelled.startswith(text)
        or (text.startswith(spelled) and can_spell(table, text[len(spelled) :]))
        for spelled in table
        if spelled
    )


def allowed_by_search(table: Sequence[bytes], text: bytes) -> list[int]:
    """Tokens that begin with `text`, and those that it begins with and that can be gone on from."""
    return [
        index
        for index, spelled in enumerate(table)
        if spelled
        and (
            spelled.startswith(text)
            or (text.startswith(spelled) and can_spell(table, text[len(spelled) :]))
        )
    ]


class FewTokens:
    """Stands in for a tokenizer: all that healing needs is the bytes of each id."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        self.token_bytes = token_bytes


few_bytes = st.lists(st.sampled_from([b"a", b"b", b"\xc3", b"\xff"]), max_size=4).map(b"".join)


@given(st.lists(few_bytes, max_size=12), few_bytes.filter(bool))
@settings(deadline=None, derandomize=True, max_examples=400)
def test_allowed_equals_a_search_of_all_tokens(table: list[bytes], text: bytes) -> None:
    vocabulary = HealingVocabulary(FewTokens(table))  # type: ignore[arg-type]
    assert sorted(vocabulary.allowed(text)) == allowed_by_search(table, text)


def test_allowed_over_the_whole_vocabulary(tokenizer: Tokenizer) -> None:
    vocabulary = HealingVocabulary(tokenizer)
    for text in [t for t in tokenizer.token_bytes if t] + [b"\n  ", b"defx", "é".encode()]:
        assert sorted(vocabulary.allowed(text)) == allowed_by_search(tokenizer.token_bytes, text)


def test_control_tokens_are_never_allowed(tokenizer: Tokenizer) -> None:
    assert not tokenizer.special_ids & set(HealingVocabulary(tokenizer).allowed(b"<"))


# --- what is taken back ---


@given(prompts)
@thorough
def test_one_token_is_taken_back(tokenizer: Tokenizer, prompt: str) -> None:
    ids = tokenizer.encode(prompt)
    kept, healed = split_for_healing(tokenizer, ids)
    assert bytes_of(tokenizer, kept) + healed == prompt.encode()
    assert kept == (ids[:-1] if len(ids) > 1 else ids)


def test_nothing_is_taken_from_one_token_or_a_control_token(
    loaded: LoadedModel, tokenizer: Tokenizer
) -> None:
    for prompt in ("d", "def", "\n", "x<fim_prefix>", "<file_sep>", "a b<|endoftext|>"):
        request = plain_request(loaded, prompt, SamplingParams())
        assert request.heal == b""
        assert list(request.prompt_ids) == tokenizer.encode(prompt, parse_special=True)


def test_special_text_read_as_data_is_healed(loaded: LoadedModel) -> None:
    request = plain_request(loaded, "x<fim_prefix>", SamplingParams(), parse_special=False)
    assert request.heal == b">"


def test_an_empty_prompt_starts_from_the_start_token(loaded: LoadedModel) -> None:
    request = plain_request(loaded, "", SamplingParams())
    assert (request.prompt_ids, request.heal) == ((0,), b"")


# --- where the output begins ---


@given(prompts, st.integers(0, 1000))
@thorough
def test_output_begins_exactly_where_the_prompt_ends(
    loaded: LoadedModel, tokenizer: Tokenizer, prompt: str, seed: int
) -> None:
    params = SamplingParams(max_tokens=3, temperature=2.0, seed=seed, logit_bias={END: -100.0})
    request = plain_request(loaded, prompt, params, parse_special=False)
    deltas = list(Engine(loaded).generate(request))
    written = [delta.token_id for delta in deltas if delta.token_id is not None]
    spelled = bytes_of(tokenizer, [*request.prompt_ids, *written])
    assert spelled.startswith(prompt.encode())
    rest = spelled[len(prompt.encode()) :]
    assert rest.decode(errors="replace").startswith(text_of(deltas))
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "tokens", "expected"),
    [
        ("x:\n", ["Ċ", "x"], "x"),
        ("x:\n", ["ĊĠ", "x"], " x"),
        ("x ", ["Ġ", "x"], "x"),
        ("x ", ["ĠĠ", "x"], " x"),
        ("x  ", ["ĠĠ", "x"], "x"),
        ("x  ", ["Ġ", "Ġ", "x"], "x"),
        ("x  ", ["Ġ", "ĠĠ", "x"], " x"),
        ("(de", ["def", "x"], "fx"),
        ("(de", ["de", "f"], "f"),
        ("(de", ["d", "e", "f"], "f"),
        ("(def", ["de", "f", "("], "("),
        ("(i", ["imp", "x"], "mpx"),
        ("1", ["2"], "2"),
        ("12", ["2", "3"], "3"),
        ("é", ["©", "x"], "x"),
        ("x😀", ["Ģ", "x"], "x"),
    ],
)
def test_prompts_that_end_inside_a_token(
    loaded: LoadedModel, tokenizer: Tokenizer, prompt: str, tokens: list[str], expected: str
) -> None:
    script = [*(id_of(tokenizer, piece) for piece in tokens), END]
    deltas = scripted_deltas(loaded, prompt, script)
    assert [delta.token_id for delta in deltas] == script
    assert text_of(deltas) == expected
    assert deltas[-1].finish_reason == "stop"


def test_the_likeliest_token_that_disagrees_is_passed_over(
    loaded: LoadedModel, tokenizer: Tokenizer
) -> None:
    x, define, de, end = (id_of(tokenizer, t) for t in ("x", "def", "de", "<|endoftext|>"))
    deltas = scripted_deltas(loaded, "(de", [[end, x, define, de], end])
    assert [delta.token_id for delta in deltas] == [define, end]


# --- counting ---


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize(
    ("again", "counts"),
    [(["de"], 0), (["d", "e"], 0), (["def"], 1)],
    ids=["same token", "two halves", "longer token"],
)
def test_max_tokens_counts_only_the_users_tokens(
    loaded: LoadedModel, tokenizer: Tokenizer, again: list[str], counts: int, limit: int
) -> None:
    script = [id_of(tokenizer, piece) for piece in [*again, "1", "2", "3", "4"]]
    deltas = scripted_deltas(loaded, "(de", script, limit)
    assert len(deltas) == len(again) - counts + limit
    assert deltas[-1].finish_reason == "length"
    expected = ("f" if counts else "") + "1234"
    assert text_of(deltas) == expected[:limit]


@pytest.mark.parametrize("prompt", ["(de", "x\n", "x  ", "é"])
def test_healing_does_not_shorten_what_may_be_written(
    loaded: LoadedModel, tokenizer: Tokenizer, prompt: str
) -> None:
    params = SamplingParams(max_tokens=5, logit_bias={END: -100.0})
    request = plain_request(loaded, prompt, params)
    deltas = Engine(loaded).generate(request)
    ids = [delta.token_id for delta in deltas if delta.token_id is not None]
    ends = [len(bytes_of(tokenizer, ids[: n + 1])) for n in range(len(ids))]
    assert sum(end > len(request.heal) for end in ends) == 5


@pytest.mark.parametrize("heal", [True, False])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_a_prompt_that_fills_the_context_is_refused(
    loaded: LoadedModel, tokenizer: Tokenizer, length: int, heal: bool
) -> None:
    """With healing or without, and with the prompt's own size in the message."""
    prompt = "x" * length
    assert len(tokenizer.encode(prompt)) == length
    with pytest.raises(CapacityError, match=rf"\b{length} tokens.*\b{CONTEXT}\b"):
        Engine(loaded).complete(prompt, heal=heal)


# --- without healing ---


@given(prompts)
@thorough
def test_no_heal_runs_the_prompt_as_it_is(
    loaded: LoadedModel, tokenizer: Tokenizer, prompt: str
) -> None:
    params = SamplingParams(max_tokens=7, stop=("x",))
    healed = plain_request(loaded, prompt, params, parse_special=False)
    plain = plain_request(loaded, prompt, params, heal=False, parse_special=False)
    assert list(plain.prompt_ids) == (tokenizer.encode(prompt) or [0])
    assert plain.heal == b""
    same = dataclasses.replace(plain, id="", prompt_ids=(), heal=b"")
    assert dataclasses.replace(healed, id="", prompt_ids=(), heal=b"") == same


@pytest.mark.parametrize("prompt", ["x\n", "(de", "12", "é", "d"])
def test_no_heal_changes_nothing_where_the_token_was_right(
    loaded: LoadedModel, tokenizer: Tokenizer, prompt: str
) -> None:
    """A model that takes the same last token again writes the same text either way."""
    rest = [*(id_of(tokenizer, piece) for piece in "a:b"), END]
    params = SamplingParams(max_tokens=9, stop=("b",))
    runs = []
    for heal in (True, False):
        request = plain_request(loaded, prompt, params, heal=heal)
        again = tokenizer.encode(prompt)[len(request.prompt_ids) :]
        model = tiny.scripted(loaded, [*again, *rest], len(request.prompt_ids))
        deltas = list(Engine(model).generate(request))[len(again) :]
        runs.append([dataclasses.replace(delta, id="") for delta in deltas])
    assert runs[0] == runs[1]
    assert text_of(runs[0]) == "a:"
