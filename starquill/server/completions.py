"""`POST /v1/completions`: OpenAI's completions, with true fill-in-the-middle by `suffix`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from starquill.engine.fim import fill_request
from starquill.engine.loaded import LoadedModel
from starquill.engine.params import check_params
from starquill.engine.prompts import new_request_id, plain_request
from starquill.engine.sequence import has_own_space
from starquill.errors import BadRequestError, BusyError, CapacityError, UnsupportedError
from starquill.server.adapters import adapter_of, name_of
from starquill.server.body import check_length, context_length
from starquill.server.completion_schema import CompletionBody
from starquill.server.errors import ApiError, as_api_error
from starquill.server.guided import restricted
from starquill.server.legacy_logprobs import LegacyLogprobs
from starquill.server.metrics import MeasuredEngine
from starquill.server.schema import derived_seed
from starquill.server.stream import event, streamed, unless_client_leaves
from starquill.server.together import Together
from starquill.server.usage import usage
from starquill.types import Delta, GenerateRequest, Hole, SamplingParams

router = APIRouter()
log = logging.getLogger("starquill")


@dataclass(frozen=True)
class Plan:
    """What a body asks for: for each prompt its text and `tries` requests, one after another."""

    body: CompletionBody
    texts: tuple[str, ...]
    requests: tuple[GenerateRequest, ...]

    def text_of(self, number: int) -> str:
        """The prompt of a request."""
        return self.texts[number // self.body.tries]


@router.post("/v1/completions")
async def completions(body: CompletionBody, http: Request) -> Response:
    """Complete a prompt at its end or, with `suffix`, in the middle."""
    engine: MeasuredEngine = http.app.state.engine
    adapter = adapter_of(http, body.adapter, body.model)
    _check_combination(body, engine)
    body.fim_order = body.fim_order or http.app.state.options.fim_order
    # A long prompt takes a while to tokenize; others' streams go on meanwhile.
    plan = await asyncio.to_thread(plan_of, engine.model, body, context_length(engine))
    plan = replace(plan, requests=tuple(replace(r, adapter=adapter) for r in plan.requests))
    try:
        work = Together(engine, plan.requests)
    except BusyError:
        raise
    except (BadRequestError, CapacityError) as error:
        raise ApiError(400, str(error), "prompt") from None
    answer = Answer(plan, work, engine.model, name_of(http, adapter))
    try:
        if not body.stream:
            return JSONResponse(await unless_client_leaves(http, answer.whole()))
        # What fails before the first token gets a status of its own.
        first = await unless_client_leaves(http, anext(work))
    except BaseException:
        work.close()
        raise
    return streamed(answer.events(first))


def _check_combination(body: CompletionBody, engine: MeasuredEngine) -> None:
    """Refuse fields that do not go together."""
    if body.tries < body.n:
        raise ApiError(400, f"best_of is {body.best_of} (expected n, {body.n}, or more)", "best_of")
    if body.stream and body.tries > body.n:
        raise ApiError(400, "best_of cannot be streamed: it is known at the end only", "best_of")
    if body.suffix is not None:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not all(isinstance(text, str) for text in texts):
            raise ApiError(400, "suffix needs a prompt of text, not of token ids", "suffix")
        if body.echo and body.logprobs is not None:
            raise ApiError(400, "suffix goes with echo or with logprobs, not with both", "suffix")
    count = len(_prompts(body)) * body.tries
    most = engine.options.slots + engine.options.queue
    if count > most:
        raise ApiError(400, f"{count} texts are asked for (at most {most} at once here)", "prompt")


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt: Any = body.prompt
    # The schema has checked that a list is all numbers or has none.
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def plan_of(loaded: LoadedModel, body: CompletionBody, context: int) -> Plan:
    """Tokenize; raises ApiError naming the field at fault."""
    # Tokens of the likeliest texts are told by their log probabilities.
    scored = 0 if body.logprobs is None and body.tries > body.n else body.logprobs
    params = body.sampling(body.max_tokens, scored)
    try:
        check_params(params, loaded.config.vocab_size)
    except BadRequestError as error:  # the schema has checked all that needs no vocabulary
        raise ApiError(400, str(error), "logit_bias") from None
    grammar = body.grammar()
    texts, requests = [], []
    for prompt in _prompts(body):
        # To write nothing needs no room.
        if isinstance(prompt, str) and loaded.tokenizer is not None and body.max_tokens:
            check_length(loaded.tokenizer, [prompt, body.suffix or ""], context, "prompt")
        try:
            text, request = _request(loaded, body, prompt, params)
        except (BadRequestError, CapacityError, UnsupportedError) as error:
            field = "prompt" if body.suffix is None else "suffix"
            raise ApiError(400, str(error), field) from None
        texts.append(text)
        request = replace(request, show_special=not body.skip_special_tokens)
        request = restricted(loaded, request, grammar)
        for number in range(body.tries):
            seeded = replace(params, seed=derived_seed(body.seed, number))
            requests.append(replace(request, id=new_request_id(), params=seeded))
    return Plan(body, tuple(texts), tuple(requests))


def _request(
    loaded: LoadedModel, body: CompletionBody, prompt: str | list[int], params: SamplingParams
) -> tuple[str, GenerateRequest]:
    """A prompt's text, as `echo` gives it back, and its request."""
    if isinstance(prompt, str) and body.suffix is not None:
        return prompt, _fill(loaded, body, Hole(prompt, body.suffix), params)
    if isinstance(prompt, str):
        unasked = not body.echo and body.logprobs is None
        heal = unasked if body.heal is None else body.heal and not body.echo
        request = plain_request(loaded, prompt, params, heal=heal)
    else:
        fim = loaded.tokenizer.fim if loaded.tokenizer else None
        stops = fim.stops if fim is not None and fim.middle in prompt else frozenset()
        request = GenerateRequest(new_request_id(), tuple(prompt), params, stop_ids=stops)
        within = all(0 <= i < loaded.config.vocab_size for i in prompt)  # else refused later
        prompt = loaded.tokenizer.decode(prompt, False) if loaded.tokenizer and within else ""
    return prompt, replace(request, prompt_logprobs=body.logprobs if body.echo else None)


