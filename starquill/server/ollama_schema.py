"""What Ollama's clients send, and how it reads here. Fields not listed are ignored."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field

from starquill.engine.grammar import json_object_grammar, json_schema_grammar
from starquill.server.errors import ApiError
from starquill.server.guided import chosen_grammar
from starquill.server.schema import FAIL_FAST, Number, Stops
from starquill.types import SamplingParams

T = TypeVar("T")
Strings = Annotated[list[str], FAIL_FAST]


class Options(BaseModel):
    """Sampling; null is absent. There is no repetition penalty unless asked for."""

    num_predict: int | None = Field(default=None, description="negative: until the context ends")
    num_ctx: int | None = Field(default=None, description="bounds the code around a hole")
    temperature: Number | None = None
    top_k: int | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    repeat_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None


class Body(BaseModel):
    """What /api/generate and /api/chat share."""

    model: str | None = None
    stream: bool | None = None
    options: Options | None = None
    format: str | dict[str, Any] | None = Field(default=None, description="json, or a JSON schema")
    keep_alive: float | str | None = Field(default=None, description="the model always stays")
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def chosen(self) -> Options:
        return self.options or Options()


class GenerateBody(Body):
    prompt: str | None = None
    suffix: str | None = Field(default=None, description="the code after the hole")
    system: str | None = None
    template: str | None = None
    context: Annotated[list[int], FAIL_FAST] | None = None
    raw: bool | None = None
    images: Strings | None = None


class Message(BaseModel):
    role: str
    content: str = ""
    images: Strings | None = None


class ChatBody(Body):
    messages: Annotated[list[Message], FAIL_FAST] | None = None
    tools: list[Any] | None = None


class ShowBody(BaseModel):
    model: str | None = None
    name: str | None = None


def or_else(value: T | None, default: T) -> T:
    return default if value is None else value


def sampling(body: Body, max_tokens: int) -> SamplingParams:
    """With Ollama's defaults."""
    options = body.chosen
    stop = options.stop or ()
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=or_else(options.temperature, 0.8),
        top_k=max(or_else(options.top_k, 40), 0),
        top_p=or_else(options.top_p, 0.9),
        min_p=or_else(options.min_p, 0.0),
        seed=None if options.seed == -1 else options.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        repetition_penalty=or_else(options.repeat_penalty, 1.0),
        presence_penalty=or_else(options.presence_penalty, 0.0),
        frequency_penalty=or_else(options.frequency_penalty, 0.0),
        logprobs=(body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None,
    )


def grammar(body: Body) -> str | None:
    """What restricts the output, for `GenerateRequest.grammar`."""
    if not body.format:
        return None
    if isinstance(schema := body.format, dict):
        return chosen_grammar({"format": lambda: json_schema_grammar(schema)})
    if body.format == "json":
        return chosen_grammar({"format": json_object_grammar})
    raise ApiError(400, f"format is {body.format!r:.60} (expected json or a JSON schema)", "format")
