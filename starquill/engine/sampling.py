"""Choosing the next token from logits."""

from __future__ import annotations

import secrets

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from starquill.types import Logprobs, SamplingParams, TokenLogprob


class Sampler:
    """One request's choices: its own random numbers and its own history of tokens.

    Logits are changed in this order: bias, repetition penalty (prompt and output), presence and
    frequency penalty (output), the allowed set, temperature, top-k, top-p, min-p.
    """

    def __init__(self, params: SamplingParams, prompt_ids: tuple[int, ...]) -> None:
        self.params = params
        self.seed = params.seed
        self._generator: torch.Generator | None = None
        if params.temperature > 0:
            if self.seed is None:
                self.seed = secrets.randbits(32)
            self._generator = torch.Generator().manual_seed(self.seed % 2**63)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._prompt_ids = prompt_ids
        self._seen: NDArray[np.bool_] | None = None  # [V]
        self._counts: dict[int, int] = {}

    def choose(
        self,
        logits: Tensor,
        allowed: list[int] | NDArray[np.int64] | None = None,
        is_output: bool = True,
    ) -> int:
        """The next token from `logits` `[V]` float32 (left as it is), among `allowed` ids.

        Presence and frequency penalties count it only if it `is_output`.
        """
        params = self.params
        # numpy: torch would wake its threads, which then get in the way of the kernels'.
        scores = self._penalized(logits.numpy(force=True))
        if allowed is not None:
            within = np.full_like(scores, -np.inf)
            within[allowed] = scores[allowed]
            scores = within
        if params.temperature == 0:
            token = int(scores.argmax())
        else:
            # Relative to the best and in double, so that no temperature overflows.
            relative = torch.from_numpy(scores - scores.max()).double() / params.temperature
            probabilities = _filtered(relative, params)
            token = int(torch.multinomial(probabilities, 1, generator=self._generator))
        if self._seen is not None:
            self._seen[token] = True
        if is_output and (params.presence_penalty or params.frequency_penalty):
            self._counts[token] = self._counts.get(token, 0) + 1
        return token

    def _penalized(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        params = self.params
        if params.repetition_penalty != 1 and self._seen is None:
            self._seen = np.zeros(logits.size, dtype=np.bool_)
            self._seen[list(self._prompt_ids)] = True
        if not (self._bias_ids.size or self._counts) and self._seen is None:
            return logits
        scores = logits.copy()
        scores[self._bias_ids] += self._bias
        if self._seen is not None:
            seen, penalty = scores[self._seen], np.float32(params.repetition_penalty)
            with np.errstate(over="ignore"):  # clipped below
                scores[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            counts = np.fromiter(self._counts.values(), dtype=np.float32)
            penalties = params.presence_penalty + params.frequency_penalty * counts
            scores[np.fromiter(self._counts, dtype=np.int64)] -= penalties
        limits = np.finfo(scores.dtype)
        return np.clip(scores, limits.min, limits.max, out=scores)


def _filtered(scores: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities `[V]` after top-k, top-p and min-p; the likeliest token always stays."""
    if 0 < params.top_k < scores.numel():
        lowest = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    probabilities = scores.softmax(-1)
    if params.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # A token stays while the mass before it is below top_p.
        beyond = ordered.cumsum(-1) - ordered >= params.top_p
        beyond[0] = False
        probabilities = probabilities.masked_fill(_unsorted(beyond, order), 0.0)
    if params.min_p > 0:
        least = params.min_p * probabilities.max()
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    return probabilities


def _unsorted(flags: Tensor, order: Tensor) -> Tensor:
    return torch.zeros_like(flags).scatter(0, order, flags)


def logprobs(logits: Tensor, token: int, top: int) -> Logprobs:
    """Log probabilities under the model's own distribution: no penalty, no temperature."""
    values = logits.log_softmax(-1)
    best = values.topk(min(top, values.numel()))
    alternatives = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Logprobs(
        chosen=float(values[token]),
        top=tuple(TokenLogprob(index, value) for index, value in alternatives),
    )
