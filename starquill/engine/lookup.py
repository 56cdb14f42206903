"""Prompt lookup: what followed the same tokens before is proposed to follow them again.

Proposals are verified in one step with the token before them. Each is kept while the sampler, asked
in the usual way, chooses just it: for a proposal that is certain of one token this is rejection
sampling, so the text is the same with and without, greedy or sampled. (The method is Saxena's
prompt lookup decoding, 2023, as in transformers' `prompt_lookup_num_tokens`.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Tokens that must agree. Of an edited file shorter ones find the wrong place too often.
_GRAM = 5
_WEIGHT = 0.1  # of the newest observation in a running mean
_FIRST_CHANCE = 0.4
_FIRST_COST = 0.2


class StepCost:
    """What one more row costs in a step of decoding, by running means of measured steps."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, rows: int, seconds: float) -> None:
        old = self._seconds.get(rows, seconds)
        self._seconds[rows] = old + _WEIGHT * (seconds - old)

    def of(self, rows: int) -> tuple[float, float]:
        """The cost of a step of `rows`, and of each further row, in steps of one row."""
        least, most = min(self._seconds, default=1), max(self._seconds, default=1)
        if least == most:
            further = _FIRST_COST
        else:
            slope = (self._seconds[most] - self._seconds[least]) / (most - least)
            one = self._seconds[least] - slope * (least - 1)
            further = min(max(slope / one, 0.01), 1.0) if one > 0 else 1.0
        return 1 + further * (rows - 1), further


class PromptLookup:
    """One sequence's tokens, found by the `_GRAM` before them.

    Whether proposing pays is measured: `chance` is how often the first proposal is right, which
    shows at every match, whether it was verified or not.
    """

    def __init__(self, ids: Iterable[int], most: int) -> None:
        self.chance = _FIRST_CHANCE
        self._most = most
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self._guess: int | None = None
        for token in ids:
            self._append(token)
        self._guess = self._first()

    def add(self, token: int) -> None:
        """`token` was written."""
        if self._guess is not None:
            self.chance += _WEIGHT * ((token == self._guess) - self.chance)
        self._append(token)
        self._guess = self._first()

    def _append(self, token: int) -> None:
        if len(self._ids) >= _GRAM:
            self._after[tuple(self._ids[-_GRAM:])] = len(self._ids)
        self._ids.append(token)

    def _first(self) -> int | None:
        at = self._after.get(tuple(self._ids[-_GRAM:]))
        return None if at is None else self._ids[at]

    def propose(self, cost: StepCost, rows: int, limit: int) -> Sequence[int]:
        """Tokens that may come next, as many as pay in a step that has `rows` rows already.

        One more pays while its chance, beside the row that it costs, is better than what the step
        gives for its cost without it.
        """
        at = self._after.get(tuple(self._ids[-_GRAM:]))
        if at is None:
            return ()
        step, further = cost.of(rows)
        tokens, chance, count = float(rows), self.chance, 0
        while count < min(self._most, limit) and chance * step > further * tokens:
            tokens, step, chance, count = (
                tokens + chance,
                step + further,
                chance * self.chance,
                count + 1,
            )
        found = self._ids[at : at + count]
        while len(found) < count:  # the end of the text is what repeats
            found.append(found[len(found) - (len(self._ids) - at)])
        return found
