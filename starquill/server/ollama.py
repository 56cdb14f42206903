"""Ollama's routes, as Continue, Twinny and the `ollama` package use them."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from starquill import __version__
from starquill.engine.fim import FillOrder, fill_request
from starquill.engine.loaded import LoadedModel
from starquill.engine.prompts import chat_request, new_request_id, plain_request
from starquill.server.adapters import alias_of, aliases
from starquill.server.body import (
    check_length,
    check_template,
    context_length,
    control_stops,
    documented,
    read_body,
)
from starquill.server.errors import ApiError, as_api_error
from starquill.server.guided import restricted
from starquill.server.metrics import MeasuredEngine
from starquill.server.models import is_served
from starquill.server.ollama_model import card, running, shown
from starquill.server.ollama_schema import (
    Body,
    ChatBody,
    GenerateBody,
    ShowBody,
    grammar,
    sampling,
)
from starquill.server.stream import ClientLeftError, json_text, streamed, unless_client_leaves
from starquill.server.submitted import Submitted
from starquill.types import Delta, GenerateRequest, Hole

log = logging.getLogger("starquill")
router = APIRouter(prefix="/api", tags=["Ollama"])

# Room that a hole keeps for a middle without a limit.
FILL_ROOM = 512

Route = Callable[[Request], Awaitable[Response]]


def _told(error: Exception) -> ApiError:
    told = as_api_error(error)
    if told.status == 500:
        log.error("a fault in one of Ollama's routes", exc_info=error)
    return told


def in_ollamas_form(route: Route) -> Route:
    """Errors of `route` as Ollama's clients read them: `{"error": "text"}`."""

    @functools.wraps(route)
    async def answer(http: Request) -> Response:
        try:
            return await route(http)
        except ClientLeftError:
            raise
        except Exception as error:
            return _told(error).response(http.url.path)

    return answer


@router.post("/generate", openapi_extra=documented(GenerateBody))
@in_ollamas_form
async def generate(http: Request) -> Response:
    """Complete `prompt`, or fill the hole before `suffix`.

    Special-token strings in a prompt are control tokens; with a suffix both sides are data.
    """
    body = await read_body(http, GenerateBody)
    name = _known(http, body.model)
    if not body.prompt and not body.suffix:
        unloads = body.keep_alive in (0, "0")
        reason = "unload" if unloads else "load"
        return JSONResponse({**_head(name), "response": "", "done": True, "done_reason": reason})
    engine: MeasuredEngine = http.app.state.engine
    order: FillOrder = http.app.state.options.fim_order
    request = await run_in_threadpool(generate_request, engine, body, order)
    answer = Answer(engine.model, name, context=not body.raw)
    return await _respond(http, body, request, answer)


@router.post("/chat", openapi_extra=documented(ChatBody))
@in_ollamas_form
async def chat(http: Request) -> Response:
    """Answer the last of `messages`, for models with a chat template."""
    body = await read_body(http, ChatBody)
    name = _known(http, body.model)
    engine: MeasuredEngine = http.app.state.engine
    if engine.model.chat_template is None:
        raise ApiError(400, f"{name} has no chat template (a base model); use /api/generate")
    _refuse(bool(body.tools), "tools", "calls no tools")
    messages = body.messages or []
    _refuse(any(message.images for message in messages), "images", "reads text alone")
    answer = Answer(engine.model, name, chat=True)
    if not messages:
        return JSONResponse(
            {**_head(name), **answer.piece(""), "done": True, "done_reason": "load"}
        )
    said = [{"role": message.role, "content": message.content} for message in messages]
    request = await run_in_threadpool(_chat_request, engine, body, said)
    return await _respond(http, body, request, answer)


@router.post("/show", openapi_extra=documented(ShowBody))
@in_ollamas_form
async def show(http: Request) -> Response:
    """All about the model."""
    body = await read_body(http, ShowBody)
    _known(http, body.model or body.name)
    engine: MeasuredEngine = http.app.state.engine
    return JSONResponse(shown(engine.model, context_length(engine)))


@router.head("/tags", include_in_schema=False)
@router.get("/tags")
async def tags(http: Request) -> dict[str, Any]:
    """The model, and its adapters."""
    names = (http.app.state.options.name, *aliases(http))
    return {"models": [card(http.app.state.engine.model, name) for name in names]}


@router.get("/ps")
async def ps(http: Request) -> dict[str, Any]:
    """The models that are loaded: this one."""
    engine: MeasuredEngine = http.app.state.engine
    name = http.app.state.options.name
    return {"models": [running(engine.model, name, context_length(engine))]}


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


def generate_request(
    engine: MeasuredEngine, body: GenerateBody, order: FillOrder = "psm"
) -> GenerateRequest:
    """A fill, a conversation's first turn, or a plain completion."""
    loaded, prompt = engine.model, body.prompt or ""
    _refuse(bool(body.template), "template", "has a form of its own; send the whole prompt")
    _refuse(bool(body.images), "images", "reads text alone")
    if body.suffix:
        _refuse(bool(body.context), "context", "fills a hole from its two sides alone")
        return _limited(engine, body, _fill(engine, body, order))
    check_length(loaded.require_tokenizer(), [prompt], context_length(engine), "prompt")
    check_template(loaded.require_tokenizer(), prompt)
    params = sampling(body, 1)
    heals = body.format in (None, "") and params.logprobs is None
    request = plain_request(loaded, prompt, params, heal=heals, start=not body.context)
    # A prompt that is a whole fill or a continuation has its form already.
    whole = body.raw or body.context or request.stop_ids
    if loaded.chat_template is not None and not whole:
        said = [{"role": "system", "content": body.system}] if body.system else []
        request = chat_request(loaded, [*said, {"role": "user", "content": prompt}], params)
    else:
        _refuse(bool(body.system), "system", "takes no system text here; put it into the prompt")
    if body.context:
        ids = (*body.context, *request.prompt_ids)
        request = replace(request, prompt_ids=ids)
    return _limited(engine, body, request)


