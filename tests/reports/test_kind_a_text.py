"""Kind a, the text: control tokens, fill-in-the-middle, pre-tokenizing and the chat template.

Each docstring names the report and the fault that users of other engines met.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.chat import ChatTemplate
from starquill.engine.engine import Engine
from starquill.engine.fim import fill_request
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import chat_request, plain_request
from starquill.errors import BadRequestError, CheckpointError, UnsupportedError
from starquill.loading import load
from starquill.types import ContextFile, Delta, GenerateRequest, Hole, SamplingParams
from tests import tiny

END, PREFIX, MIDDLE, SUFFIX, PAD, REPOSITORY, FILE, ISSUE = tiny.SPECIAL_TOKENS
FIM = (PREFIX, SUFFIX, MIDDLE)
BYTES = Tokenizer(tiny.byte_tokenizer())
USER = {"role": "user", "content": "Sort a list."}
OTHER_USER = {"role": "user", "content": "Now\nbackwards."}
ANSWER = {"role": "assistant", "content": "items.sort()"}
SYSTEM = {"role": "system", "content": "Be brief."}
REFUSAL = "This model takes no system message"
OPENING = "You write code and nothing else.\n\n"
# Of the shape of StarCoder2-Instruct's, with words of our own.
TEMPLATE = (
    "{{ bos_token }}{{ 'You write code and nothing else.\\n\\n' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{{ raise_exception('This model takes no system message') }}"
    "{% elif message['role'] == 'user' %}"
    "{{ '### Instruction\\n' + message['content'] + '\\n\\n' }}"
    "{% else %}{{ '### Response\\n' + message['content'] + eos_token + '\\n\\n' }}{% endif %}"
    "{% endfor %}{{ '### Response\\n' }}"
)
# Report B19's strings and their relatives.
STRINGS = (
    "x=12345\n\t        y\n\n\n",
    "１２",
    "a\u00a0b",
    "\U0001f469\u200d\U0001f4bb\u200d x",
    "2024-01-31 3.14e-10 0x1F",
    "    four\n        eight\n\t\ttabs \t mixed",
    "a  b   c    d     ",
    "\r\n\r\n  \r",
    "½ ² Ⅷ 一 ٣४",
    "it's we'LL 'RE don't",
    "def f(x):  # définition ñ ß 中文\n  return x_1+__y2__\n",
    "\u3000\u2003wide\u2028lines\u0085",
    "",
    "\x00\x01\x7f",
)


def _folder(path: Path, tokenizer: dict[str, Any] | None = None) -> Path:
    raw = tiny.config(max_position_embeddings=256)
    return tiny.write_checkpoint(path, raw, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = _folder(tmp_path_factory.mktemp("chatty"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return load(folder)


def _run(loaded: LoadedModel, request: GenerateRequest, output: str) -> list[Delta]:
    """The request's deltas when the model writes `output`, in which tags are control tokens."""
    ids = loaded.require_tokenizer().encode(output, parse_special=True)
    model = tiny.scripted(loaded, ids, len(request.prompt_ids))
    return list(Engine(model).generate(request))


def _text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _control(loaded: LoadedModel, ids: tuple[int, ...]) -> Counter[str]:
    """How often each control token occurs."""
    tokenizer = loaded.require_tokenizer()
    return Counter(tokenizer.added[i] for i in ids if i in tokenizer.added)


def _spelled(loaded: LoadedModel, ids: tuple[int, ...]) -> str:
    return loaded.require_tokenizer().decode(ids, skip_special=False)


@pytest.mark.parametrize("tag", [FILE, REPOSITORY, PREFIX, SUFFIX, MIDDLE, PAD, END])
def test_b02_a_middle_ends_at_any_tag(loaded: LoadedModel, tag: str) -> None:
    """B02: models end a middle with `<file_sep>`; editors showed the tag and the next file."""
    request, _ = fill_request(loaded, Hole("a", "b"), SamplingParams(max_tokens=8))
    deltas = _run(loaded, request, f"x{tag}y")
    assert _text(deltas) == "x"
    assert [d.finish_reason for d in deltas] == [None, "stop"]
    at_once = _run(loaded, request, f"{tag}y")
    assert (_text(at_once), at_once[-1].finish_reason) == ("", "stop")


