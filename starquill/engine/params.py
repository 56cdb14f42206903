"""Checking `SamplingParams`; no torch, so that mistakes are told before a model is loaded."""

from __future__ import annotations

from starquill.errors import BadRequestError, listing
from starquill.types import SamplingParams

MOST_LOGPROBS = 20


def check_params(params: SamplingParams, vocab_size: int | None = None) -> None:
    """Raise BadRequestError naming every value that cannot be used.

    Token ids are checked only if `vocab_size` is known.
    """
    problems = []

    def require(holds: bool, name: str, expected: str) -> None:
        if not holds:
            problems.append(f"{name} is {getattr(params, name)!r} (expected {expected})")

    def within(name: str, low: float, high: float, expected: str) -> None:
        value = getattr(params, name)
        require(_is_number(value) and low <= value <= high, name, expected)

    def whole(value: object, low: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= low

    require(whole(params.max_tokens, 0), "max_tokens", "0 or more")
    within("temperature", 0, 100, "0 to 100")
    within("top_p", 0, 1, "0 to 1")
    within("min_p", 0, 1, "0 to 1")
    require(whole(params.top_k, 0), "top_k", "0 or more")
    within("repetition_penalty", 0.01, 100, "0.01 to 100; 1 is none")
    within("presence_penalty", -2, 2, "-2 to 2")
    within("frequency_penalty", -2, 2, "-2 to 2")
    require(params.seed is None or whole(params.seed, -(2**63)), "seed", "a whole number")
    most = f"0 to {MOST_LOGPROBS}"
    logprobs = params.logprobs
    require(
        logprobs is None or (whole(logprobs, 0) and logprobs <= MOST_LOGPROBS), "logprobs", most
    )
    strings = isinstance(params.stop, tuple) and all(isinstance(s, str) for s in params.stop)
    require(strings, "stop", "a tuple of strings")
    if vocab_size is not None:
        outside = [str(i) for i in params.logit_bias if not (whole(i, 0) and i < vocab_size)]
        if outside:
            problems.append(
                f"logit_bias names tokens {listing(outside)} (expected ids 0 to {vocab_size - 1})"
            )
    if not all(_is_number(bias) for bias in params.logit_bias.values()):
        problems.append("logit_bias has a value that is not a finite number")
    if problems:
        raise BadRequestError("; ".join(problems))


def _is_number(value: object) -> bool:
    """A finite int or float that float32 can hold; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -3e38 <= value <= 3e38  # false for NaN
