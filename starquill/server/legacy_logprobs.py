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

    def __init__(self, tokenizer: Tokenizer | None, shows_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add_prompt(self, ids: Sequence[int], logprobs: Sequence[Logprobs | None], end: int) -> None:
        """The echoed prompt; its text, in which control tokens are spelled, has `end` characters.

        The first token has no probability. It may not be in the text: a model's start token.
        """
        for token, scored in zip(ids, logprobs, strict=True):
            self._add(token, scored, shows_special=True)
            self._at = min(self._at, end)
        self._decoder.reset()
        self._at = end

    def add(self, token: int, scored: Logprobs | None) -> None:
        self._add(token, scored, self._shows_special)

    def _add(self, token: int, scored: Logprobs | None, shows_special: bool) -> None:
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
        if tokenizer is not None and token in tokenizer.special_ids:
            self._at += len(name) * shows_special
        elif tokenizer is not None and token < len(tokenizer.token_bytes):
            self._at += len(self._decoder.decode(tokenizer.token_bytes[token]))

    def take(self) -> dict[str, list[Any]]:
        rows, self._rows = self._rows, []
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[at] for row in rows] for at, name in enumerate(names)}
