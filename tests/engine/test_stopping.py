"""Text leaves whole: no half characters, no stop strings, however the bytes were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.engine.engine import Engine
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import plain_request
from starquill.engine.stopping import TextStream
from starquill.types import Delta, SamplingParams
from tests import tiny

thorough = settings(deadline=None, derandomize=True, max_examples=400)

# Few letters, so that stop strings often occur; characters of one to four bytes.
letters = st.text(alphabet="ab\né😀", max_size=14)
stops = st.lists(st.text(alphabet="ab\né😀", max_size=4), max_size=3).map(tuple)
any_bytes = st.binary(max_size=14) | st.lists(
    st.sampled_from(
        [b"a", b"\n", b"\x80", b"\xc3", b"\xc3\xa9", b"\xf0\x9f\x98", b"\xe2\x82", b"\xff"]
    )
).map(b"".join)


@st.composite
def pieces(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> list[bytes]:
    """Bytes cut into tokens at any places, some of them empty (control tokens)."""
    whole = draw(data)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[start:end] for start, end in pairwise([0, *cuts, len(whole)])]


def pushed(cut: list[bytes], stop: tuple[str, ...] = (), skip: int = 0) -> str:
    stream = TextStream(stop, skip)
    text = ""
    for piece in cut:
        text += stream.push(piece)
        if stream.stopped:
            return text
    return text + stream.finish()


# --- an independent statement of what is right ---


def unfinished(data: bytes) -> int:
    """How many bytes at the end begin a character that is not complete."""
    for length in (3, 2, 1):
        try:
            data[-length:].decode()
        except UnicodeDecodeError as error:
            if error.start == 0 and error.reason == "unexpected end of data":
                return min(length, len(data))
    return 0


def whole_text(data: bytes) -> str:
    return data[: len(data) - unfinished(data)].decode(errors="replace")


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """`text` up to the stop string that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if s and text[:end].endswith(s)]
        if found:
            return text[: end - len(max(found, key=len))]
    return text


# --- TextStream ---


@given(pieces(letters.map(str.encode)), stops)
@thorough
def test_text_is_the_same_however_it_is_cut(cut: list[bytes], stop: tuple[str, ...]) -> None:
    text = b"".join(cut).decode()
    result = pushed(cut, stop)
    assert result == before_stop(text, stop)
    assert "\ufffd" not in result
    assert not any(s in result for s in stop if s)


@given(pieces(any_bytes), stops)
@thorough
def test_any_bytes_at_all(cut: list[bytes], stop: tuple[str, ...]) -> None:
    data = b"".join(cut)
    assert pushed(cut, stop) == before_stop(whole_text(data), stop)
    assert pushed([bytes([b]) for b in data], stop) == pushed([data], stop)


@given(pieces(letters.map(str.encode)), stops)
@thorough
def test_only_what_may_become_a_stop_waits(cut: list[bytes], stop: tuple[str, ...]) -> None:
    stream = TextStream(stop)
    shown, seen = "", b""
    for piece in cut:
        shown += stream.push(piece)
        seen += piece
        if stream.stopped:
            return
        text = whole_text(seen)
        beginnings = {s[:n] for s in stop for n in range(1, len(s))}
        waiting = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert shown == text[: len(text) - waiting]


@given(st.text(alphabet="ab\né😀", min_size=1, max_size=4), pieces(letters.map(str.encode)), stops)
@thorough
def test_stops_are_not_found_in_skipped_bytes(
    prompt_end: str, cut: list[bytes], stop: tuple[str, ...]
) -> None:
    """Bytes of the prompt's end are spelled again first; they are neither shown nor matched."""
    again = prompt_end.encode()
    joined = [again, *cut] if len(cut) % 2 else [again + cut[0], *cut[1:]]
    for first in (joined, [bytes([b]) for b in b"".join(joined)]):
        assert pushed(first, stop, skip=len(again)) == pushed(cut, stop)


def test_skipping_ends_inside_a_character() -> None:
    """A prompt's last token may be the second half of its last character."""
    assert pushed([b"\xa9x"], skip=1) == "x"
    assert pushed([b"\x98", b"\x80", b"y"], skip=2) == "y"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\x80b", "a\ufffdb"),
        (b"a\xffb", "a\ufffdb"),
        (b"\xc3(", "\ufffd("),
        (b"\xed\xa0\x80x", "\ufffd\ufffd\ufffdx"),
        (b"x\xf0\x9f\x98", "x"),
        (b"x\xc3", "x"),
        (b"\xc3", ""),
        (b"", ""),
    ],
)
def test_invalid_and_unfinished_bytes(data: bytes, expected: str) -> None:
    assert pushed([data]) == expected
    assert pushed([bytes([b]) for b in data]) == expected


def test_held_text_is_given_once() -> None:
    stream = TextStream(("abc",))
    assert stream.push(b"xab") == "x"
    assert stream.finish() == "ab"
    assert stream.finish() == ""


# --- the engine, forced to write given bytes ---


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    return tiny.load_tiny(tmp_path_factory.mktemp("model"))


