"""Constrained writing: only tokens that keep the output inside a grammar, by `llguidance`.

A grammar is a string in llguidance's JSON form. The functions here make one from what users
have (a JSON schema, a regular expression, Lark or GBNF rules, a list of choices) and refuse what
the library refuses, in one line.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from starquill.errors import BadRequestError, BusyError, UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from starquill.checkpoint.tokenizer import Tokenizer

T = TypeVar("T")
Ids = NDArray[np.int64]

# Any amount of space between JSON's parts would let a model write nothing else for ever.
_JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
_POSITION = re.compile(r"^(at )?\d+\(\d+\): ")
_LONGEST_REASON = 300
# The library goes down a grammar by recursion, and a process whose stack ends dies. What a text of
# this length can make it do fits the stack.
_LONGEST = 1 << 16
_STACK_BYTES = 1 << 28
# Some schemas take it exponential time (an allOf of many patterns).
_MOST_SECONDS = 20
# One thread at a time: the stack size is the process's, and what takes too long cannot be stopped.
_turn = threading.Lock()
_unstoppable: set[Future[Any]] = set()
_PATIENCE_SECONDS = 0.1
# More than an engine's requests, which it starts after all of a call were compiled.
_KEPT_COMPILED = 128


def require_llguidance() -> Any:
    """The library, imported at first use: starquill runs without it."""
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(
            "grammars need the package llguidance; pip install 'starquill[serve]'"
        ) from None
    return llguidance


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def json_schema_grammar(schema: dict[str, Any] | str) -> str:
    """JSON that `schema` allows; a string is read as JSON first."""
    library = require_llguidance()
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(found)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRequestError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequestError(
            f"the JSON schema is {type(found).__name__} (expected an object, as in "
            '{"type": "object"})'
        )
    defaults = {"whitespace_pattern": _JSON_SPACE}
    try:
        grammar = library.LLMatcher.grammar_from_json_schema(text, defaults)
    except ValueError as error:  # what Python reads as JSON, and the library does not
        raise BadRequestError(f"the JSON schema is refused: {_reason(str(error))}") from None
    return _checked(grammar, "JSON schema")


def regex_grammar(pattern: str) -> str:
    """Text that the whole of `pattern` matches, in the syntax of Rust's regex crate.

    Anchors around the whole change nothing, and are left out: the library knows none.
    """
    require_llguidance()
    body = pattern.removeprefix("^")
    if body.endswith("$") and not _is_escaped(body, len(body) - 1):
        body = body[:-1]
    if (body != pattern) and _has_alternatives(body):
        raise BadRequestError(
            f"the regex {pattern!r:.60} has ^ or $ beside | (expected none: it always matches "
            "the whole text)"
        )
    return _checked(_lark_form(f"start: /{_slashed(body)}/"), "regex")


def lark_grammar(rules: str) -> str:
    """Text that Lark's `start` rule, or the `root` rule of llama.cpp's GBNF, derives."""
    require_llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        rules.encode()
        lark = any_to_lark(rules)
    except Exception as error:  # the converter raises plain Exception for some mistakes
        raise BadRequestError(f"the grammar is refused: {_reason(str(error))}") from None
    return _checked(_lark_form(lark), "grammar")


def choice_grammar(choices: Sequence[str]) -> str:
    """Exactly one of `choices`."""
    if not choices:
        raise BadRequestError("the list of choices is empty (expected one or more)")
    return _checked(_lark_form(f"start: /{'|'.join(map(_literal, choices))}/"), "list of choices")


def _lark_form(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _literal(text: str) -> str:
    """A regular expression for `text` alone."""
    return "".join(rf"\x{{{ord(character):x}}}" for character in text)


def _slashed(pattern: str) -> str:
    """`pattern` between Lark's slashes, which know no raw newlines either."""
    steps = re.findall(r"\\?[\s\S]", pattern)
    names = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
    return "".join(names.get(step, step) for step in steps)


def _is_escaped(pattern: str, at: int) -> bool:
    before = pattern[:at]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _has_alternatives(pattern: str) -> bool:
    """Whether a | stands outside all groups and classes."""
    bare = re.sub(r"\\[\s\S]|\[\^?\]?(?:\\[\s\S]|[^\]\\])*\]", "", pattern)
    depth = 0
    for character in bare:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False


