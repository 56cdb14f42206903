"""The bodies of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from starquill.engine.grammar import json_object_grammar, json_schema_grammar
from starquill.server.guided import GuidedBody
from starquill.server.schema import FAIL_FAST, MOST_CHOICES, Body, SamplingBody, StreamOptions
from starquill.types import SamplingParams


class TextPart(Body):
    """A piece of a message; images and sound are refused."""

    type: Literal["text"]
    text: str


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


class ChatMessage(Body):
    """One message; the model's template decides which roles there are, and their order."""

    role: str
    content: str | Annotated[list[TextPart], FAIL_FAST]

    @field_validator("content", mode="before")
    @classmethod
    def _check_content(cls, content: object) -> object:
        parts = content if isinstance(content, list) else []
        if isinstance(content, str) or (content is parts and all(map(_is_text_part, parts))):
            return content
        raise ValueError("expected a string, or a list of text parts")

    @property
    def text(self) -> str:
        """Parts are paragraphs: what follows one begins on a line of its own."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        return {"role": self.role, "content": self.text}


class NamedSchema(Body):
    """A JSON schema as OpenAI wraps it; its name and `strict` change nothing here."""

    # `schema` is a method of pydantic's own models.
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("the type is json_schema, but there is no json_schema")
        return self


class ChatBody(SamplingBody, GuidedBody):
    """`POST /v1/chat/completions`. Without a limit, an answer may fill the context."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, description="The older name.")
    max_completion_tokens: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    suffix: Any = Field(None, description="Refused: a hole is filled by /v1/completions.")
    tools: Any = Field(None, description="Refused.")
    functions: Any = Field(None, description="Refused.")

    @field_validator("suffix")
    @classmethod
    def _refuse_suffix(cls, _: object) -> object:
        raise ValueError("chat fills no holes; send prompt and suffix to /v1/completions")

    @field_validator("tools", "functions")
    @classmethod
    def _refuse_tools(cls, tools: object) -> object:
        if tools:
            raise ValueError("the model calls no tools; leave them out")
        return tools

    @field_validator("top_logprobs")
    @classmethod
    def _check_logprobs(cls, wanted: int, others: ValidationInfo) -> int:
        if not others.data.get("logprobs"):
            raise ValueError("needs logprobs: true")
        return wanted

    def params(self, context: int) -> SamplingParams:
        """As the engine takes them; `context` is how much a model can write at most."""
        limits = [n for n in (self.max_completion_tokens, self.max_tokens) if n is not None]
        wanted = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(min(limits, default=context), wanted)

    def constraints(self) -> dict[str, Callable[[], str]]:
        found = super().constraints()
        if (wanted := self.response_format) is None or wanted.type == "text":
            return found
        if (named := wanted.json_schema) is not None and wanted.type == "json_schema":
            return {**found, "response_format": lambda: json_schema_grammar(named.definition)}
        return {**found, "response_format": json_object_grammar}