@pytest.mark.parametrize("heal", [True, False])
def test_b02_plain_completion_stops_at_the_end_token_alone(loaded: LoadedModel, heal: bool) -> None:
    """B02: the tags must not end what the user did not ask to fill."""
    request = plain_request(loaded, "a", SamplingParams(max_tokens=10), heal=heal)
    assert request.stop_ids == frozenset()
    deltas = _run(loaded, request, f"x{FILE}{REPOSITORY}{MIDDLE}{PAD}{PREFIX}{SUFFIX}y{END}z")
    assert (_text(deltas), deltas[-1].finish_reason, len(deltas)) == ("xy", "stop", 9)


@pytest.mark.parametrize(("stop", "text"), [(("y",), "x"), ((), "xyz"), (("yz", "z"), "x")])
def test_b02_the_users_own_stops_stay(
    loaded: LoadedModel, stop: tuple[str, ...], text: str
) -> None:
    """B02: stop strings that the user chose count beside the tags, in both ways to complete."""
    params = SamplingParams(max_tokens=8, stop=stop)
    fill, _ = fill_request(loaded, Hole("a", "b"), params)
    plain = plain_request(loaded, "a", params)
    for request, output in ((fill, f"xyz{FILE}q"), (plain, f"xyz{END}q")):
        deltas = _run(loaded, request, output)
        assert (_text(deltas), deltas[-1].finish_reason) == (text, "stop")


@pytest.mark.parametrize("text", [*tiny.SPECIAL_TOKENS, "".join(FIM), f"<fim_{MIDDLE}middle>"])
@pytest.mark.parametrize("room", [4000, 40])
def test_b15_fim_text_is_data(tmp_path: Path, text: str, room: int) -> None:
    """B15: code that mentions a tag split the prompt in the wrong place, or ended the file.

    In every part of the request, trimmed or not, control ids come from the engine alone.
    """
    raw = tiny.config(max_position_embeddings=room + 1)
    loaded = load(tiny.write_checkpoint(tmp_path, raw))
    code = f"{text}1{text}{END}"
    files = (ContextFile(text, code), ContextFile("b.py", END)) if room > 40 else ()
    hole = Hole(code, code, files, path=text, repo_name=text)
    request, trimmed = fill_request(loaded, hole, SamplingParams(max_tokens=1))
    assert bool(trimmed) == (room == 40 and len(code) * 2 + 3 > 40)
    expected = Counter(dict.fromkeys(FIM, 1))
    if files:
        expected += Counter({REPOSITORY: 1, FILE: 3})
        front = f"{REPOSITORY}{text}{FILE}{text}\n{code}{FILE}b.py\n{END}{FILE}"
        around = f"{PREFIX}{text}\n{code}{SUFFIX}{code}{MIDDLE}"
        assert _spelled(loaded, request.prompt_ids) == front + around
    assert _control(loaded, request.prompt_ids) == expected


@pytest.mark.parametrize("text", [*tiny.SPECIAL_TOKENS, f"{END}{FILE}", f"<file_{FILE}sep>"])
def test_b15_chat_text_is_data(chatty: LoadedModel, text: str) -> None:
    """B15: a message that mentions a control token became that token."""
    asked = f"a {text}{text} b"
    asking = {**USER, "content": asked}
    messages = [asking, {**ANSWER, "content": asked}, asking]
    ids = chat_request(chatty, messages, SamplingParams()).prompt_ids
    assert _control(chatty, ids) == {END: 2}
    assert _spelled(chatty, ids) == (
        f"{END}{OPENING}### Instruction\n{asked}\n\n### Response\n{asked}{END}\n\n"
        f"### Instruction\n{asked}\n\n### Response\n"
    )


