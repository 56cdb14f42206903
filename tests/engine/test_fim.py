"""Fill-in-the-middle: exact ids, what is cut when there is no room, and where a middle ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import starquill.types
from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.engine import Engine
from starquill.engine.fim import FillOrder, Trimmed, fill_request
from starquill.engine.loaded import LoadedModel
from starquill.engine.scoring import log_probabilities
from starquill.errors import BadRequestError, CapacityError, UnsupportedError
from starquill.loading import load
from starquill.types import ContextFile, Hole, SamplingParams
from tests import tiny

CONTEXT = 64
END, PREFIX, MIDDLE, SUFFIX, PAD, REPO, FILE = range(7)
CONTROL = {END, PREFIX, MIDDLE, SUFFIX, PAD, REPO, FILE}
FEW = SamplingParams(max_tokens=20)
thorough = settings(deadline=None, derandomize=True, max_examples=300)
code = st.text(alphabet="ab \n1é", max_size=70)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    return tiny.load_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def tokenizer(loaded: LoadedModel) -> Tokenizer:
    return loaded.require_tokenizer()


def with_special(folder: Path, special: tuple[str, ...]) -> LoadedModel:
    return load(tiny.write_checkpoint(folder, tokenizer=tiny.byte_tokenizer(special)))


def ids_for(loaded: LoadedModel, hole: Hole, max_tokens: int = 8) -> list[int]:
    request, trimmed = fill_request(loaded, hole, SamplingParams(max_tokens=max_tokens))
    assert not trimmed
    assert str(trimmed) == ""
    return list(request.prompt_ids)


# --- the form ---


@pytest.mark.parametrize(
    ("prefix", "suffix"),
    [
        ("a", "b"),
        ("", ""),
        ("def f():\n    ", "\n\nf()\n"),
        ("x ", " y"),
        ("é", "😀"),
        ("a\r\n", "\r\nb"),
        ("<fim_middle>", "<|endoftext|>"),
        ("<file_sep><repo_name>x", "<fim_pad>"),
    ],
)
def test_plain_form(loaded: LoadedModel, tokenizer: Tokenizer, prefix: str, suffix: str) -> None:
    """Nothing stands between the parts, and what the code says is never a control token."""
    before, after = tokenizer.encode(prefix), tokenizer.encode(suffix)
    assert ids_for(loaded, Hole(prefix, suffix)) == [PREFIX, *before, SUFFIX, *after, MIDDLE]
    assert not CONTROL & {*before, *after}


def test_single_letters(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    a, b = tokenizer.id_of("a"), tokenizer.id_of("b")
    assert ids_for(loaded, Hole("a", "b")) == [PREFIX, a, SUFFIX, b, MIDDLE]


def test_repository_form(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    """The only newlines added are those after paths; the hole's path follows <fim_prefix>."""
    files = (ContextFile("u.py", "U=1\n"), ContextFile("d/v.py", " V"))
    hole = Hole("a(", ")", files, path="m.py", repo_name="r/n")
    text = tokenizer.encode
    expected = [REPO, *text("r/n")]
    expected += [FILE, *text("u.py\nU=1\n"), FILE, *text("d/v.py\n V"), FILE]
    expected += [PREFIX, *text("m.py\na("), SUFFIX, *text(")"), MIDDLE]
    assert ids_for(loaded, hole) == expected


def test_names_in_the_repository_form_are_data(loaded: LoadedModel) -> None:
    files = (ContextFile("<fim_suffix>", "<file_sep>"),)
    ids = ids_for(loaded, Hole("", "", files, path="<fim_middle>", repo_name="<repo_name>"), 0)
    assert [i for i in ids if i in CONTROL] == [REPO, FILE, FILE, PREFIX, SUFFIX, MIDDLE]


def test_path_and_repository_are_not_written_without_context(loaded: LoadedModel) -> None:
    assert ids_for(loaded, Hole("a", "b", path="z.py", repo_name="q")) == ids_for(
        loaded, Hole("a", "b")
    )


