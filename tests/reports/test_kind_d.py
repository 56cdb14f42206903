"""Kind d, the server: stop strings, characters, log probabilities, prompts, limits, filling.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from starquill.engine.loaded import LoadedModel
from starquill.server.app import create_app
from starquill.server.options import ServerOptions
from starquill.types import Delta, GenerateRequest, Logprobs
from tests import tiny
from tests.server.serving import asking, streamed
from tests.server.standing_in import AnsweringEngine
from tests.server.test_app import error_of

ROUTE = "/v1/completions"
END, PREFIX, MIDDLE, SUFFIX, PAD, REPOSITORY, FILE, ISSUE = tiny.SPECIAL_TOKENS
PROMPT = [9, 10, 11]
CONTEXT = 64


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny.load_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=CONTEXT)


def byte_ids(loaded: LoadedModel, data: bytes) -> list[int]:
    """One token for each byte."""
    table = loaded.require_tokenizer().token_bytes
    return [table.index(bytes([byte])) for byte in data]


def asked(client: TestClient, **body: Any) -> dict[str, Any]:
    """The one choice of an answer, which must be the same in whole and in parts."""
    body = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, **body}
    whole = client.post(ROUTE, json=body)
    assert whole.status_code == 200, whole.text
    (choice,) = whole.json()["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = streamed(client.post(ROUTE, json={**body, **options}).text.split("\n"))
    pieces = [part["choices"][0] for part in parts]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):  # more is cached by then
        assert last["usage"][count] == whole.json()["usage"][count]
    if choice["logprobs"] is not None:
        for name, column in choice["logprobs"].items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == column
    return {**choice, "usage": last["usage"]}


def written(loaded: LoadedModel, output: bytes | list[int], **body: Any) -> dict[str, Any]:
    """What is answered when the model writes `output`, then ends."""
    ids = byte_ids(loaded, output) if isinstance(output, bytes) else output
    end = loaded.require_tokenizer().id_of(END)
    assert end is not None
    with asking(tiny.scripted(loaded, [*ids, end], len(PROMPT))) as client:
        return asked(client, **body)


@pytest.mark.parametrize(
    ("output", "stop", "text"),
    [
        (b"ab\nUser:z", ["\nUser:"], "ab"),
        (b"ab\nUser:z", "\nUser:", "ab"),
        (b"ab\nUsez", ["\nUser:"], "ab\nUsez"),
        (b"ab\nUse", ["\nUser:"], "ab\nUse"),
        (b"ab", [], "ab"),
        (b"ab", "", "ab"),
        (b"ab", [""], "ab"),
        (b"xaab", ["aa", "aab"], "x"),
        (b"xaab", ["aab", "aa"], "x"),
        (b"aXbYc", ["Y", "X"], "a"),
        ("aé😀b".encode(), ["😀"], "aé"),
    ],
)
def test_b46_stop_strings(loaded: LoadedModel, output: bytes, stop: Any, text: str) -> None:
    """B46: a stop string over several tokens leaked its beginning, or held back too much."""
    choice = written(loaded, output, stop=stop)
    assert choice["text"] == text
    assert choice["finish_reason"] == "stop"


def test_b46_withheld_text_comes_at_the_limit(loaded: LoadedModel) -> None:
    """B46: text held back for a stop string was lost at the end."""
    choice = written(loaded, b"ab\nUser:", stop="\nUser:", max_tokens=5)
    assert (choice["text"], choice["finish_reason"]) == ("ab\nUs", "length")


def test_b46_a_stop_in_the_prompt_is_none(loaded: LoadedModel) -> None:
    """B46: a stop string was matched across the prompt's end."""
    prompt = "x\nUs"
    end = loaded.require_tokenizer().id_of(END)
    assert end is not None
    ids = loaded.require_tokenizer().encode(prompt)
    script = [*byte_ids(loaded, b"er:z"), end]
    with asking(tiny.scripted(loaded, script, len(ids))) as client:
        assert asked(client, prompt=prompt, stop="\nUser:", heal=False)["text"] == "er:z"


@pytest.mark.parametrize(
    ("output", "limit", "text"),
    [
        ("😀é".encode(), 50, "😀é"),
        ("😀é".encode(), 2, ""),
        ("😀é".encode(), 4, "😀"),
        ("😀é".encode(), 5, "😀"),
        (b"a\x80b", 50, "a\ufffdb"),
        (b"a\x80", 2, "a\ufffd"),
        ("a😀".encode()[:-1], 50, "a"),
    ],
)
def test_b48_characters_over_tokens(
    loaded: LoadedModel, output: bytes, limit: int, text: str
) -> None:
    """B48: halves of a character became U+FFFD, in one mode and not in the other."""
    # StarCoder2's own vocabulary lacks some bytes; this one has all.
    assert written(loaded, output, max_tokens=limit)["text"] == text