@pytest.mark.parametrize("text", ["\ue0f5\ue0f6", "<\ue0f5\ue0f6|endoftext|>", "\ue0f6x\ue0f5"])
def test_b15_no_character_of_a_message_is_lost(chatty: LoadedModel, text: str) -> None:
    """B15: what keeps a message's tags from being read must not eat a message's characters."""
    ids = chat_request(chatty, [{**USER, "content": text}], SamplingParams()).prompt_ids
    assert _control(chatty, ids) == {END: 1}
    assert f"### Instruction\n{text}\n\n" in _spelled(chatty, ids)


@pytest.mark.parametrize("tag", tiny.SPECIAL_TOKENS)
def test_b15_halves_of_a_tag_do_not_grow_together(tag: str) -> None:
    """B15: a template that writes message after message made a control token of two halves."""
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}", BYTES)
    for at in range(1, len(tag)):
        ids = template.encode([{"content": f"a{tag[:at]} "}, {"content": tag[at:]}])
        assert not BYTES.special_ids & set(ids)
        assert BYTES.decode(ids) == f"a{tag}"


@pytest.mark.parametrize("tag", tiny.SPECIAL_TOKENS)
def test_b15_raw_prompts_parse_tags_unless_told_not_to(loaded: LoadedModel, tag: str) -> None:
    """B15: hand-built FIM prompts need their tags; the switch makes all of them data."""
    prompt = f"a{tag}b{tag}"
    ids = plain_request(loaded, prompt, SamplingParams()).prompt_ids
    assert _control(loaded, ids) == {tag: 2}
    data = plain_request(loaded, prompt, SamplingParams(), heal=False, parse_special=False)
    assert _control(loaded, data.prompt_ids) == {}
    assert _spelled(loaded, data.prompt_ids) == prompt == _spelled(loaded, ids)


@pytest.mark.parametrize("tag", [END, *FIM, FILE, REPOSITORY])
def test_b15_tags_that_are_not_flagged_special_are_control_all_the_same(
    tmp_path: Path, tag: str
) -> None:
    """B15: some tokenizers say `special: false` of tags that the engine treats as control."""
    definition = tiny.byte_tokenizer()
    for token in definition["added_tokens"]:
        token["special"] = token["content"] != tag
    loaded = load(_folder(tmp_path, definition))
    request, _ = fill_request(loaded, Hole(f"a{tag}", f"{tag}b"), SamplingParams(max_tokens=4))
    assert _control(loaded, request.prompt_ids) == dict.fromkeys(FIM, 1)
    assert _spelled(loaded, request.prompt_ids) == f"{PREFIX}a{tag}{SUFFIX}{tag}b{MIDDLE}"
    assert _text(_run(loaded, request, f"x{tag}y")) == "x"


@pytest.mark.parametrize(
    ("before", "after"), [("a", "b"), ("", ""), ("\n", "\n"), (" a ", " b"), ("a", ""), ("", "b")]
)
def test_b16_fim_ids_are_exact(loaded: LoadedModel, before: str, after: str) -> None:
    """B16: a template with a stray newline and a token that does not exist gave garbage."""
    a, b = BYTES.encode(before), BYTES.encode(after)
    request, trimmed = fill_request(loaded, Hole(before, after), SamplingParams())
    assert not trimmed
    assert request.prompt_ids == (1, *a, 3, *b, 2)
    assert request.heal == b""
    files = (ContextFile("u.py", "c"), ContextFile("v.py", ""))
    request, _ = fill_request(
        loaded, Hole(before, after, files, "w.py", "r"), SamplingParams(max_tokens=1)
    )
    assert _spelled(loaded, request.prompt_ids) == (
        f"{REPOSITORY}r{FILE}u.py\nc{FILE}v.py\n{FILE}{PREFIX}w.py\n{before}{SUFFIX}{after}{MIDDLE}"
    )
    assert len(request.prompt_ids) == 7 + len(BYTES.encode(f"ru.py\ncv.py\nw.py\n{before}")) + len(
        b
    )


HYPHENS = tuple(name.replace("_", "-") for name in tiny.SPECIAL_TOKENS)


