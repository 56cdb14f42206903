"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from starquill.server.guided import GuidedBody
from starquill.server.schema import FAIL_FAST, MOST_CHOICES, SamplingBody, StreamOptions, is_list_of

Ids = Annotated[list[int], FAIL_FAST]
Prompt = str | Annotated[list[str], FAIL_FAST] | Ids | Annotated[list[Ids], FAIL_FAST]


class CompletionBody(SamplingBody, GuidedBody):
    """`POST /v1/completions`."""

    prompt: Prompt = Field(description="Text or token ids, or a list of one of them.")
    model: str | None = None
    suffix: str | None = Field(None, description="Code after the hole that is to be filled.")
    max_tokens: int = Field(16, ge=0)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)
    heal: bool | None = Field(
        None, description="Let the prompt's last token be rewritten; off with echo or logprobs."
    )
    fim_order: Literal["psm", "spm"] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or is_list_of(prompt, str) or is_list_of(prompt, int):
            return prompt
        if isinstance(prompt, list) and prompt and all(is_list_of(ids, int) for ids in prompt):
            return prompt
        raise ValueError("expected a string, strings, token ids, or lists of token ids")

    @property
    def tries(self) -> int:
        """How many texts are written for each prompt."""
        return self.n if self.best_of is None else self.best_of
