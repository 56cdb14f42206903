"""Token healing: let the model choose again how a prompt's last piece of text is tokenized.

A prompt that ends inside a token's text (a newline, a space, half a word) puts the model where
it never was in training. So the last token is taken back, and the first new tokens may be any
that spell its text or go on past it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from starquill.checkpoint.tokenizer import Tokenizer


class HealingVocabulary:
    """Finds the tokens that agree with given text, by its bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids: dict[bytes, list[int]] = defaultdict(list)
        for index, spelled in enumerate(tokenizer.token_bytes):
            if spelled:
                self._ids[spelled].append(index)
        self._sorted = sorted(self._ids)

    def allowed(self, text: bytes) -> list[int]:
        """Ids of tokens that begin with `text`, and of those that `text` begins with.

        The latter only where other tokens can spell the rest.
        """
        ids: list[int] = []
        at = bisect_left(self._sorted, text)
        while at < len(self._sorted) and self._sorted[at].startswith(text):
            ids += self._ids[self._sorted[at]]
            at += 1
        spellable = self._spellable(text)
        for length in range(1, len(text)):
            if spellable[length]:
                ids += self._ids.get(text[:length], ())
        return ids

    def _spellable(self, text: bytes) -> list[bool]:
        """For each place in `text`, whether tokens can spell it from there to its end or past."""
        result = [True] * (len(text) + 1)
        for start in range(len(text) - 1, -1, -1):
            rest = text[start:]
            at = bisect_left(self._sorted, rest)
            result[start] = (at < len(self._sorted) and self._sorted[at].startswith(rest)) or any(
                text[start:end] in self._ids and result[end] for end in range(start + 1, len(text))
            )
        return result


def split_for_healing(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[int], bytes]:
    """Take back the last token of a prompt: the ids to run, and the text to spell again.

    Nothing is taken back from a prompt of one token (the model needs something to run on) or
    from one that ends in a control token (which has no text).
    """
    if len(ids) < 2:
        return ids, b""
    spelled = tokenizer.token_bytes[ids[-1]]
    return (ids[:-1], spelled) if spelled else (ids, b"")