def test_hyphened_tokens(tmp_path: Path) -> None:
    """SantaCoder's spelling works the same."""
    special = tuple(name.replace("_", "-") for name in tiny.SPECIAL_TOKENS)
    other = with_special(tmp_path, special)
    encode = other.require_tokenizer().encode
    files = (ContextFile("u", "v"),)
    expected = [REPO, *encode("r"), FILE, *encode("u\nv"), FILE]
    expected += [PREFIX, *encode("m\na"), SUFFIX, *encode("b"), MIDDLE]
    assert ids_for(other, Hole("a", "b", files, "m", "r")) == expected


# --- suffix first ---


def spm(loaded: LoadedModel, hole: Hole, **options: Any) -> list[int]:
    params = SamplingParams(max_tokens=8)
    return list(fill_request(loaded, hole, params, order="spm", **options)[0].prompt_ids)


def test_suffix_first_form(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    """The prefix stands where the middle begins, as in training (tools/tiny_tokenizer.py)."""
    a, b = tokenizer.encode("a\n"), tokenizer.encode(" b<fim_middle>")
    assert spm(loaded, Hole("a\n", " b<fim_middle>")) == [PREFIX, SUFFIX, *b, MIDDLE, *a]


def test_suffix_first_in_the_repository_form(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    """The path belongs to the prefix, and goes with it."""
    text = tokenizer.encode
    hole = Hole("a(", ")", (ContextFile("u.py", "U"),), path="m.py", repo_name="r")
    expected = [REPO, *text("r"), FILE, *text("u.py\nU"), FILE]
    expected += [PREFIX, SUFFIX, *text(")"), MIDDLE, *text("m.py\na(")]
    assert spm(loaded, hole) == expected


def shared(first: list[int], second: list[int]) -> int:
    """How many ids both begin with."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def test_typing_changes_only_the_end(loaded: LoadedModel) -> None:
    """What a cache keeps while someone types: all but the last word, suffix included."""
    first, second = (Hole(prefix, "12345") for prefix in ("ab cd", "ab cdef"))
    before = spm(loaded, first)
    assert shared(before, spm(loaded, second)) >= len(before) - 1
    plain = ids_for(loaded, first)
    assert shared(plain, ids_for(loaded, second)) < plain.index(SUFFIX)


def test_an_unknown_order_is_refused(loaded: LoadedModel) -> None:
    order: Any = "mps"
    with pytest.raises(BadRequestError, match=r"'mps'.*psm, spm"):
        fill_request(loaded, Hole("a", "b"), FEW, order=order)


def test_this_is_the_order_that_the_embedded_model_was_trained_on() -> None:
    """The true middle costs least in our order, compared with the other places for the prefix."""
    loaded = load("default")
    encode, fim = loaded.require_tokenizer().encode, loaded.require_fim()
    source = Path(starquill.types.__file__).read_text(encoding="utf-8").split("\n")
    costs = [0.0, 0.0, 0.0]
    for line in range(20, 80, 5):
        before, after = (
            "\n".join(source[line - 20 : line]) + "\n",
            "\n".join(source[line + 2 :][:9]),
        )
        middle = encode("\n".join(source[line : line + 2]) + "\n")
        start, end = encode(before), encode(after)
        ours = spm(loaded, Hole(before, after))
        without_prefix = [fim.suffix, *end, fim.middle, *start]
        suffix_in_front = [fim.suffix, *end, fim.prefix, *start, fim.middle]
        for number, ids in enumerate((ours, without_prefix, suffix_in_front)):
            logp = torch.cat(list(log_probabilities(loaded, [*ids, *middle[:-1]])))
            wanted = torch.tensor(middle)[:, None]
            costs[number] -= float(logp[-len(middle) :].gather(1, wanted).sum())
    assert costs[0] == min(costs)


# --- what is begun ---


@pytest.mark.parametrize("order", ["psm", "spm"])
def test_what_is_begun_stands_last_and_is_healed(
    loaded: LoadedModel, tokenizer: Tokenizer, order: FillOrder
) -> None:
    hole = Hole("a", "b")
    request, _ = fill_request(loaded, hole, FEW, order=order, begun="x<fim_middle>  ")
    whole = fill_request(loaded, hole, FEW, order=order)[0].prompt_ids
    begun = tokenizer.encode("x<fim_middle>  ")
    assert list(request.prompt_ids) == [*whole, *begun[:-1]]
    assert request.heal == tokenizer.token_bytes[begun[-1]]
    assert not CONTROL & set(begun)


def test_what_is_begun_is_not_written_again(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    """Healing may choose a longer token for its end: only what goes past it is output."""
    request, _ = fill_request(loaded, Hole("a", "b"), FEW, begun="x de")
    [long], end = tokenizer.encode("def"), END
    model = tiny.scripted(loaded, [long, *tokenizer.encode(" f"), end], len(request.prompt_ids))
    assert request.heal == b"de"
    assert "".join(delta.text for delta in Engine(model).generate(request)) == "f f"


def test_nothing_begun_heals_nothing(loaded: LoadedModel) -> None:
    assert fill_request(loaded, Hole("a", "b"), FEW, begun="")[0].heal == b""


@given(code, code, code)
@thorough
def test_what_is_begun_is_never_cut(
    loaded: LoadedModel, tokenizer: Tokenizer, prefix: str, suffix: str, begun: str
) -> None:
    whole = tokenizer.encode(begun)
    try:
        request, trimmed = fill_request(loaded, Hole(prefix, suffix), FEW, begun=begun)
    except CapacityError:
        assert len(whole) + FEW.max_tokens + 3 + 1 > CONTEXT
        return
    ids = [*request.prompt_ids, *(whole[-1:] if whole else [])]
    assert ids[ids.index(MIDDLE) + 1 :] == whole
    assert request.prompt_tokens + FEW.max_tokens <= CONTEXT
    if trimmed:
        assert request.prompt_tokens + FEW.max_tokens == CONTEXT


def test_a_shorter_context_is_kept_to(loaded: LoadedModel) -> None:
    hole = Hole("a" * 99, "b" * 99)
    request, trimmed = fill_request(loaded, hole, FEW, context=40)
    assert len(request.prompt_ids) + FEW.max_tokens == 40
    assert trimmed
    longer, _ = fill_request(loaded, hole, FEW, context=10 * CONTEXT)
    assert len(longer.prompt_ids) + FEW.max_tokens == CONTEXT


# --- models without the tokens ---


def test_a_model_without_fill_tokens_is_refused(tmp_path: Path) -> None:
    plain = with_special(tmp_path, ("<|endoftext|>", "<fim_prefix>", "<fim_suffix>"))
    with pytest.raises(UnsupportedError, match=r"fill-in-the-middle tokens.*<fim_middle>"):
        Engine(plain).fill(Hole("a", "b"))


def test_a_model_without_repository_tokens_takes_no_context(tmp_path: Path) -> None:
    plain = with_special(tmp_path, tiny.SPECIAL_TOKENS[:5])
    before, after = plain.require_tokenizer().encode("a"), plain.require_tokenizer().encode("b")
    assert ids_for(plain, Hole("a", "b")) == [PREFIX, *before, SUFFIX, *after, MIDDLE]
    with pytest.raises(UnsupportedError, match="no repository tokens"):
        fill_request(plain, Hole("a", "b", (ContextFile("u", "v"),)), SamplingParams())


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
        Engine(load(folder)).fill(Hole("a", "b"))


# --- trimming ---

context_files = st.lists(code, max_size=3).map(
    lambda codes: tuple(ContextFile(f"{n}.py", text) for n, text in enumerate(codes))
)
holes = st.builds(
    Hole, code, code, context_files, st.sampled_from(["m.py", "a/b.py"]), st.just("r")
)


def parts(ids: list[int]) -> tuple[list[int], list[int], list[int]]:
    """What is in front of the hole, its prefix and its suffix."""
    start, between = ids.index(PREFIX), ids.index(SUFFIX)
    assert ids[-1] == MIDDLE
    assert [i for i in ids[start:] if i in CONTROL] == [PREFIX, SUFFIX, MIDDLE]
    return ids[:start], ids[start + 1 : between], ids[between + 1 : -1]


@given(holes, st.integers(0, CONTEXT + 2))
@thorough
def test_what_is_kept_fits_and_touches_the_hole(
    loaded: LoadedModel, tokenizer: Tokenizer, hole: Hole, max_tokens: int
) -> None:
    try:
        request, trimmed = fill_request(loaded, hole, SamplingParams(max_tokens=max_tokens))
    except CapacityError:
        # Room for the three tokens and one token of code is all that is asked.
        assert max_tokens + 3 + 1 > CONTEXT
        return
    ids = list(request.prompt_ids)
    assert len(ids) + max_tokens <= CONTEXT
    front, before, after = parts(ids)
    # Without a file of the repository in front the path would stand alone.
    path = f"{hole.path}\n" if front else ""
    if not trimmed.prefix_tokens and not trimmed.suffix_tokens:
        assert tokenizer.decode(before) == path + hole.prefix
        assert tokenizer.decode(after) == hole.suffix
        return
    assert not front
    whole_before, whole_after = tokenizer.encode(hole.prefix), tokenizer.encode(hole.suffix)
    assert before == whole_before[trimmed.prefix_tokens :]
    assert after == whole_after[: len(whole_after) - trimmed.suffix_tokens]
    # No more was cut than had to be: the context is full.
    assert len(ids) + max_tokens == CONTEXT


@given(holes, st.integers(0, CONTEXT - 20))
@thorough
def test_context_files_go_first_named_first(
    loaded: LoadedModel, tokenizer: Tokenizer, hole: Hole, max_tokens: int
) -> None:
    assume(hole.context)
    request, trimmed = fill_request(loaded, hole, SamplingParams(max_tokens=max_tokens))
    ids = list(request.prompt_ids)
    front, _, _ = parts(ids)
    named = tuple(file.path for file in hole.context)
    assert trimmed.files == named[: len(trimmed.files)]
    kept = hole.context[len(trimmed.files) :]
    expected = [REPO, *tokenizer.encode(hole.repo_name)] if kept else []
    for file in kept:
        expected += [FILE, *tokenizer.encode(f"{file.path}\n{file.code}")]
    assert front == ([*expected, FILE] if kept else [])
    if trimmed.files:
        last = hole.context[len(trimmed.files) - 1]
        needed = 1 + len(tokenizer.encode(f"{last.path}\n{last.code}"))
        if not kept:
            needed += 2 + len(tokenizer.encode(hole.repo_name))
            needed += len(tokenizer.encode(f"{hole.path}\n{hole.prefix}"))
            needed -= len(tokenizer.encode(hole.prefix))
        assert len(ids) + max_tokens + needed > CONTEXT
    if trimmed.prefix_tokens or trimmed.suffix_tokens:
        assert not kept


@pytest.mark.parametrize("before", [0, 3, 30, 100])
@pytest.mark.parametrize("after", [0, 3, 30, 100])
def test_prefix_and_suffix_share_the_room(loaded: LoadedModel, before: int, after: int) -> None:
    """A quarter is the suffix's own; whoever needs less leaves the rest to the other."""
    hole = Hole("a" * before, "b" * after)
    request, trimmed = fill_request(loaded, hole, SamplingParams(max_tokens=21))
    room = CONTEXT - 21 - 3
    kept_before, kept_after = before - trimmed.prefix_tokens, after - trimmed.suffix_tokens
    assert len(request.prompt_ids) == kept_before + kept_after + 3
    assert kept_before + kept_after == min(room, before + after)
    assert kept_after >= min(after, room // 4)
    assert kept_before >= min(before, room - room // 4)


def test_cutting_happens_at_the_far_ends(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    request, trimmed = fill_request(loaded, Hole(letters, letters), SamplingParams(max_tokens=41))
    _, before, after = parts(list(request.prompt_ids))
    assert tokenizer.decode(before) == letters[-15:]
    assert tokenizer.decode(after) == letters[:5]
    assert trimmed == Trimmed(prefix_tokens=36 - 15, suffix_tokens=36 - 5)
    assert bool(trimmed)


def test_what_was_cut_is_told_in_words() -> None:
    trimmed = Trimmed(12, 3, ("u.py", "v.py"))
    for part in ("u.py, v.py", "first 12 tokens", "prefix", "last 3 tokens", "suffix"):
        assert part in str(trimmed)
    assert "suffix" not in str(Trimmed(prefix_tokens=1))
    assert "prefix" not in str(Trimmed(suffix_tokens=1))
    assert not Trimmed()


@pytest.mark.parametrize("max_tokens", [CONTEXT - 3, CONTEXT - 2, CONTEXT, 10 * CONTEXT])
def test_no_room_is_an_error_that_names_the_sizes(loaded: LoadedModel, max_tokens: int) -> None:
    with pytest.raises(CapacityError, match=rf"\b{max_tokens}\b.*\b{CONTEXT}\b"):
        fill_request(loaded, Hole("a" * 9, "b" * 9), SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize("max_tokens", [-1, -100, "8", None, 1.5])
def test_a_bad_limit_is_a_bad_request(loaded: LoadedModel, max_tokens: Any) -> None:
    with pytest.raises(BadRequestError, match="max_tokens"):
        Engine(loaded).fill(Hole("a" * 99, "b"), SamplingParams(max_tokens=max_tokens))


def test_an_empty_hole_is_its_three_tokens(loaded: LoadedModel) -> None:
    request, trimmed = fill_request(loaded, Hole("", ""), SamplingParams(max_tokens=CONTEXT - 4))
    assert list(request.prompt_ids) == [PREFIX, SUFFIX, MIDDLE]
    assert not trimmed


def test_a_full_context_can_be_run(loaded: LoadedModel) -> None:
    params = SamplingParams(max_tokens=8, logit_bias=dict.fromkeys(CONTROL, -100.0))
    request, trimmed = fill_request(loaded, Hole("a" * 99, "b" * 99), params)
    deltas = list(Engine(loaded).generate(request))
    assert trimmed
    assert len(deltas) == 8
    assert deltas[-1].finish_reason == "length"


# --- where a middle ends ---


@pytest.mark.parametrize("stop", sorted(CONTROL))
def test_any_fill_or_file_token_ends_a_middle(
    loaded: LoadedModel, tokenizer: Tokenizer, stop: int
) -> None:
    x, y = tokenizer.encode("x"), tokenizer.encode("y")
    request, _ = fill_request(loaded, Hole("a", "b"), FEW)
    model = tiny.scripted(loaded, [*x, stop, *y], len(request.prompt_ids))
    deltas = list(Engine(model).generate(request))
    assert [(d.text, d.finish_reason) for d in deltas] == [("x", None), ("", "stop")]
    assert Engine(model).fill(Hole("a", "b"), FEW) == "x"


def test_other_control_tokens_do_not_end_a_middle_but_stay_hidden(
    loaded: LoadedModel, tokenizer: Tokenizer
) -> None:
    issue = tokenizer.id_of("<issue_start>")
    assert issue is not None
    model = tiny.scripted(loaded, [*tokenizer.encode("x"), issue, *tokenizer.encode("y"), END], 5)
    assert Engine(model).fill(Hole("a", "b"), FEW) == "xy"


def test_the_users_stop_strings_count_too(loaded: LoadedModel, tokenizer: Tokenizer) -> None:
    model = tiny.scripted(loaded, [*tokenizer.encode("return 1;more"), FILE], 5)
    assert (
        Engine(model).fill(Hole("a", "b"), SamplingParams(max_tokens=20, stop=(";",))) == "return 1"
    )


def test_plain_completion_goes_on_past_file_tokens(
    loaded: LoadedModel, tokenizer: Tokenizer
) -> None:
    script = [*tokenizer.encode("x"), FILE, *tokenizer.encode("y"), END]
    assert Engine(tiny.scripted(loaded, script, 1)).complete("a") == "xy"


def test_a_form_typed_by_hand_is_the_same(loaded: LoadedModel) -> None:
    engine = Engine(loaded)
    params = SamplingParams(max_tokens=6, logit_bias=dict.fromkeys(CONTROL, -100.0))
    typed = "<fim_prefix>def f():\n<fim_suffix>\nf()<fim_middle>"
    assert engine.complete(typed, params) == engine.fill(Hole("def f():\n", "\nf()"), params)
    assert engine.complete(typed, params, parse_special=False) != engine.complete(typed, params)