def _fill(
    loaded: LoadedModel, body: CompletionBody, hole: Hole, params: SamplingParams
) -> GenerateRequest:
    """All of the hole, or CapacityError: what does not fit is not left out silently."""
    least = replace(params, max_tokens=min(params.max_tokens, 1))
    request, trimmed = fill_request(loaded, hole, least, order=body.fim_order or "psm")
    if trimmed:
        length = len(request.prompt_ids) + trimmed.prefix_tokens + trimmed.suffix_tokens
        raise CapacityError(
            f"prompt and suffix have {length} tokens; the model's context is "
            f"{loaded.config.context_length}, of which at least one must be left to write"
        )
    return replace(request, params=params)


class Choice:
    """One text while it is written."""

    def __init__(self, loaded: LoadedModel, body: CompletionBody, request: GenerateRequest) -> None:
        self.body = body
        self.request = request
        self.text = ""
        self.finish_reason: str | None = None
        self._sum, self._tokens = 0.0, 0
        self._logprobs: LegacyLogprobs | None = None
        if body.logprobs is not None:
            self._logprobs = LegacyLogprobs(
                loaded.tokenizer,
                request.show_special,
                own_space=has_own_space(loaded.tokenizer, request),
            )
        self._begun = False

    def add(self, delta: Delta, prompt: str) -> str:
        """Take in a delta; the text that it adds, behind the prompt if that is echoed."""
        added = delta.text
        if not self._begun and self.body.echo:
            added = prompt + added
            if self._logprobs is not None:
                assert delta.prompt_logprobs is not None, "the request asked for them"
                self._logprobs.add_prompt(self.request.prompt_ids, delta.prompt_logprobs, prompt)
        self._begun = True
        if delta.token_id is not None and delta.logprobs is not None and not delta.is_prompt:
            self._sum += delta.logprobs.chosen
            self._tokens += 1
            if self._logprobs is not None:
                self._logprobs.add(delta.token_id, delta.logprobs)
        self.text += added
        self.finish_reason = delta.finish_reason
        return added

    @property
    def mean_logprob(self) -> float:
        return self._sum / max(self._tokens, 1)

    def as_json(self, index: int, text: str) -> dict[str, Any]:
        """The choice with `text`, and with log probabilities since the last time."""
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._logprobs.take(),
            "finish_reason": self.finish_reason,
        }


class Answer:
    """The answer to a body, in whole or as events."""

    def __init__(self, plan: Plan, work: Together, loaded: LoadedModel, model: str) -> None:
        self.plan = plan
        self.work = work
        self.choices = [Choice(loaded, plan.body, request) for request in plan.requests]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def usage(self) -> dict[str, Any]:
        return usage([running.stats() for running in self.work.running], self.plan.body.tries)

    async def whole(self) -> dict[str, Any]:
        async for number, delta in self.work:
            self.choices[number].add(delta, self.plan.text_of(number))
        listed = [choice.as_json(i, choice.text) for i, choice in enumerate(self._chosen())]
        return {**self._head, "choices": listed, "usage": self.usage()}

    def _chosen(self) -> list[Choice]:
        """The `n` likeliest for each prompt; in the order of writing where all are wanted."""
        n, tries = self.plan.body.n, self.plan.body.tries
        if n == tries:
            return self.choices
        chosen = []
        for start in range(0, len(self.choices), tries):
            group = self.choices[start : start + tries]
            chosen += sorted(group, key=lambda choice: -choice.mean_logprob)[:n]
        return chosen

    async def events(self, first: tuple[int, Delta]) -> AsyncIterator[bytes]:
        """Server-sent events, beginning with a delta that was read already."""
        with_usage = self.plan.body.stream_options.include_usage
        no_usage: dict[str, Any] = {"usage": None} if with_usage else {}
        try:
            async for number, delta in _all(first, self.work):
                part = self._part(number, delta)
                if part is not None:
                    yield event({**self._head, "choices": [part], **no_usage})
            if with_usage:
                yield event({**self._head, "choices": [], "usage": self.usage()})
            yield event("[DONE]")
        except Exception as error:
            answer = as_api_error(error)
            if answer.status == 500:
                log.error("request %s", self._head["id"], exc_info=error)
            yield b"event: error\n" + event(answer.body())
        finally:
            self.work.close()

    def _part(self, number: int, delta: Delta) -> dict[str, Any] | None:
        """What a delta adds to its choice; None for nothing that could be seen."""
        choice = self.choices[number]
        text = choice.add(delta, self.plan.text_of(number))
        if not text and delta.finish_reason is None and self.plan.body.logprobs is None:
            return None
        return choice.as_json(number, text)


async def _all(first: tuple[int, Delta], rest: Together) -> AsyncIterator[tuple[int, Delta]]:
    yield first
    async for numbered in rest:
        yield numbered
