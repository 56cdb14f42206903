"""Plain data that crosses folders. Imports nothing of ours and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when generation ends.

    Temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch their filter off.
    `repetition_penalty` divides the logits of tokens seen in prompt or output (CTRL, arXiv
    1909.05858); `presence_penalty` and `frequency_penalty` are OpenAI's, over the output alone.
    `logprobs` None reports nothing, n reports the chosen token and the n likeliest. `stop` may
    be given as one string or a list; empty strings in it are ignored.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if isinstance(stop, list):
            stop = tuple(stop)
        object.__setattr__(self, "stop", stop)


@dataclass(frozen=True)
class GenerateRequest:
    """One request, tokenized.

    `heal` is text that the prompt's end lost to token healing: the first new tokens must spell
    it, and it is not part of the output. `stop_ids` end this request besides the model's own
    end tokens. `prompt_logprobs` n reports the log probability of every prompt token after the
    first, and the n likeliest at its place. `grammar` (llguidance's JSON form) restricts what is
    written. After `max_seconds` of writing the request ends as if it had reached its length.
    With `show_special` control tokens are in the text by their names. An output that `begins_text`
    is a text of its own, such as an answer, not the prompt's going on.
    `adapter` is a loaded adapter's alias, or several with their weights; None for the base model.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    heal: bytes = b""
    stop_ids: frozenset[int] = frozenset()
    prompt_logprobs: int | None = None
    grammar: str | None = None
    max_seconds: float | None = None
    show_special: bool = False
    begins_text: bool = False
    adapter: str | Mapping[str, float] | None = None

    @property
    def adapters(self) -> Mapping[str, float]:
        """Each adapter's weight, by alias."""
        if self.adapter is None:
            return {}
        return {self.adapter: 1.0} if isinstance(self.adapter, str) else self.adapter

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt as the user gave it, the healed one included."""
        return len(self.prompt_ids) + bool(self.heal)


@dataclass(frozen=True)
class ContextFile:
    """Another file of the repository, shown to the model in front of the one being filled."""

    path: str
    code: str


@dataclass(frozen=True)
class Hole:
    """A place to fill: the code before and after it, and what else the model may see.

    `path` and `repo_name` are written only when `context` files are.
    """

    prefix: str
    suffix: str
    context: tuple[ContextFile, ...] = ()
    path: str = "main.py"
    repo_name: str = "repository"


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a token under the model's unmodified distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class Logprobs:
    """The chosen token's log probability and the likeliest alternatives, best first."""

    chosen: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Delta:
    """What one step adds to a request's output: the one thing that leaves the engine.

    `text` may be empty (half a character, text that may turn into a stop string, a control
    token) and may hold text withheld by earlier steps. The last delta of a request has a
    `finish_reason`; its `token_id` is None when no token was sampled for it. `is_prompt` marks
    tokens that only spell a healed prompt's end again. Where the request asked for them, the first
    delta has `prompt_logprobs`, one for each id of the prompt; None for the first.
    """

    id: str
    token_id: int | None
    text: str
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    is_prompt: bool = False
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None


@dataclass(frozen=True)
class GenerationStats:
    """Counts and times (seconds) of one request. Rates are tokens per second.

    `cached_tokens` of the prompt were not computed again. `proposed_tokens` were guessed by prompt
    lookup, `accepted_tokens` of them were right.
    """

    prompt_tokens: int
    generated_tokens: int
    time_to_first_token: float
    generation_seconds: float
    peak_memory_bytes: int | None
    seed: int | None
    cached_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second until the first new token; 0 when nothing ran."""
        ran = self.time_to_first_token > 0
        return self.prompt_tokens / self.time_to_first_token if ran else 0.0

    @property
    def generation_rate(self) -> float:
        """Tokens after the first per second of decoding; 0 when there was no second token."""
        return max(self.generated_tokens - 1, 0) / max(self.generation_seconds, 1e-9)


@dataclass(frozen=True)
class RequantizeReport:
    """What `LoadedModel.requantize` did.

    `changed` matrices have their new scheme; those in `kept` have their old one, by name, with
    the reason. `summary` is the plan in one line.
    """

    changed: int
    kept: Mapping[str, str]
    summary: str


@dataclass(frozen=True)
class EngineOptions:
    """How many requests an engine serves, and with what.

    `slots` requests run at once, `queue` more may wait. A sequence may reach `context` tokens (the
    model's own where None). `cache_bytes` bound the memory of keys and values; None takes what
    `slots` sequences need, and at most a quarter of what is free. Prompts are computed
    `prefill_chunk` tokens at a time, so that running requests wait no longer than that. `lookup`
    is how many tokens prompt lookup proposes at most; 0 switches it off.
    """

    slots: int = 8
    queue: int = 64
    context: int | None = None
    cache_bytes: int | None = None
    prefill_chunk: int = 512
    prefix_cache: bool = True
    lookup: int = 16


@dataclass(frozen=True)
class EngineStats:
    """What an engine does now, and has done since it was made."""

    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    steps: int
    cache_bytes: int
    cache_bytes_used: int
