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
        self._seen = set(prompt_ids) if params.repetition_penalty != 1 else set()
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
        scores = self._penalized(logits)
        if allowed is not None:
            known = scores.numpy(force=True)  # as below, for the sake of torch's threads
            within = np.full_like(known, -np.inf)
            within[allowed] = known[allowed]
            scores = torch.from_numpy(within)
        if params.temperature == 0:
            # torch would wake its threads for this, which then get in the way of the kernels'.
            token = int(scores.numpy(force=True).argmax())
        else:
            # Relative to the best and in double, so that no temperature overflows.
            relative = (scores - scores.max()).double() / params.temperature
            probabilities = _filtered(relative, params)
            token = int(torch.multinomial(probabilities, 1, generator=self._generator))
        if params.repetition_penalty != 1:
            self._seen.add(token)
        if is_output and (params.presence_penalty or params.frequency_penalty):
            self._counts[token] = self._counts.get(token, 0) + 1
        return token

    def _penalized(self, logits: Tensor) -> Tensor:
        params = self.params
        changes = params.logit_bias or self._seen or self._counts
        scores = logits.clone() if changes else logits
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        if self._seen:
            index = torch.tensor(sorted(self._seen))
            seen = scores[index]
            penalty = params.repetition_penalty
            scores[index] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            index = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=scores.dtype)
            scores[index] -= params.presence_penalty + params.frequency_penalty * counts
        limits = torch.finfo(scores.dtype)
        return scores.clamp_(limits.min, limits.max) if changes else scores


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
