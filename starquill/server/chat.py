"""`POST /v1/chat/completions`: answers in a conversation, as OpenAI has it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import chat_request, new_request_id
from starquill.server.adapters import adapter_of, name_of
from starquill.server.body import check_length, context_length
from starquill.server.chat_schema import ChatBody
from starquill.server.errors import ApiError, as_api_error
from starquill.server.guided import restricted
from starquill.server.legacy_logprobs import LEAST_LOGPROB
from starquill.server.metrics import MeasuredEngine
from starquill.server.schema import derived_seed
from starquill.server.stream import event, streamed, unless_client_leaves
from starquill.server.together import Together
from starquill.server.usage import usage
from starquill.types import Delta, GenerateRequest

Json = dict[str, Any]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(body: ChatBody, http: Request) -> Response:
    """Answer the last of `messages`, by the model's own chat template."""
    engine: MeasuredEngine = http.app.state.engine
    adapter = adapter_of(http, body.adapter, body.model)
    # Rendering, tokenizing and compiling a grammar take long for some bodies.
    requests = await run_in_threadpool(_requests, engine, body)
    requests = [replace(request, adapter=adapter) for request in requests]
    most = engine.options.slots + engine.options.queue
    if len(requests) > most:
        raise ApiError(400, f"n is {body.n} (this server runs at most {most} at once)", "n")
    work = Together(engine, requests)
    answer = _Answer(name_of(http, adapter), engine.model, requests, work)
    try:
        if not body.stream:
            return JSONResponse(await unless_client_leaves(http, _whole(answer)))
        # A request that is refused must be so before the answer begins.
        first = await unless_client_leaves(http, anext(work))
    except BaseException:
        work.close()
        raise
    return streamed(_stream(answer, first, body.stream_options.include_usage))


def _requests(engine: MeasuredEngine, body: ChatBody) -> list[GenerateRequest]:
    """One request for each of the `n` answers."""
    loaded = engine.model
    if loaded.chat_template is None:
        raise ApiError(
            400,
            f"{loaded.name} has no chat template (it is a base model); use /v1/completions",
            "messages",
        )
    params = body.params(context_length(engine))
    messages = [message.for_template() for message in body.messages]
    texts = [message["content"] for message in messages]
    check_length(loaded.require_tokenizer(), texts, context_length(engine), "messages")
    request = restricted(loaded, chat_request(loaded, messages, params), body.grammar())
    request = replace(request, show_special=not body.skip_special_tokens)
    return [
        replace(
            request,
            id=new_request_id(),
            params=replace(request.params, seed=derived_seed(request.params.seed, number)),
        )
        for number in range(body.n)
    ]


@dataclass
class _Answer:
    """What all parts of one answer have in common, and how much was written."""

    name: str
    model: LoadedModel
    requests: list[GenerateRequest]
    work: Together
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.name}

    def usage(self) -> Json:
        return usage([running.stats() for running in self.work.running], len(self.requests))

    def logprobs(self, delta: Delta) -> list[Json]:
        """OpenAI's entry for the delta's token; none for one that only ends the answer."""
        scored, token = delta.logprobs, delta.token_id
        ends = delta.finish_reason == "stop" and token in self.model.end_ids
        if scored is None or token is None or ends:
            return []
        top = [self._entry(other.token_id, other.logprob) for other in scored.top]
        return [{**self._entry(token, scored.chosen), "top_logprobs": top}]

    def _entry(self, token: int, logprob: float) -> Json:
        """Text is lossy where a token holds half a character; `bytes` are exact."""
        tokenizer = self.model.require_tokenizer()
        table = tokenizer.token_bytes
        spelled = table[token] if token < len(table) else b""
        return {
            "token": tokenizer.piece(token),
            "bytes": list(spelled) if spelled else None,
            "logprob": max(logprob, LEAST_LOGPROB),
        }


async def _whole(answer: _Answer) -> Json:
    """The answer in one piece."""
    wants = answer.requests[0].params.logprobs is not None
    texts = [""] * len(answer.requests)
    entries: list[list[Json]] = [[] for _ in texts]
    reasons: list[str | None] = [None for _ in texts]
    async for number, delta in answer.work:
        texts[number] += delta.text
        entries[number] += answer.logprobs(delta)
        reasons[number] = delta.finish_reason
    choices = [
        {
            "index": number,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": {"content": entries[number], "refusal": None} if wants else None,
            "finish_reason": reasons[number],
        }
        for number, text in enumerate(texts)
    ]
    return {**answer.head("chat.completion"), "choices": choices, "usage": answer.usage()}


async def _stream(
    answer: _Answer, first: tuple[int, Delta], with_usage: bool
) -> AsyncIterator[bytes]:
    """Server-sent events; an error that comes now is one of them."""
    head = answer.head("chat.completion.chunk")
    if with_usage:
        head["usage"] = None
    opening = {"role": "assistant", "content": "", "refusal": None}
    try:
        for number in range(len(answer.requests)):
            yield event({**head, "choices": [_chunk(number, opening)]})
        for chunk in _chunks(answer, *first):
            yield event({**head, "choices": [chunk]})
        async for number, delta in answer.work:
            for chunk in _chunks(answer, number, delta):
                yield event({**head, "choices": [chunk]})
    except Exception as error:
        yield event(as_api_error(error).body())
        return
    finally:
        answer.work.close()
    if with_usage:
        yield event({**head, "choices": [], "usage": answer.usage()})
    yield event("[DONE]")


def _chunks(answer: _Answer, number: int, delta: Delta) -> list[Json]:
    """What a delta is sent as: its text if there is any, then the end if it is one."""
    chunks = []
    entries = answer.logprobs(delta)
    if delta.text or entries:
        chunk = _chunk(number, {"content": delta.text})
        if entries:
            chunk["logprobs"] = {"content": entries, "refusal": None}
        chunks.append(chunk)
    if delta.finish_reason is not None:
        chunks.append({**_chunk(number, {}), "finish_reason": delta.finish_reason})
    return chunks


def _chunk(number: int, delta: Json) -> Json:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