@pytest.mark.parametrize("special", [tiny.SPECIAL_TOKENS, HYPHENS], ids=["underscore", "hyphen"])
@pytest.mark.parametrize("order", [1, -1], ids=["usual ids", "other ids"])
def test_b17_tags_are_looked_up_by_name(
    tmp_path: Path, special: tuple[str, ...], order: int
) -> None:
    """B17: hyphens, and ids taken for granted, put garbage where the tags belong."""
    special = special[::order]
    loaded = load(_folder(tmp_path, tiny.byte_tokenizer(special)))
    named = {name.replace("-", "_"): special.index(name) for name in special}
    request, _ = fill_request(loaded, Hole("a", "b"), SamplingParams(max_tokens=4))
    a, b = BYTES.encode("ab")
    assert request.prompt_ids == (named[PREFIX], a, named[SUFFIX], b, named[MIDDLE])
    assert request.stop_ids == {named[t] for t in (*FIM, PAD, REPOSITORY, FILE)}
    context = Hole("a", "b", (ContextFile("u", "c"),))
    request, _ = fill_request(loaded, context, SamplingParams(max_tokens=4))
    assert request.prompt_ids[0] == named[REPOSITORY]
    assert request.prompt_ids.count(named[FILE]) == 2


@pytest.mark.parametrize(
    "special",
    [
        (END,),
        (),
        (END, PREFIX, SUFFIX),
        (END, PREFIX, MIDDLE),
        (END, SUFFIX, MIDDLE),
        (END, PREFIX, "<fim-suffix>", "<fim-middle>"),
        (END, "<FIM_PREFIX>", "<FIM_SUFFIX>", "<FIM_MIDDLE>"),
        (END, "<fim_prefix >", " <fim_suffix>", "<fim_middle"),
    ],
    ids=lambda special: " ".join(special) or "none",
)
def test_b17_without_all_three_tags_filling_is_refused(
    tmp_path: Path, special: tuple[str, ...]
) -> None:
    """B17: an absent tag was put in as a garbage id; nothing may be filled without all three."""
    loaded = load(_folder(tmp_path, tiny.byte_tokenizer(special)))
    with pytest.raises(UnsupportedError, match="no fill-in-the-middle tokens"):
        Engine(loaded).fill(Hole("a", "b"))
    assert Engine(loaded).complete("a", SamplingParams(max_tokens=2)) is not None


def test_b17_without_repository_tags_or_tokenizer(tmp_path: Path) -> None:
    """B17: files cannot be shown to a model that has no token to part them with."""
    loaded = load(_folder(tmp_path / "a", tiny.byte_tokenizer((END, *FIM, FILE))))
    with pytest.raises(UnsupportedError, match="has no repository tokens, so no context files"):
        fill_request(loaded, Hole("a", "b", (ContextFile("u", "c"),)), SamplingParams())
    request, _ = fill_request(loaded, Hole("a", "b"), SamplingParams(max_tokens=4))
    assert request.stop_ids == {1, 2, 3, 4}
    (_folder(tmp_path / "b") / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match=r"has no tokenizer\.json"):
        Engine(load(tmp_path / "b")).fill(Hole("a", "b"))


def _independent_pieces(text: str) -> list[str]:
    """Digits one by one, then GPT-2's pattern: what both encoders must split like."""
    gpt2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    parts = [part for part in regex.split(r"(\p{N})", text) if part]
    return [piece for part in parts for piece in regex.findall(gpt2, part)]


