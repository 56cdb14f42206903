"""`logprobs` in the form of OpenAI's completions: four lists of equal length."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.types import Logprobs

# JSON has no infinity; OpenAI writes this for what cannot be.
LEAST_LOGPROB = -9999.0


def token_name(tokenizer: Tokenizer | None, token: int) -> str:
    """A token's text; one that is not whole characters by its bytes, as `bytes:\\xf0\\x9f`."""
    if tokenizer is None or token >= len(tokenizer.token_bytes):
        return f"<{token}>"
    if token in tokenizer.special_ids:
        return tokenizer.added[token]
    spelled = tokenizer.token_bytes[token]
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


class LegacyLogprobs:
    """Collects one choice's tokens; `take` gives those that were added since the last time.

    `text_offset` is where a token's text begins in the choice's, in characters. Control tokens in
    the output have none unless `shows_special`. What a stop string cut off is counted all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        shows_special: bool = False,
        own_space: bool = False,
    ) -> None:
        """`own_space` says that a space at the output's beginning is not in its text."""
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._own_space = own_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add_prompt(
        self, ids: Sequence[int], logprobs: Sequence[Logprobs | None], text: str
    ) -> None:
        """The echoed prompt, in whose `text` control tokens are spelled.

        The first token has no probability. What is not in the text takes no room in it: a start
        token, a space of the tokenizer's own. White space that a control token swallowed does.
        """
        for token, scored in zip(ids, logprobs, strict=True):
            self._add(token, scored)
            self._at = _behind(text, self._at, self._shown(token, shows_special=True))
        self._decoder.reset()
        self._at = len(text)

    def add(self, token: int, scored: Logprobs | None) -> None:
        self._add(token, scored)
        shown = self._shown(token, self._shows_special)
        self._at += len(shown) - (self._own_space and shown.startswith(" "))
        self._own_space = False

    def _add(self, token: int, scored: Logprobs | None) -> None:
        tokenizer, name = self._tokenizer, token_name(self._tokenizer, token)
        chosen, top = None, None
        if scored is not None:
            chosen = max(scored.chosen, LEAST_LOGPROB)
            top = {
                token_name(tokenizer, one.token_id): max(one.logprob, LEAST_LOGPROB)
                for one in scored.top
            }
            top.setdefault(name, chosen)
        self._rows.append((name, chosen, top, self._at))

    def _shown(self, token: int, shows_special: bool) -> str:
        """What the token adds to the text: a character counts where it is complete."""
        tokenizer = self._tokenizer
        if tokenizer is None or token >= len(tokenizer.token_bytes):
            return ""
        if token in tokenizer.special_ids:
            return tokenizer.added[token] if shows_special else ""
        return self._decoder.decode(tokenizer.token_bytes[token])

    def take(self) -> dict[str, list[Any]]:
        rows, self._rows = self._rows, []
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[at] for row in rows] for at, name in enumerate(names)}


def _behind(text: str, at: int, shown: str) -> int:
    """Where `text` goes on behind `shown`, which stands at `at` if it is in the text at all."""
    for found in filter(None, (shown, shown.removeprefix(" "))):
        if text.startswith(found, at):
            return at + len(found)
    bare, behind = shown.removeprefix(" "), at
    while bare and behind < len(text) and text[behind].isspace():
        behind += 1
        if text.startswith(bare, behind):
            return behind + len(bare)
    return at
