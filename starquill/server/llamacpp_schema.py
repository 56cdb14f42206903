"""What llama.cpp's clients send, and how it reads here. Fields not listed are ignored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, StrictInt

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.grammar import json_schema_grammar, lark_grammar
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError
from starquill.server.guided import chosen_grammar
from starquill.server.schema import FAIL_FAST, Number, PickedAdapter, Stops, check_biases
from starquill.types import SamplingParams

NEVER = -1e9
RANDOM_SEED = 2**32 - 1
LONGEST_MS = 1e9
# llama.cpp's one-letter names of the filters that there are here.
LETTERS = {
    "k": "top_k",
    "p": "top_p",
    "m": "min_p",
    "t": "temperature",
    "i": "infill",
    "e": "penalties",
}

Piece = StrictInt | str
Pieces = Annotated[list[Piece], FAIL_FAST]
Prompt = str | Annotated[list[Piece | Pieces], FAIL_FAST]
Strings = Annotated[list[str], FAIL_FAST]
Pair = Annotated[list[StrictInt | bool | float | str], FAIL_FAST]
Biases = dict[str, float | bool] | Annotated[list[Pair], FAIL_FAST]
T = TypeVar("T")


class LoraScale(BaseModel):
    id: StrictInt
    scale: Number = 0.0


class Options(BaseModel):
    """What /completion and /infill share; null is absent."""

    n_predict: int | None = Field(default=None, description="-1 writes until the context ends")
    max_tokens: int | None = Field(default=None, description="the same, where n_predict is absent")
    t_max_predict_ms: Number | None = Field(
        default=None, description="ends the writing; 0 is no limit"
    )
    temperature: Number | None = None
    top_k: int | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repeat_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    samplers: Strings | str | None = Field(
        default=None, description="those not named are off; `infill` takes the likeliest token"
    )
    logit_bias: Annotated[Biases | None, BeforeValidator(check_biases)] = None
    ignore_eos: bool | None = None
    n_probs: int | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=64)] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    response_fields: Strings | None = None
    model: str | None = Field(default=None, description="an adapter's alias; others are ignored")
    adapter: PickedAdapter = None
    lora: Annotated[list[LoraScale], FAIL_FAST] | None = Field(
        default=None, description="by /lora-adapters' ids"
    )

    @property
    def limit(self) -> int:
        """Tokens to write; -1 for all that fit."""
        return or_else(self.n_predict, or_else(self.max_tokens, -1))

    @property
    def seconds(self) -> float | None:
        milliseconds = min(self.t_max_predict_ms or 0.0, LONGEST_MS)
        return milliseconds / 1000 if milliseconds > 0 else None


class CompletionBody(Options):
    prompt: Prompt


class Extra(BaseModel):
    text: str = ""
    filename: str = ""


class InfillBody(Options):
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: Annotated[list[Extra], FAIL_FAST] | None = None
    prompt: str | None = Field(default=None, description="how the middle begins")
    fim_order: Literal["psm", "spm"] | None = None


class TokenizeBody(BaseModel):
    content: str
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(BaseModel):
    tokens: Annotated[list[int], FAIL_FAST]


@dataclass(frozen=True)
class Defaults:
    """A route's sampling where the body says nothing."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


COMPLETION = Defaults(0.8, 40, 0.95, 0.05)
# Who fills a hole wants the likeliest text, and the same one each time.
INFILL = Defaults(0.0, 0, 1.0, 0.0)


def or_else(value: T | None, default: T) -> T:
    return default if value is None else value


def sampling(
    loaded: LoadedModel, body: Options, defaults: Defaults, max_tokens: int
) -> SamplingParams:
    """As llama.cpp reads the options: a list of samplers switches off those that it lacks."""
    named = body.samplers
    if isinstance(named, str):
        named = [LETTERS.get(letter, letter) for letter in named]

    def chosen(name: str, value: T, off: T) -> T:
        return value if named is None or name in named else off

    temperature = or_else(body.temperature, defaults.temperature if named is None else 1.0)
    # Alternatives to the likeliest text have to be drawn.
    likeliest = named is not None and "infill" in named and (body.n_cmpl or 1) == 1
    greedy = temperature <= 0 or likeliest
    stop = body.stop or ()
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if greedy else chosen("temperature", temperature, 1.0),
        top_k=chosen("top_k", max(or_else(body.top_k, defaults.top_k), 0), 0),
        top_p=chosen("top_p", or_else(body.top_p, defaults.top_p), 1.0),
        min_p=chosen("min_p", or_else(body.min_p, defaults.min_p), 0.0),
        seed=None if body.seed in (None, -1, RANDOM_SEED) else body.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        repetition_penalty=chosen("penalties", or_else(body.repeat_penalty, 1.0), 1.0),
        presence_penalty=chosen("penalties", or_else(body.presence_penalty, 0.0), 0.0),
        frequency_penalty=chosen("penalties", or_else(body.frequency_penalty, 0.0), 0.0),
        logit_bias=_biases(loaded, body),
        logprobs=body.n_probs or None,
    )


def grammar(body: Options) -> str | None:
    """What restricts the output, for `GenerateRequest.grammar`."""
    if rules := body.grammar:
        return chosen_grammar({"grammar": lambda: lark_grammar(rules)})
    if (schema := body.json_schema) is None:
        return None
    return chosen_grammar({"json_schema": lambda: json_schema_grammar(schema)})


def _biases(loaded: LoadedModel, body: Options) -> dict[int, float]:
    """Pairs `[token, bias]` or an object; a token is an id or text, and False bans it."""
    given = body.logit_bias or []
    pairs: list[Any] = list(given.items()) if isinstance(given, dict) else list(given)
    biases: dict[int, float] = {}
    for pair in pairs:
        if len(pair) != 2 or isinstance(pair[1], str) or pair[1] is True:
            raise BadRequestError(f"logit_bias has {pair!r:.60} (expected [token, bias])")
        token, bias = pair
        for index in _ids(loaded.require_tokenizer(), token):
            biases[index] = NEVER if bias is False else _number(bias)
    if body.ignore_eos:
        biases |= dict.fromkeys(loaded.end_ids, NEVER)
    return biases


def _number(bias: float) -> float:
    try:
        return float(bias)
    except OverflowError:
        raise BadRequestError("logit_bias has a value that is not a finite number") from None


def _ids(tokenizer: Tokenizer, token: object) -> list[int]:
    if isinstance(token, str):
        is_id = token.isdecimal() and len(token) < 10
        return [int(token)] if is_id else tokenizer.encode(token)
    if isinstance(token, bool) or not isinstance(token, int):
        raise BadRequestError(f"logit_bias names {token!r:.60} (expected an id or text)")
    return [token]