def _independent_ids(definition: dict[str, Any], text: str) -> list[int]:
    """Byte-level BPE written out: merge the best-ranked neighbours until there are none."""
    vocabulary, merges = definition["model"]["vocab"], definition["model"]["merges"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(merges)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    ids = []
    for piece in _independent_pieces(text):
        parts = [alphabet[b] for b in piece.encode()]
        while pairs := [p for p in pairwise(parts) if p in ranks]:
            best = min(pairs, key=ranks.__getitem__)
            at, merged = 0, []
            while at < len(parts):
                joined = tuple(parts[at : at + 2]) == best
                merged.append("".join(best) if joined else parts[at])
                at += 1 + joined
            parts = merged
        ids += [vocabulary[part] for part in parts]
    return ids


@pytest.mark.parametrize("text", STRINGS, ids=ascii)
def test_b19_digits_and_whitespace_split_alike(text: str) -> None:
    """B19: "2024" as one piece, or indents of four and eight split differently."""
    expected = _independent_ids(tiny.byte_tokenizer(), text)
    assert BYTES.encode(text) == BYTES.encode(text, parse_special=True) == expected
    assert BYTES.decode(expected) == text


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet="01９²½ \t\n\r\u00a0\u3000ab'sdef_.é一👩\u200d") | st.text())
def test_b19_any_mixture_splits_alike(text: str) -> None:
    """B19: the same for any mixture of digits, spaces, letters and the rest."""
    assume(not any(tag in text for tag in tiny.SPECIAL_TOKENS))
    expected = _independent_ids(tiny.byte_tokenizer(), text)
    assert BYTES.encode(text) == BYTES.encode(text, parse_special=True) == expected
    assert BYTES.decode(expected) == text


def test_b19_the_real_vocabulary_splits_alike() -> None:
    """B19: with StarCoder2's own merges; four digits are four tokens."""
    definition = tiny.real_tokenizer_definition()
    real = Tokenizer(definition)
    for text in STRINGS:
        expected = _independent_ids(definition, text)
        assert real.encode(text) == real.encode(text, parse_special=True) == expected
        assert real.decode(expected) == text
    assert real.encode("2024") == [i for digit in "2024" for i in real.encode(digit)]
    assert len(real.encode("2024")) == 4
    assert real.encode("１２") == real.encode("１") + real.encode("２")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER], "### Instruction\nSort a list.\n\n### Response\n"),
        (
            [USER, ANSWER, OTHER_USER],
            "### Instruction\nSort a list.\n\n### Response\nitems.sort()<|endoftext|>\n\n"
            "### Instruction\nNow\nbackwards.\n\n### Response\n",
        ),
        ([USER, USER], "### Instruction\nSort a list.\n\n" * 2 + "### Response\n"),
    ],
)
def test_b21_conversations_are_as_the_template_writes_them(
    chatty: LoadedModel, messages: list[dict[str, str]], text: str
) -> None:
    """B21: the template's own opening line, and always an opened response."""
    request = chat_request(chatty, messages, SamplingParams())
    ids = chatty.require_tokenizer().encode(f"{END}{OPENING}{text}", parse_special=True)
    assert request.prompt_ids == tuple(ids)
    assert request.heal == b""


@pytest.mark.parametrize("messages", [[SYSTEM, USER], [USER, SYSTEM], [SYSTEM]])
def test_b21_a_system_message_is_refused_in_the_templates_words(
    chatty: LoadedModel, messages: list[dict[str, str]]
) -> None:
    """B21: a system message raised inside Jinja, and the client got a fault of the server."""
    with pytest.raises(BadRequestError, match=f"refuses this conversation: {REFUSAL}$"):
        Engine(chatty).chat(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 'a' + 1 }}",
        "{{ 1 // 0 }}",
        "{{ range(10 ** 9) | length }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ '%d' % 'a' }}",
    ],
)
def test_b21_whatever_a_template_raises_is_a_refusal(source: str) -> None:
    """B21: any failure inside a template belongs to the request, not to the server."""
    with pytest.raises(BadRequestError, match="the chat template refuses this conversation: "):
        ChatTemplate(source, BYTES).encode([USER])


@pytest.mark.parametrize("content", [None, 3, ["text"], [{"type": "text", "text": "a"}]])
def test_b21_content_that_is_no_text_is_refused(chatty: LoadedModel, content: Any) -> None:
    """B21: content that is no string must not be written into the prompt as Python prints it."""
    with pytest.raises(BadRequestError, match="expected a string"):
        Engine(chatty).chat([{"role": "user", "content": content}])


