"""Constrained writing: whatever a model would like to write, its output is in the grammar."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest
import torch

from starquill.engine import grammar as grammars
from starquill.engine.engine import Engine
from starquill.engine.grammar import (
    GrammarVocabulary,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import plain_request
from starquill.engine.sampling import Sampler
from starquill.errors import BadRequestError, BusyError, UnsupportedError
from starquill.loading import load
from starquill.types import Delta, GenerateRequest, SamplingParams
from tests import tiny

WILD = SamplingParams(max_tokens=2000, temperature=5.0)
# Bounded in every direction, so that every answer can end.
POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "at": {"type": "array", "items": {"type": "integer", "minimum": -99, "maximum": 99},
               "minItems": 2, "maxItems": 3},
        "kind": {"enum": ["open", "closed", None]},
    },
    "required": ["name", "at"],
    "additionalProperties": False,
}  # fmt: skip
TREE = {
    "$ref": "#/$defs/leaf",
    "$defs": {"leaf": {"anyOf": [{"type": "boolean"}, {"const": {"é\n": '"'}}]}},
}


def is_point(value: Any) -> bool:
    assert set(value) <= {"name", "at", "kind"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert 2 <= len(value["at"]) <= 3
    assert all(type(n) is int and -99 <= n <= 99 for n in value["at"])
    return value.get("kind", "open") in ("open", "closed", None)


def is_tree(value: Any) -> bool:
    return value in (True, False, {"é\n": '"'})


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny.load_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


def run(
    loaded: LoadedModel, grammar: str, params: SamplingParams, prompt: str = "x", heal: bool = False
) -> list[Delta]:
    request = plain_request(loaded, prompt, params, heal=heal)
    return list(Engine(loaded).generate(dataclasses.replace(request, grammar=grammar)))


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def written(loaded: LoadedModel, words: str) -> list[int]:
    return loaded.require_tokenizer().encode(words, parse_special=True)


@pytest.mark.parametrize(("schema", "holds"), [(POINT, is_point), (TREE, is_tree)])
@pytest.mark.parametrize("seed", range(12))
def test_output_parses_and_validates(
    loaded: LoadedModel, schema: dict[str, Any], holds: Callable[[Any], bool], seed: int
) -> None:
    params = dataclasses.replace(WILD, seed=seed)
    deltas = run(loaded, json_schema_grammar(schema), params)
    assert deltas[-1].finish_reason == "stop"
    assert holds(json.loads(text(deltas)))
    special = loaded.require_tokenizer().special_ids - loaded.end_ids
    assert not {delta.token_id for delta in deltas} & special


def test_any_object(loaded: LoadedModel) -> None:
    """A model that would write something else writes JSON all the same."""
    model = tiny.scripted(loaded, [*written(loaded, '["a"] {"a" : [1, {}]} x')], 1)
    deltas = run(model, json_object_grammar(), SamplingParams(60))
    assert text(deltas).startswith("{")
    wanted = '{"a" : [1,\n {}], "b": "}"}'
    model = tiny.scripted(loaded, written(loaded, wanted), 1)
    deltas = run(model, json_object_grammar(), SamplingParams(60))
    assert (text(deltas), deltas[-1].finish_reason) == (wanted, "stop")


def test_space_between_json_is_bounded(loaded: LoadedModel) -> None:
    """A model that likes spaces wrote them until its limit."""
    model = tiny.scripted(loaded, [written(loaded, " ") + written(loaded, "}")], 1)
    deltas = run(model, json_object_grammar(), SamplingParams(500))
    assert json.loads(text(deltas)) == {}
    assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-f0-9]{8}",
        r"^(ab|c){2,5}$",
        r"-?[1-9]{1,3}\.[0-9]{2}",
        r"/[a-z_/]{1,9}/",
        "(é|😀|\n){4}",
        r"\$[A-Z]{0,4}\\",
    ],
)
def test_the_whole_text_matches_a_regex(loaded: LoadedModel, pattern: str) -> None:
    for seed in range(6):
        deltas = run(loaded, regex_grammar(pattern), dataclasses.replace(WILD, seed=seed))
        assert re.fullmatch(pattern, text(deltas)), text(deltas)
        assert deltas[-1].finish_reason == "stop"


@pytest.mark.parametrize("greedy", [True, False])
def test_choices(loaded: LoadedModel, greedy: bool) -> None:
    choices = ["", "red", "réd\n", 'a"b/|\\', "redder"]
    for seed in range(8):
        params = SamplingParams(50) if greedy else dataclasses.replace(WILD, seed=seed)
        assert text(run(loaded, choice_grammar(choices), params)) in choices


def test_the_end_token_ends_where_the_grammar_may_end(loaded: LoadedModel) -> None:
    """In front of that place it is not allowed, and the next likeliest is taken."""
    (a, b), end = written(loaded, "ab"), 0
    model = tiny.scripted(loaded, [[end, a], [end, b], [end, b]], 1)
    deltas = run(model, regex_grammar("ab+"), SamplingParams(9))
    assert [delta.token_id for delta in deltas] == [a, b, end]
    assert (text(deltas), deltas[-1].finish_reason) == ("ab", "stop")


def test_a_requests_own_stop_tokens_end_it_too(loaded: LoadedModel) -> None:
    a, pad = *written(loaded, "a"), tiny.SPECIAL_TOKENS.index("<file_sep>")
    model = tiny.scripted(loaded, [[pad, a], [pad, a]], 1)
    request = GenerateRequest(
        "r", (9,), SamplingParams(9), stop_ids=frozenset({pad}), grammar=regex_grammar("a+")
    )
    assert [delta.token_id for delta in Engine(model).generate(request)] == [a, pad]


def test_an_end_token_with_text_is_an_end_all_the_same(loaded: LoadedModel) -> None:
    a, b, c = written(loaded, "abc")
    model = tiny.scripted(loaded, [a, [b, c], [b, c]], 1)
    request = GenerateRequest(
        "r", (9,), SamplingParams(9), stop_ids=frozenset({b}), grammar=regex_grammar("a[bc]c*")
    )
    assert [delta.token_id for delta in Engine(model).generate(request)] == [a, c, b]


def test_a_complete_grammar_ends_without_an_end_token(loaded: LoadedModel) -> None:
    model = tiny.scripted(loaded, written(loaded, "abab"), 1)
    deltas = run(model, choice_grammar(["ab", "b"]), SamplingParams(9, stop=("bx",)))
    # The last letter waited, as it might have begun the stop string.
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("a", None), ("b", "stop")]


@pytest.mark.parametrize("stop", ["b", "ab", "abx"])
def test_stop_strings_and_limits_still_end(loaded: LoadedModel, stop: str) -> None:
    model = tiny.scripted(loaded, written(loaded, "ab" * 9), 1)
    grammar = regex_grammar("[ab]*")
    stopped = run(model, grammar, SamplingParams(4, stop=(stop,)))
    whole = "abab"
    found = stop in whole
    assert text(stopped) == (whole[: whole.index(stop)] if found else whole)
    assert stopped[-1].finish_reason == ("stop" if found else "length")


def test_other_rules(loaded: LoadedModel) -> None:
    lark = 'start: item ("," item)*\nitem: "x" | NUMBER\nNUMBER: /[0-9]/'
    gbnf = 'root ::= item ("," item)*\nitem ::= "x" | [0-9]\n'
    model = tiny.scripted(loaded, written(loaded, "1,x,a,7"), 1)
    for rules in (lark, gbnf):
        assert text(run(model, lark_grammar(rules), SamplingParams(4))) == "1,x,"


# --- with token healing ---


@pytest.mark.parametrize(
    ("prompt", "choices", "likeliest", "expected"),
    [
        ("q  ", ["yes", "no"], ["ĠĠ", "y", "e", "s"], "yes"),
        # One token spells the prompt's end and goes on, unless the grammar begins otherwise.
        ("q de", ["f g", "g"], ["def", "Ġ", "g"], "f g"),
        ("q de", ["g"], [["def", "de"], "g"], "g"),
        ("q a\n", [" b"], ["ĊĠ", "b"], " b"),
        ("q a\n", ["b"], [["ĊĠ", "Ċ"], "b"], "b"),
    ],
)
def test_the_prompts_end_is_spelled_first(
    loaded: LoadedModel, prompt: str, choices: list[str], likeliest: list[Any], expected: str
) -> None:
    grammar = choice_grammar(choices)
    for seed in range(4):
        params = dataclasses.replace(WILD, seed=seed)
        assert text(run(loaded, grammar, params, prompt, heal=True)) in choices
    request = plain_request(loaded, prompt, SamplingParams(30), heal=True)
    assert request.heal
    id_of = loaded.require_tokenizer().id_of
    ids: list[Any] = [
        id_of(piece) if isinstance(piece, str) else [id_of(p) for p in piece] for piece in likeliest
    ]
    model = tiny.scripted(loaded, ids, len(request.prompt_ids))
    deltas = list(Engine(model).generate(dataclasses.replace(request, grammar=grammar)))
    assert (text(deltas), deltas[-1].finish_reason) == (expected, "stop")


def test_half_a_character_is_spelled_before_the_grammar(loaded: LoadedModel) -> None:
    for seed in range(4):
        params = dataclasses.replace(WILD, seed=seed)
        assert text(run(loaded, choice_grammar(["yes", "no"]), params, "q😀", heal=True)) in (
            "yes",
            "no",
        )


def test_grammars_of_several_parts_are_healed_too(loaded: LoadedModel) -> None:
    parts = [
        {"name": "first", "lark_grammar": 'start: "<" @second ">"'},
        {"name": "second", "json_schema": {"enum": [1, "b"]}},
    ]
    grammar = json.dumps({"grammars": parts})
    for raw in (grammar, 'start: "<" ("1" | "\\"b\\"") ">"'):
        for seed in range(4):
            params = dataclasses.replace(WILD, seed=seed)
            assert text(run(loaded, raw, params, "q  ", heal=True)) in ("<1>", '<"b">')


# --- control tokens ---


@pytest.mark.parametrize(
    "rules", ['start: "a" <fim_middle>', 'start: "a" <[1]>', 'start: "a" <|endoftext|>']
)
def test_rules_cannot_write_control_tokens(loaded: LoadedModel, rules: str) -> None:
    generation = Engine(loaded).generate(
        GenerateRequest("r", (9,), SamplingParams(5), grammar=lark_grammar(rules))
    )
    assert next(generation).text == "a"
    with pytest.raises(BadRequestError, match="no token that spells"):
        next(generation)


def test_padding_rows_of_the_vocabulary_are_never_chosen(tmp_path: Path) -> None:
    raw = tiny.config(vocab_size=400, max_position_embeddings=512)
    folder = tiny.write_checkpoint(tmp_path, raw, tokenizer=tiny.byte_tokenizer(vocab_size=280))
    loaded = load(folder, allow_padded_vocab=True)
    for seed in range(4):
        params = dataclasses.replace(WILD, seed=seed)
        assert len(text(run(loaded, regex_grammar(r"[a-z]{40}"), params))) == 40


# --- refusals ---


@pytest.mark.parametrize(
    ("make", "given", "reason"),
    [
        (json_schema_grammar, "{", "the JSON schema is not JSON: "),
        (json_schema_grammar, "[]", "the JSON schema is list .expected an object"),
        (json_schema_grammar, {"type": "frob"}, "the JSON schema is refused: .*frob"),
        (json_schema_grammar, {"$ref": "#/no"}, "the JSON schema is refused: .*/no"),
        (json_schema_grammar, {"type": {1, 2}}, "the JSON schema is not JSON: "),
        (json_schema_grammar, {"const": float("nan")}, "the JSON schema is refused: "),
        (json_schema_grammar, {"const": "\ud800"}, "the JSON schema is refused: "),
        (regex_grammar, "[a", "the regex is refused: .*unclosed character class"),
        (regex_grammar, "(?=a)", "the regex is refused: .*look-around"),
        (regex_grammar, "a$b", "the regex is refused: "),
        (regex_grammar, "^a|b$", r"the regex .* has \^ or \$ beside \|"),
        (regex_grammar, "\ud800", "the regex is refused: "),
        (lark_grammar, "start: no", 'the grammar is refused: .*unknown name: "no"'),
        (lark_grammar, "root ::= no", "the grammar is refused: .*no"),
        (lark_grammar, "", "the grammar is refused: "),
        (lark_grammar, "\ud800", "the grammar is refused: "),
        (choice_grammar, [], "the list of choices is empty"),
        (choice_grammar, ["\ud800"], "the list of choices is refused: "),
    ],
)
def test_what_the_library_refuses(make: Callable[[Any], str], given: Any, reason: str) -> None:
    with pytest.raises(BadRequestError, match=f"^{reason}") as caught:
        make(given)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("heal", [b"", b"x"])
@pytest.mark.parametrize(
    "given", ["", "{", "{}", "\ud800", '{"grammars": []}', "start: <nope>", "nonsense"]
)
def test_a_bad_grammar_is_refused_before_anything_runs(
    loaded: LoadedModel, given: str, heal: bytes
) -> None:
    request = GenerateRequest("r", (9,), SamplingParams(5), heal=heal, grammar=given)
    with pytest.raises(BadRequestError, match="the grammar is refused: ") as caught:
        Engine(loaded).generate(request)
    assert "\n" not in str(caught.value)


CHAIN = r"""
from starquill.engine.engine import Engine
from starquill.engine.grammar import lark_grammar
from starquill.types import GenerateRequest, SamplingParams
import starquill