def _deeply(function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function`, called in a thread whose stack is long."""
    with _turn:
        if wait(_unstoppable, _PATIENCE_SECONDS).not_done:
            raise BusyError("another request's grammar is still being compiled; try again later")
        _unstoppable.clear()
        result = _started(function, arguments)
        try:
            return result.result(_MOST_SECONDS)
        except TimeoutError:
            _unstoppable.add(result)
            raise BadRequestError(
                f"the grammar takes longer than {_MOST_SECONDS} s to compile; make it simpler"
            ) from None
        except ValueError as error:  # text that is no UTF-8
            raise BadRequestError(f"the grammar is refused: {_reason(str(error))}") from None


def _started(function: Callable[..., T], arguments: Sequence[Any]) -> Future[T]:
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return result


def _check_length(text: str, name: str) -> None:
    if len(text) > _LONGEST:
        raise BadRequestError(
            f"the {name} has {len(text)} characters (expected {_LONGEST} at most)"
        )


@lru_cache(_KEPT_COMPILED)
def _problem(grammar: str) -> str | BadRequestError:
    """What the library says against a grammar; kept, since finding it out may take long."""
    try:
        found: str = _deeply(require_llguidance().LLMatcher.validate_grammar, grammar)
    except BadRequestError as error:
        return BadRequestError(str(error))  # without the places that it came through
    return found


def _checked(grammar: str, name: str) -> str:
    _check_length(grammar, name)
    problem = _problem(grammar)
    if isinstance(problem, BadRequestError):
        raise BadRequestError(str(problem))
    if problem and not problem.startswith("WARNING"):
        reason = _reason(problem)
        if name != "grammar":  # a place in rules that the user did not write
            reason = _POSITION.sub("", reason)
        raise BadRequestError(f"the {name} is refused: {reason}")
    return grammar


def _reason(problem: str) -> str:
    """The library's reason in one line, without the drawing below it."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["no reason given"]
    details = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *details[:1]])[:_LONGEST_REASON]


def _unpacked(matcher: LLMatcher, size: int) -> NDArray[np.bool_]:
    """For each of `size` tokens, whether it may come next."""
    packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(packed, bitorder="little", count=size).astype(bool)


class GrammarVocabulary:
    """A model's tokens as llguidance wants them; starts the grammars of its requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        library = require_llguidance()
        self.token_bytes = tokenizer.token_bytes
        self.is_spelled = np.array([bool(spelled) for spelled in self.token_bytes])
        self._library = library
        self._tokens = library.LLTokenizer(library.TokenizerWrapper(_Vocabulary(tokenizer)))
        # Compiling may take a second; choices of one request, and repeated ones, share it.
        self._compile = lru_cache(_KEPT_COMPILED)(self._compile_anew)

    def start(self, grammar: str, heal: bytes = b"") -> Grammar:
        """`grammar` at its beginning, after the text `heal` has been spelled.

        Raises BadRequestError for a grammar that the library refuses.
        """
        try:
            before, outside = heal.decode(), b""
        except UnicodeDecodeError:
            # A grammar is about characters; the rest of one is spelled in front of it.
            before, outside = "", heal
        found = self._compile(grammar, before)
        if isinstance(found, BadRequestError):
            raise BadRequestError(str(found))
        return Grammar(self, found.deep_copy(), outside)

    def _compile_anew(self, grammar: str, before: str) -> LLMatcher | BadRequestError:
        """The grammar, or why it cannot be one: both are kept."""
        try:
            return self._compile_or_raise(grammar, before)
        except BadRequestError as error:
            return BadRequestError(str(error))

    def _compile_or_raise(self, grammar: str, before: str) -> LLMatcher:
        _check_length(grammar, "grammar")
        text = _after(before, grammar) if before else grammar
        make = partial(self._library.LLMatcher, self._tokens, text, log_level=0)
        matcher: LLMatcher = _deeply(make)
        # Most of what is too costly is so in the first steps, and is found here, not where other
        # requests wait for it.
        problem = matcher.get_error() or _deeply(self._try, matcher.deep_copy())
        if problem:
            raise BadRequestError(f"the grammar is refused: {_reason(problem)}")
        return matcher

    def _try(self, matcher: LLMatcher) -> str:
        """The library's error when one token is written, if there is one."""
        first = np.flatnonzero(_unpacked(matcher, self.is_spelled.size))
        if first.size and matcher.consume_token(int(first[0])):
            matcher.compute_bitmask()
        return matcher.get_error()


class _Vocabulary:
    """What llguidance asks of a tokenizer.

    Its end token is one more than all of ours: which tokens end a request is not its business.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.id_bound
        self.special_token_ids = sorted(tokenizer.special_ids)
        # Its mark of a control token is a byte that no text has.
        self.tokens = [
            spelled or b"\xff" + tokenizer.added.get(index, "").encode()
            for index, spelled in enumerate(tokenizer.token_bytes)
        ] + [b""]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, inside=True)


def _after(before: str, grammar: str) -> str:
    """A grammar that spells `before` and goes on as `grammar` does."""
    try:
        found = json.loads(grammar) if grammar.lstrip().startswith("{") else None
        parts = found["grammars"] if found else [{"lark_grammar": grammar}]
        first = {**parts[0], "name": "written"}
    except (ValueError, KeyError, IndexError, TypeError):
        raise BadRequestError("the grammar is refused: it is not llguidance's JSON") from None
    start = {"lark_grammar": f"start: /{_literal(before)}/ @written"}
    return json.dumps({"grammars": [start, first, *parts[1:]]})


class Grammar:
    """One request's place in its grammar."""

    def __init__(self, vocabulary: GrammarVocabulary, matcher: LLMatcher, outside: bytes) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        # Healed bytes that no grammar can spell: one token writes them all.
        self._outside = outside

    def allowed(self, healing: Sequence[int] | None, end_ids: frozenset[int]) -> Ids:
        """Ids that may come next, of `healing` alone where there is a prompt to spell again."""
        spelled = self._vocabulary.token_bytes
        if self._outside:
            return np.array([i for i in healing or () if spelled[i] == self._outside])
        mask = _unpacked(self._matcher, len(spelled))
        self._check()
        mask &= self._vocabulary.is_spelled
        # An end token may have text, but ends the output all the same.
        ends = np.array(sorted(end_ids), np.int64)
        mask[ends[ends < mask.size]] = False
        if healing is not None:
            agreeing = np.zeros_like(mask)
            agreeing[healing] = True
            mask &= agreeing
        ids: Ids = np.flatnonzero(mask)
        if self._matcher.is_accepting():
            ids = np.append(ids, ends)
        if not ids.size:
            raise BadRequestError(
                "the grammar cannot go on: the model has no token that spells what it wants next"
            )
        return ids

    def accept(self, token: int) -> None:
        """Go on past `token`, one of those allowed that ends nothing."""
        if self._outside:
            self._outside = b""
            return
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_done(self) -> bool:
        """Whether nothing but the end may follow."""
        return not self._outside and self._matcher.is_stopped()

    def _check(self) -> None:
        # Limits on a grammar's cost are met while it runs.
        if self._matcher.is_error():
            raise BadRequestError(f"the grammar failed: {_reason(self._matcher.get_error())}")