def _chat_request(
    engine: MeasuredEngine, body: ChatBody, said: list[dict[str, str]]
) -> GenerateRequest:
    tokenizer, context = engine.model.require_tokenizer(), context_length(engine)
    check_length(tokenizer, [message["content"] for message in said], context, "messages")
    return _limited(engine, body, chat_request(engine.model, said, sampling(body, 1)))


def _fill(engine: MeasuredEngine, body: GenerateBody, order: FillOrder) -> GenerateRequest:
    context = context_length(engine)
    if body.chosen.num_ctx is not None and body.chosen.num_ctx > 0:
        context = min(context, body.chosen.num_ctx)
    wanted = body.chosen.num_predict
    reserved = min(FILL_ROOM if wanted is None or wanted < 0 else wanted, context // 2)
    hole = Hole(body.prompt or "", body.suffix or "")
    params = sampling(body, reserved)
    request, trimmed = fill_request(engine.model, hole, params, order=order, context=context)
    if trimmed:
        log.warning("left out to fit the context: %s", trimmed)
    return request


def _limited(engine: MeasuredEngine, body: Body, request: GenerateRequest) -> GenerateRequest:
    """With the body's limits; without any, it writes until the context ends."""
    wanted = body.chosen.num_predict
    left = max(context_length(engine) - request.prompt_tokens, 1)
    limit = left if wanted is None or wanted < 0 else min(wanted, left)
    stops = control_stops(engine.model.require_tokenizer(), request.params.stop)
    limited = replace(
        request,
        id=new_request_id(),
        params=replace(request.params, max_tokens=limit),
        stop_ids=request.stop_ids | stops,
    )
    return restricted(engine.model, limited, grammar(body))


@dataclass(frozen=True)
class Answer:
    """The form of an answer. With `context` its end tells ids for a request that goes on."""

    loaded: LoadedModel
    name: str
    chat: bool = False
    context: bool = False

    def piece(self, text: str) -> dict[str, Any]:
        if self.chat:
            return {"message": {"role": "assistant", "content": text}}
        return {"response": text}

    def chunk(self, delta: Delta) -> dict[str, Any]:
        found = {**_head(self.name), **self.piece(delta.text), "done": False}
        scored = self.logprobs([delta])
        return {**found, "logprobs": scored} if scored else found

    def last(self, work: Submitted, text: str, started: float) -> dict[str, Any]:
        stats = work.stats
        answer: dict[str, Any] = {**_head(self.name), **self.piece(text), "done": True}
        answer["done_reason"] = "length" if work.ending()[0] == "limit" else "stop"
        if self.context:
            ends = self.loaded.end_ids | work.request.stop_ids
            written = [d.token_id for d in work.read if d.token_id is not None]
            answer["context"] = [*work.request.prompt_ids, *(i for i in written if i not in ends)]
        return {
            **answer,
            "total_duration": _nanoseconds(time.perf_counter() - started),
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(stats.time_to_first_token),
            "eval_count": len(work.ids),
            "eval_duration": _nanoseconds(stats.generation_seconds),
        }

    def logprobs(self, deltas: list[Delta]) -> list[dict[str, Any]]:
        tokenizer = self.loaded.require_tokenizer()

        def scored(token: int, logprob: float) -> dict[str, Any]:
            # JSON has no infinity; a banned token can have no other.
            return {"token": tokenizer.piece(token), "logprob": max(logprob, -1e9)}

        return [
            {
                **scored(delta.token_id, delta.logprobs.chosen),
                "top_logprobs": [scored(t.token_id, t.logprob) for t in delta.logprobs.top],
            }
            for delta in deltas
            if delta.token_id is not None and delta.logprobs is not None and not delta.is_prompt
        ]


async def _respond(http: Request, body: Body, request: GenerateRequest, answer: Answer) -> Response:
    started = time.perf_counter()
    request = replace(request, adapter=alias_of(http, answer.name))
    work = Submitted(http.app.state.engine, request)
    if body.stream is not False:
        lines = _lines(answer, work, started)
        return streamed(lines, "application/x-ndjson")
    await unless_client_leaves(http, work.finish())
    whole = answer.last(work, work.text, started)
    scored = answer.logprobs(work.read)
    return JSONResponse({**whole, "logprobs": scored} if scored else whole)


async def _lines(answer: Answer, work: Submitted, started: float) -> AsyncIterator[bytes]:
    try:
        async for delta in work.deltas():
            if delta.text or delta.logprobs is not None:
                yield _line(answer.chunk(delta))
        yield _line(answer.last(work, "", started))
    except Exception as error:
        yield _line({"error": _told(error).message})


def _line(data: dict[str, Any]) -> bytes:
    return json_text(data).encode() + b"\n"


def _head(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": datetime.now(UTC).isoformat()}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _known(http: Request, model: str | None) -> str:
    """The served model's name, or an adapter's; 404 for another. Clients may add a tag."""
    name: str = http.app.state.options.name
    if model and (alias := alias_of(http, model.removesuffix(":latest"))):
        return alias
    if is_served(http.app.state.options, model):
        return name
    raise ApiError(404, f"model {model!r:.60} not found (this server has {name!r})", "model")


def _refuse(given: bool, field: str, reason: str) -> None:
    if given:
        raise ApiError(400, f"{field} is given, but the model {reason}", field)