def ids_of(loaded: LoadedModel, data: bytes) -> list[int]:
    """One token per byte."""
    table = loaded.require_tokenizer().token_bytes
    return [table.index(bytes([b])) for b in data]


END = 0


def written(
    loaded: LoadedModel, tokens: list[int], params: SamplingParams, prompt: str = "x"
) -> list[Delta]:
    """The deltas of a model that writes `tokens`; `complete` says the same all at once."""
    request = plain_request(loaded, prompt, params, heal=False)
    engine = Engine(tiny.scripted(loaded, tokens, len(request.prompt_ids)))
    deltas = list(engine.generate(request))
    assert engine.complete(prompt, params, heal=False) == "".join(d.text for d in deltas)
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize(
    ("stop", "data", "expected"),
    [
        (("\nUser:",), "ab\nUser:z", "ab"),
        (("\nUser:",), "ab\nUses\nUser:z", "ab\nUses"),
        (("\nUser:",), "ab\nUse", "ab\nUse"),
        (("\nUser:",), "ab\nUser", "ab\nUser"),
        (("\nUser:", "b\n"), "ab\nUser:z", "a"),
        (("aa", "aab"), "xaab", "x"),
        (("aab", "aa"), "xaab", "x"),
        (("aab",), "xaaab", "xa"),
        (("abab", "bac"), "xabacy", "xa"),
        (("",), "ab", "ab"),
        (("", "b"), "ab", "a"),
        ((), "ab", "ab"),
        (("é",), "aéb", "a"),
        (("😀!",), "a😀😀!b", "a😀"),
    ],
)
@pytest.mark.parametrize("ended", ["by end token", "by length"])
def test_stop_strings_over_tokens(
    loaded: LoadedModel, stop: tuple[str, ...], data: str, expected: str, ended: str
) -> None:
    tokens = ids_of(loaded, data.encode())
    limit = len(tokens) if ended == "by length" else 99
    deltas = written(loaded, [*tokens, END], SamplingParams(max_tokens=limit, stop=stop))
    assert text_of(deltas) == expected
    stopped = expected != data or ended == "by end token"
    assert deltas[-1].finish_reason == ("stop" if stopped else "length")


def test_stop_strings_inside_long_tokens(loaded: LoadedModel) -> None:
    """The tokens "\\n ", "de" and "def" hold beginnings and ends of stop strings."""
    newline, de, define = (loaded.require_tokenizer().id_of(t) for t in ("ĊĠ", "de", "def"))
    assert newline is not None
    assert de is not None
    assert define is not None
    tokens = [de, newline, define, *ids_of(loaded, b"x")]
    for stop, expected in (("e\n ", "d"), ("\n d", "de"), ("ef", "de\n d"), ("e\n dx", "de\n def")):
        params = SamplingParams(max_tokens=3, stop=(stop,))
        assert text_of(written(loaded, tokens, params)) == expected


@pytest.mark.parametrize("heal", [True, False])
def test_a_stop_is_not_matched_across_the_prompts_end(loaded: LoadedModel, heal: bool) -> None:
    prompt = "a\nUs"
    rest = ids_of(loaded, b"er: b\nUser: c")
    params = SamplingParams(max_tokens=len(rest), stop=("\nUser:",))
    request = plain_request(loaded, prompt, params, heal=heal)
    script = [*ids_of(loaded, request.heal), *rest]
    engine = Engine(tiny.scripted(loaded, script, len(request.prompt_ids)))
    assert text_of(list(engine.generate(request))) == "er: b"
    assert engine.complete(prompt, params, heal=heal) == "er: b"


def test_withheld_text_comes_out_when_cancelled(loaded: LoadedModel) -> None:
    tokens = ids_of(loaded, b"ab\nUs")
    engine = Engine(tiny.scripted(loaded, [*tokens, *ids_of(loaded, b"er:")], 1))
    running = engine.generate("x", SamplingParams(stop=("\nUser:",)))
    shown = text_of([next(running) for _ in tokens])
    last = running.cancel()
    assert last is not None
    assert (shown, last.text) == ("ab", "\nUs")


MIXED = "😀é".encode() + b"\x80" + b"z"


@pytest.mark.parametrize("limit", range(1, len(MIXED) + 2))
def test_characters_split_over_tokens(loaded: LoadedModel, limit: int) -> None:
    tokens = [*ids_of(loaded, MIXED), END]
    deltas = written(loaded, tokens, SamplingParams(max_tokens=limit))
    assert text_of(deltas) == whole_text(MIXED[:limit])
    assert text_of(deltas).count("\ufffd") == (limit > 6)
    assert deltas[-1].finish_reason == ("length" if limit <= len(MIXED) else "stop")
    assert all(delta.text == "" for delta in deltas[:3])


@given(pieces(any_bytes), stops)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_streamed_is_what_complete_returns(
    loaded: LoadedModel, cut: list[bytes], stop: tuple[str, ...]
) -> None:
    data = b"".join(cut)
    tokens = [*ids_of(loaded, data), END]
    deltas = written(loaded, tokens, SamplingParams(max_tokens=99, stop=stop))
    assert text_of(deltas) == before_stop(whole_text(data), stop)
