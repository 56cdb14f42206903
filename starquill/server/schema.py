"""The bodies of requests. Needs no torch, so that a bad one is refused at once.

Unknown fields are ignored; null is the same as leaving a field out. Nothing is converted: a
string is no number, and `true` is no 1.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from starquill.types import SamplingParams

MOST_CHOICES = 128
MOST_STOPS = 16
_MOST_DIGITS = 10
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that multiples of it differ modulo 2**63

Number = Annotated[float, Field(allow_inf_nan=False)]
# A list ends at its first mistake: a body of a million would keep everybody waiting.
FAIL_FAST = Field(fail_fast=True)
MOST_BIASES = 4096
# Each is looked for at every step. OpenAI's routes take less, editors send dozens.
Stops = Annotated[list[str], Field(fail_fast=True, max_length=256)]


def check_biases(biases: Any) -> Any:
    """Refuse more biases than a step should add, before pydantic looks at each."""
    if isinstance(biases, dict | list) and len(biases) > MOST_BIASES:
        raise ValueError(f"has {len(biases)} entries (expected {MOST_BIASES} at most)")
    return biases


PickedAdapter = str | dict[str, Number] | None


class Body(BaseModel):
    """A JSON object of a request, or one within it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if value is not None}


class SamplingBody(Body):
    """How tokens are chosen, by OpenAI's names and a few more."""

    temperature: Number = Field(1.0, ge=0, le=100)
    top_p: Number = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, description="0 and -1 are off.")
    min_p: Number = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: str | Annotated[list[str], FAIL_FAST] = Field(
        [], description=f"One string, or up to {MOST_STOPS}."
    )
    repetition_penalty: Number = Field(1.0, ge=0.01, le=100)
    presence_penalty: Number = Field(0.0, ge=-2, le=2)
    frequency_penalty: Number = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Number], BeforeValidator(check_biases)] = Field(
        {}, description="Token ids, written as strings."
    )
    skip_special_tokens: bool = Field(True, description="false shows control tokens in the text.")
    adapter: PickedAdapter = Field(None, description="A loaded adapter, or weights of several.")

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, stop: Any) -> Any:
        if isinstance(stop, str):
            return stop
        if (stop != [] and not is_list_of(stop, str)) or len(stop) > MOST_STOPS:
            raise ValueError(f"expected a string or up to {MOST_STOPS} strings")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, bias: dict[str, float]) -> dict[str, float]:
        for key in bias:
            if not (key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS):
                raise ValueError(f"the key {key!r:.20} is no token id")
        return bias

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): value for token, value in self.logit_bias.items()},
            logprobs=logprobs,
        )


class StreamOptions(Body):
    include_usage: bool = False


def is_list_of(value: Any, kind: type) -> bool:
    """Whether `value` is a list of `kind` alone and not empty; True and False are no numbers."""
    return isinstance(value, list) and bool(value) and all(type(item) is kind for item in value)


def derived_seed(seed: int | None, number: int) -> int | None:
    """The seed of a request's choice `number`: the first has the request's own."""
    return seed if seed is None or number == 0 else (seed + number * _SEED_STEP) % 2**63


class ErrorFacts(BaseModel):
    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(BaseModel):
    """Every error, whatever its status."""

    error: ErrorFacts