@pytest.mark.parametrize("count", [0, 1, 5])
def test_b49_logprobs_have_equal_lengths(loaded: LoadedModel, count: int) -> None:
    """B49: lists of different lengths; 0 taken for none."""
    choice = written(loaded, "aé<b".encode(), logprobs=count)
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<", "b", END]
    assert found["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert all(len(column) == 6 for column in found.values())
    for name, chosen, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[name] == chosen == max(top.values())
        assert len(top) == max(count, 1)
    assert choice["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("count", [-1, 6, True, False, "1", 1.0])
def test_b49_other_counts_are_refused(loaded: LoadedModel, count: Any) -> None:
    """B49: a count that cannot be given was silently another."""
    with asking(loaded) as client:
        error = error_of(client.post(ROUTE, json={"prompt": "a", "logprobs": count}), 400)
    assert error["param"] == "logprobs"


def test_b49_stop_and_logprobs(loaded: LoadedModel) -> None:
    """B49: with a stop string the lists ended before or after the tokens that were counted."""
    choice = written(loaded, b"ab\nUser:z", logprobs=0, stop="\nUser:")
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == [*"ab", "\n", *"User:"]
    assert choice["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("echo", [False, True])
def test_b49_no_tokens(loaded: LoadedModel, echo: bool) -> None:
    """B49: `max_tokens` 0 was refused, or wrote a token."""
    choice = written(loaded, b"x", prompt="abc", max_tokens=0, echo=echo)
    assert choice["text"] == ("abc" if echo else "")
    assert choice["finish_reason"] == "length"
    assert choice["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("limit", [0, 1])
def test_b49_echo_scores_the_prompt_as_the_model_does(loaded: LoadedModel, limit: int) -> None:
    """B49: what scoring tools send: the prompt's log probabilities, none for its first token."""
    logits = tiny.our_logits(loaded, PROMPT).log_softmax(-1)
    with asking(loaded) as client:
        choice = asked(client, max_tokens=limit, echo=True, logprobs=1)
    first, *rest = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert len(rest) == len(PROMPT) - 1 + limit
    for at, token in enumerate(PROMPT[1:]):
        assert rest[at] == pytest.approx(float(logits[at, token]), abs=1e-4)


class Seen:
    """What requests reach the engine, each answered with one token."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.requests: list[GenerateRequest] = []
        engine: Any = AnsweringEngine(loaded, self._answer)
        self.client = TestClient(create_app(engine, ServerOptions("tiny")))

    def _answer(self, request: GenerateRequest) -> list[Delta]:
        self.requests.append(request)
        text = f"answer {len(self.requests)}"
        return [Delta(request.id, 9, text, Logprobs(-1.0), finish_reason="stop")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "n", "ids"),
    [
        ([5, 6], 1, [(5, 6)]),
        ([[5, 6], [7]], 1, [(5, 6), (7,)]),
        ([[5]], 2, [(5,)]),
        ("ab", 1, ["ab"]),
        (["a", "b", "cd"], 2, ["a", "b", "cd"]),
    ],
)
def test_b50_shapes_of_prompts(
    loaded: LoadedModel, prompt: Any, n: int, ids: list[Any], stream: bool
) -> None:
    """B50: prompts were joined, given a start token, or their choices came out of order."""
    seen = Seen(loaded)
    body = {"prompt": prompt, "n": n, "heal": False, "stream": stream}
    answer = seen.client.post(ROUTE, json=body)
    tokenizer = loaded.require_tokenizer()
    expected = [tuple(tokenizer.encode(i)) if isinstance(i, str) else i for i in ids]
    assert [request.prompt_ids for request in seen.requests] == [
        i for i in expected for _ in range(n)
    ]
    if stream:
        parts = streamed(answer.text.split("\n"))
        choices = sorted((part["choices"][0] for part in parts), key=lambda c: int(c["index"]))
    else:
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert [choice["index"] for choice in choices] == list(range(len(ids) * n))
    assert [choice["text"] for choice in choices] == [
        f"answer {number + 1}" for number in range(len(ids) * n)
    ]


@pytest.mark.parametrize(
    "prompt",
    [[5, "a"], ["a", 5], [5, 99999], [5, -1], [[]], [], [[5], []], [[5], "a"], [[5], 6], [True],
     [5.0], [[[5]]], 5, True, {"a": 1}, None],
)  # fmt: skip
def test_b50_other_shapes_are_refused(loaded: LoadedModel, prompt: Any) -> None:
    """B50: mixed lists and ids outside the vocabulary were computed with, or crashed."""
    with asking(loaded) as client:
        error = error_of(client.post(ROUTE, json={"prompt": prompt}), 400)
    assert error["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_b52_a_prompt_over_the_context(loaded: LoadedModel, stream: bool) -> None:
    """B52: the end of the prompt was dropped, and the answer was 200."""
    with asking(loaded) as client:
        for length in (70, CONTEXT):
            body = {"prompt": [9] * length, "max_tokens": 1, "stream": stream}
            message = error_of(client.post(ROUTE, json=body), 400)["message"]
            assert str(length) in message
            assert str(CONTEXT) in message


def test_b52_the_context_ends_the_output(loaded: LoadedModel) -> None:
    """B52: what fits is answered, as far as there is room."""
    never = {str(loaded.require_tokenizer().id_of(END)): -100}
    with asking(loaded) as client:
        choice = asked(client, prompt=[9] * 60, max_tokens=16, logit_bias=never)
    assert choice["finish_reason"] == "length"
    assert choice["usage"]["completion_tokens"] == 4


def test_b52_a_hole_is_not_trimmed_silently(loaded: LoadedModel) -> None:
    """B52: the far ends of a file were left out though nobody had asked for it."""
    with asking(loaded) as client:
        body = {"prompt": "a" * 40, "suffix": "b" * 40, "max_tokens": 16}
        message = error_of(client.post(ROUTE, json=body), 400)["message"]
        assert "83" in message  # with the three control tokens
        assert str(CONTEXT) in message
        fits = {"prompt": "a" * 40, "suffix": "b" * 20, "max_tokens": 16}
        answer = client.post(ROUTE, json=fits).json()
    assert answer["usage"]["prompt_tokens"] == CONTEXT - 1
    assert answer["usage"]["completion_tokens"] == 1


# --- fill in the middle, and control tokens ---


@pytest.mark.parametrize("prompt", ["ab", "", f"a{MIDDLE}b"])
@pytest.mark.parametrize("suffix", ["cd", "", f"{END}c"])
def test_b56_suffix_is_filled(loaded: LoadedModel, prompt: str, suffix: str) -> None:
    """B56, B16: the suffix was ignored, or put behind the answer."""
    seen = Seen(loaded)
    answer = seen.client.post(ROUTE, json={"prompt": prompt, "suffix": suffix})
    assert answer.json()["choices"][0]["text"] == "answer 1"
    tokenizer = loaded.require_tokenizer()
    tags = [tokenizer.id_of(tag) for tag in (PREFIX, SUFFIX, MIDDLE)]
    before, after = tokenizer.encode(prompt), tokenizer.encode(suffix)
    (request,) = seen.requests
    assert list(request.prompt_ids) == [tags[0], *before, tags[1], *after, tags[2]]


def test_b56_echo_with_a_suffix(loaded: LoadedModel) -> None:
    """B56: the prompt and the middle, not the suffix."""
    answer = Seen(loaded).client.post(
        ROUTE, json={"prompt": ["ab", "c"], "suffix": "d", "echo": True}
    )
    assert [choice["text"] for choice in answer.json()["choices"]] == ["abanswer 1", "canswer 2"]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", [[5, 6], [[5]]])
def test_b56_a_suffix_needs_text(loaded: LoadedModel, prompt: Any, echo: bool) -> None:
    """B56: a suffix beside token ids was silently ignored."""
    seen = Seen(loaded)
    answer = seen.client.post(ROUTE, json={"prompt": prompt, "suffix": "a", "echo": echo})
    assert error_of(answer, 400)["param"] == "suffix"
    assert not seen.requests


def test_b56_a_model_that_cannot_fill_says_so(tmp_path_factory: pytest.TempPathFactory) -> None:
    """B56: a model without the tokens answered all the same."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    plain = tiny.load(tiny.write_checkpoint(folder, tokenizer=tiny.byte_tokenizer((END,))))
    with asking(plain) as client:
        answer = client.post(ROUTE, json={"prompt": "a", "suffix": "b"})
    assert error_of(answer, 400)["param"] == "suffix"


@pytest.mark.parametrize("tag", [ISSUE, PAD, FILE])
def test_b57_control_tokens_are_hidden_and_counted(loaded: LoadedModel, tag: str) -> None:
    """B57: tags were shown in the text, or the space behind them was lost with them."""
    token = loaded.require_tokenizer().id_of(tag)
    assert token is not None
    output = [*byte_ids(loaded, b"a"), token, *byte_ids(loaded, b" x")]
    choice = written(loaded, output, logprobs=0)
    assert choice["text"] == "a x"
    assert choice["logprobs"]["tokens"] == ["a", tag, " ", "x", END]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3]
    assert choice["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("tag", [ISSUE, PAD])
def test_b57_control_tokens_are_shown_if_asked_for(loaded: LoadedModel, tag: str) -> None:
    """B57: a stop string may be the name of one then."""
    token = loaded.require_tokenizer().id_of(tag)
    assert token is not None
    output = [*byte_ids(loaded, b"a"), token, *byte_ids(loaded, b" x")]
    choice = written(loaded, output, logprobs=0, skip_special_tokens=False)
    assert choice["text"] == f"a{tag} x"
    shown = len(tag) + 1
    assert choice["logprobs"]["text_offset"] == [0, 1, shown, shown + 1, shown + 2]
    stopped = written(loaded, output, stop=[tag[2:]], skip_special_tokens=False)
    assert (stopped["text"], stopped["finish_reason"]) == (f"a{tag[:2]}", "stop")