@pytest.mark.parametrize("stop", [(), ("#",), ("b\n",)])
@pytest.mark.parametrize("heading", ["### Instruction", "### Response"])
def test_b21_a_new_block_ends_the_answer(
    chatty: LoadedModel, heading: str, stop: tuple[str, ...]
) -> None:
    """B21: models of this template went on with an instruction of their own."""
    request = chat_request(chatty, [USER], SamplingParams(max_tokens=60, stop=stop))
    deltas = _run(chatty, request, f"a # b\n\n{heading}\nmore{END}")
    text = {(): "a # b\n\n", ("#",): "a ", ("b\n",): "a # "}[stop]
    assert (_text(deltas), deltas[-1].finish_reason) == (text, "stop")


@pytest.mark.parametrize("stop", [b"END", ["END", 1], None])
def test_b21_unusable_stops_are_refused_as_elsewhere(chatty: LoadedModel, stop: Any) -> None:
    """B21, B46: a plain string as stop was taken for its letters, and cut every answer short."""
    whole = SamplingParams(stop="END")
    assert whole.stop == SamplingParams(stop=["END"]).stop == ("END",)  # type: ignore[arg-type]
    with pytest.raises(BadRequestError, match=r"stop is [^\n]* \(expected a tuple of strings"):
        Engine(chatty).chat([USER], SamplingParams(max_tokens=2, stop=stop))


def test_b21_a_model_without_a_template_says_so(loaded: LoadedModel, tmp_path: Path) -> None:
    """B21: a base model was prompted with a made-up form; a broken one kept it from loading."""
    with pytest.raises(UnsupportedError, match=r"no chat template \(a base model\); complete"):
        Engine(loaded).chat([USER])
    folder = _folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{% if %}", encoding="utf-8")
    broken = load(folder)
    assert isinstance(Engine(broken).complete("a", SamplingParams(max_tokens=1)), str)
    with pytest.raises(CheckpointError, match="the model's chat template is broken"):
        Engine(broken).chat([USER])


def _adding_bos() -> dict[str, Any]:
    """A tokenizer whose own post-processor would put the text-start token in front."""
    start = {"SpecialToken": {"id": END, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    definition = tiny.byte_tokenizer()
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    }
    return definition


@pytest.mark.parametrize("adding", [False, True], ids=["plain", "adds its own"])
@pytest.mark.parametrize("stored", ["file", "config", "named list"])
def test_b22_the_text_start_token_occurs_once(tmp_path: Path, stored: str, adding: bool) -> None:
    """B22: the template writes it and the encoder added another; fills get none."""
    folder = _folder(tmp_path, _adding_bos() if adding else None)
    config: dict[str, Any] = {"bos_token": {"content": END}, "eos_token": END}
    if stored == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    elif stored == "config":
        config["chat_template"] = TEMPLATE
    else:
        config["chat_template"] = [{"name": "tools", "template": "no"}, {"name": "default"}]
        config["chat_template"][1]["template"] = TEMPLATE
    tiny.write_json(folder / "tokenizer_config.json", {**config, "add_bos_token": True})
    loaded = load(folder)
    params = SamplingParams(max_tokens=4)
    chat = chat_request(loaded, [USER], params)
    assert chat.prompt_ids[0] == 0
    assert chat.prompt_ids.count(0) == 1
    fill, _ = fill_request(loaded, Hole("a", "b"), params)
    for parse in (True, False):
        plain = plain_request(loaded, "a b", params, parse_special=parse)
        assert plain.prompt_ids[0] == 0
        assert plain.prompt_ids.count(0) == 1
        assert 0 not in fill.prompt_ids
    by_hand = plain_request(loaded, f"{END}a", params, heal=False)
    assert by_hand.prompt_ids == (0, *BYTES.encode("a"))
    empty = plain_request(loaded, "", params)
    assert empty.prompt_ids == (0,)
    for request in (chat, by_hand, empty):  # the end token in a prompt is no end
        deltas = _run(loaded, request, f"hi{END}")
        assert (_text(deltas), len(deltas), deltas[-1].finish_reason) == ("hi", 3, "stop")