count = 3500
rules = "".join(f"a{i}: a{i + 1}\n" for i in range(count))
grammar = lark_grammar(f'start: a0\n{rules}a{count}: "x"')
request = GenerateRequest("r", (9,), SamplingParams(5), grammar=grammar)
print("".join(d.text for d in Engine(starquill.load("default")).generate(request)))
"""


def test_deep_rules_do_not_end_the_process() -> None:
    """They ran out of the stack, and took a server with them."""
    done = subprocess.run(
        [sys.executable, "-c", CHAIN], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "x\n"), done.stderr[-500:]


def test_what_costs_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (
        lambda: regex_grammar("a" * 70_000),
        lambda: choice_grammar(["x" * 20_000]),
        lambda: json_schema_grammar({"const": "x" * 70_000}),
    ):
        with pytest.raises(BadRequestError, match=r"characters .expected 65536 at most"):
            make()
    blocked = threading.Event()
    monkeypatch.setattr(grammars, "_MOST_SECONDS", 0.01)
    with pytest.raises(BadRequestError, match="takes longer than"):
        grammars._deeply(blocked.wait)
    blocked.set()


def test_what_takes_too_long_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel
) -> None:
    """Its thread cannot be stopped: each time it was asked for, one more ran on."""
    free = threading.Event()
    calls: list[str] = []

    def compiling(tokens: Any, grammar: str, **_: Any) -> Any:
        calls.append(grammar)
        free.wait()
        return llguidance.LLMatcher(tokens, grammar)

    vocabulary = GrammarVocabulary(loaded.require_tokenizer())
    monkeypatch.setattr(vocabulary, "_library", SimpleNamespace(LLMatcher=compiling))
    monkeypatch.setattr(grammars, "_MOST_SECONDS", 0.05)
    slow, other = regex_grammar("slow"), regex_grammar("other")
    for _ in range(3):
        with pytest.raises(BadRequestError, match="takes longer than"):
            vocabulary.start(slow)
        with pytest.raises(BusyError, match="try again later"):
            vocabulary.start(other)
    assert calls == [slow]
    free.set()
    assert not wait(set(grammars._unstoppable), 30).not_done
    monkeypatch.setattr(grammars, "_MOST_SECONDS", 20)
    assert not vocabulary.start(other).is_done
    with pytest.raises(BadRequestError, match="takes longer than"):
        vocabulary.start(slow)


def test_a_grammar_that_is_refused_slowly_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def validating(_: Any, grammar: str) -> str:
        calls.append(grammar)
        raise BadRequestError("takes longer")

    monkeypatch.setattr(grammars, "_deeply", validating)
    for _ in range(3):
        with pytest.raises(BadRequestError, match="takes longer"):
            regex_grammar("slow to read")
    assert len(calls) == 1


def test_a_grammar_that_would_fail_is_refused_at_once(loaded: LoadedModel) -> None:
    """Its first step would have failed after others had waited for it."""
    names = "".join(f"A{i}: (A{i + 1} | /b/)+\n" for i in range(300))
    grammar = lark_grammar(f'start: A0\n{names}A300: "x"')
    request = GenerateRequest("r", (9,), SamplingParams(5), grammar=grammar)
    with pytest.raises(BadRequestError, match="too many expressions"):
        Engine(loaded).generate(request)


def test_a_model_without_a_tokenizer_takes_no_grammar(loaded: LoadedModel) -> None:
    bare = dataclasses.replace(loaded, tokenizer=None)
    request = GenerateRequest("r", (9,), SamplingParams(5), grammar=regex_grammar("a"))
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json"):
        Engine(bare).generate(request)


def test_without_the_library_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for make in (lambda: regex_grammar("a"), lambda: json_schema_grammar({})):
        with pytest.raises(UnsupportedError, match=r"pip install 'starquill\[serve\]'$"):
            make()
    assert Engine(loaded).complete("x", SamplingParams(2)) is not None


def test_the_library_is_imported_for_grammars_alone() -> None:
    code = (
        "import sys, starquill, starquill.cli.generate, starquill.engine.engine as e\n"
        "e.Engine(starquill.load('default')).complete('x = ', starquill.SamplingParams(2))\n"
        "sys.exit('llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_equal_grammars_are_compiled_once(loaded: LoadedModel) -> None:
    """And each request has a place of its own in them."""
    vocabulary = loaded.grammars
    assert vocabulary is loaded.grammars
    grammar = regex_grammar("abcabc")
    (a, *_), end = written(loaded, "a"), frozenset({0})
    first, second = vocabulary.start(grammar), vocabulary.start(grammar)
    before = vocabulary._compile.cache_info().misses
    first.accept(a)
    assert second.allowed(None, end).tolist() != first.allowed(None, end).tolist()
    vocabulary.start(grammar)
    assert vocabulary._compile.cache_info().misses == before


def test_the_sampler_sees_no_other_token() -> None:
    """Filters and penalties act on what is allowed."""
    logits = torch.arange(10.0)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=50.0, seed=1),
        SamplingParams(temperature=1.0, top_k=3, seed=1),
        SamplingParams(temperature=1.0, top_p=0.1, min_p=0.5, seed=1),
        SamplingParams(logit_bias={2: -50.0}),
    ):
        sampler = Sampler(params, (2, 3))
        assert {sampler.choose(logits, [2, 3]) for _ in range(20)} <= {2, 3}
    assert logits.tolist() == list(range(10))
