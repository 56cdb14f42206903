"""llama.cpp's routes, as llama.vim and llama.vscode use them: /infill, /completion and others."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from starquill import __version__
from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.fim import FillOrder, Trimmed, fill_request
from starquill.engine.prompts import new_request_id, plain_request
from starquill.server.adapters import adapter_of_llamacpp
from starquill.server.body import (
    check_length,
    check_template,
    context_length,
    control_stops,
    documented,
    read_body,
)
from starquill.server.errors import ApiError, as_api_error, shown
from starquill.server.guided import restricted
from starquill.server.llamacpp_answer import Shape, final, partial, settings, spelling
from starquill.server.llamacpp_schema import (
    COMPLETION,
    INFILL,
    CompletionBody,
    DetokenizeBody,
    InfillBody,
    Options,
    Prompt,
    TokenizeBody,
    grammar,
    sampling,
)
from starquill.server.metrics import MeasuredEngine
from starquill.server.stream import event, streamed, unless_client_leaves
from starquill.server.submitted import Submitted, finish_all, submit_all
from starquill.types import ContextFile, GenerateRequest, Hole

log = logging.getLogger("starquill")
router = APIRouter(tags=["llama.cpp"])

# Room that /infill keeps for a middle without a limit.
INFILL_ROOM = 512


@router.post("/infill", openapi_extra=documented(InfillBody))
async def infill(http: Request) -> Response:
    """Fill the middle between `input_prefix` and `input_suffix`. What they contain is data."""
    body = await read_body(http, InfillBody)
    engine: MeasuredEngine = http.app.state.engine
    _check_count(engine, body, 1)
    order: FillOrder = http.app.state.options.fim_order
    request, trimmed = await run_in_threadpool(infill_request, engine, body, order)
    return await _answer(http, body, [request], truncated=bool(trimmed))


@router.post("/completion", openapi_extra=documented(CompletionBody))
@router.post("/completions", openapi_extra=documented(CompletionBody))
async def completion(http: Request) -> Response:
    """Complete a prompt, or several. Special-token strings in it are control tokens."""
    body = await read_body(http, CompletionBody)
    engine: MeasuredEngine = http.app.state.engine
    requests = await run_in_threadpool(_requests, engine, body)
    return await _answer(http, body, requests)


@router.post("/tokenize", openapi_extra=documented(TokenizeBody))
async def tokenize(http: Request) -> dict[str, Any]:
    """Ids of a text; special-token strings are control tokens unless `parse_special` is false."""
    body = await read_body(http, TokenizeBody)
    tokenizer = http.app.state.engine.model.require_tokenizer()
    return await run_in_threadpool(_tokenized, tokenizer, body)


def _tokenized(tokenizer: Tokenizer, body: TokenizeBody) -> dict[str, Any]:
    ids = tokenizer.encode(body.content, body.parse_special is not False)
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": i, "piece": _piece(spelling(tokenizer, i))} for i in ids]}


@router.post("/detokenize", openapi_extra=documented(DetokenizeBody))
async def detokenize(http: Request) -> dict[str, str]:
    """Text of ids, control tokens by their names."""
    body = await read_body(http, DetokenizeBody)
    tokenizer = http.app.state.engine.model.require_tokenizer()
    return {"content": await run_in_threadpool(_detokenized, tokenizer, body.tokens)}


def _detokenized(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    bound = tokenizer.id_bound
    for i in ids:
        if not 0 <= i < bound:
            raise ApiError(400, f"tokens has {shown(i)} (ids are 0 to {bound - 1})", "tokens")
    return tokenizer.decode(ids, skip_special=False)


@router.get("/props")
async def props(http: Request) -> dict[str, Any]:
    """What the server runs, and its sampling where a request says nothing."""
    engine: MeasuredEngine = http.app.state.engine
    loaded, body = engine.model, Options()
    shape = Shape(loaded, http.app.state.options.name, context_length(engine), body)
    params = sampling(loaded, body, COMPLETION, shape.context)
    template = loaded.chat_template
    return {
        "default_generation_settings": {
            "n_ctx": shape.context,
            "params": settings(shape, params),
        },
        "total_slots": engine.options.slots,
        "model_path": str(loaded.folder),
        "chat_template": template.source if template else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"starquill {__version__}",
    }


def infill_request(
    engine: MeasuredEngine, body: InfillBody, order: FillOrder = "psm"
) -> tuple[GenerateRequest, Trimmed]:
    """What fills the hole, and what of the code around it had no room."""
    known = {"input_prefix", "input_suffix", "input_extra", "prompt"}
    if not known & body.model_fields_set:
        raise ApiError(400, f"the body has none of {', '.join(sorted(known))}", "input_prefix")
    loaded, context = engine.model, context_length(engine)
    fim = loaded.require_fim()
    # A model without repository tokens has learned no form in which to show it other files.
    shows_files = fim.file_sep is not None and fim.repo_name is not None
    extra = body.input_extra if shows_files else None
    files = tuple(ContextFile(e.filename or "snippet", e.text) for e in extra or ())
    hole = Hole(body.input_prefix or "", body.input_suffix or "", files)
    reserved = min(body.limit if body.limit >= 0 else INFILL_ROOM, context // 2)
    request, trimmed = fill_request(
        loaded,
        hole,
        sampling(loaded, body, INFILL, max(reserved, 1)),
        order=body.fim_order or order,
        begun=body.prompt or "",
        context=context,
    )
    return _completed(engine, body, request), trimmed


def _requests(engine: MeasuredEngine, body: CompletionBody) -> list[GenerateRequest]:
    several = prompts(body.prompt)
    _check_count(engine, body, len(several))
    return [completion_request(engine, body, prompt) for prompt in several]


def _check_count(engine: MeasuredEngine, body: Options, asked: int) -> None:
    """Refuse more answers than could ever wait."""
    count, most = asked * (body.n_cmpl or 1), engine.options.slots + engine.options.queue
    if count > most:
        field = "n_cmpl" if asked <= most else "prompt"
        raise ApiError(400, f"{count} texts are asked for (at most {most} at once here)", field)


def completion_request(
    engine: MeasuredEngine, body: CompletionBody, prompt: str | Sequence[int | str]
) -> GenerateRequest:
    loaded = engine.model
    params = sampling(loaded, body, COMPLETION, 1)
    if isinstance(prompt, str):
        check_length(loaded.require_tokenizer(), [prompt], context_length(engine), "prompt")
        check_template(loaded.require_tokenizer(), prompt)
        heals = not (body.n_probs or body.grammar or body.json_schema is not None)
        return _completed(engine, body, plain_request(loaded, prompt, params, heal=heals))
    tokenizer = loaded.require_tokenizer()
    texts = [piece for piece in prompt if isinstance(piece, str)]
    check_length(tokenizer, texts, context_length(engine), "prompt")
    ids: list[int] = []
    for piece in prompt:
        if isinstance(piece, str):
            ids += tokenizer.encode(piece, parse_special=True, inside=tokenizer.goes_on(ids))
        else:
            ids.append(piece)
    if prompt and isinstance(prompt[0], str):  # a list that begins with ids is meant as it is
        ids = tokenizer.started(ids)
    fim = tokenizer.fim
    stops = fim.stops if fim is not None and fim.middle in ids else frozenset()
    request = GenerateRequest(new_request_id(), tuple(ids), params, stop_ids=stops)
    return _completed(engine, body, request)


def _completed(engine: MeasuredEngine, body: Options, request: GenerateRequest) -> GenerateRequest:
    """With the body's limits. One that asks for no tokens writes one, and so fills the cache."""
    left = max(context_length(engine) - request.prompt_tokens, 1)
    limit = left if body.limit < 0 else min(max(body.limit, 1), left)
    stops = control_stops(engine.model.require_tokenizer(), request.params.stop)
    limited = replace(
        request,
        params=replace(request.params, max_tokens=limit),
        stop_ids=request.stop_ids | stops,
        max_seconds=body.seconds,
    )
    return restricted(engine.model, limited, grammar(body))


def prompts(prompt: Prompt) -> list[str | list[int | str]]:
    """A string or ids are one prompt, as is a list that mixes both; strings alone are several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is an empty list (expected text or token ids)", "prompt")
    single = [piece for piece in prompt if not isinstance(piece, list)]
    if len(single) == len(prompt) and any(isinstance(piece, int) for piece in single):
        return [single]
    return [[piece] if isinstance(piece, int) else piece for piece in prompt]


async def _answer(
    http: Request, body: Options, requests: Sequence[GenerateRequest], truncated: bool = False
) -> Response:
    engine: MeasuredEngine = http.app.state.engine
    name = http.app.state.options.name
    silent, adapter = body.limit == 0, adapter_of_llamacpp(http, body)
    shape = Shape(engine.model, name, context_length(engine), body, silent, truncated)
    acting = [replace(request, adapter=adapter) for request in requests]
    several = [_again(r, n) for r in acting for n in range(body.n_cmpl or 1)]
    if body.stream and len(several) > 1:
        raise ApiError(400, "stream is true with several answers (expected one prompt)", "stream")
    works = submit_all(engine, several)
    if body.stream:
        return streamed(_events(shape, works[0]))
    await unless_client_leaves(http, finish_all(works))
    answers = [final(shape, work, index) for index, work in enumerate(works)]
    return JSONResponse(answers[0] if len(answers) == 1 else answers)


def _again(request: GenerateRequest, number: int) -> GenerateRequest:
    """The `number`th of several answers; with a seed, each has its own."""
    seed = request.params.seed
    if number == 0 or seed is None:
        return replace(request, id=new_request_id()) if number else request
    params = replace(request.params, seed=seed + number)
    return replace(request, id=new_request_id(), params=params)


async def _events(shape: Shape, work: Submitted) -> AsyncIterator[bytes]:
    try:
        async for delta in work.deltas():
            if not shape.silent and (delta.text or delta.logprobs is not None):
                yield event(partial(shape, work, delta, 0))
        yield event(final(shape, work, 0))
    except Exception as error:
        told = as_api_error(error)
        if told.status == 500:
            log.exception("a stream of /completion or /infill failed")
        yield event(told.body())


def _piece(spelled: bytes) -> str | list[int]:
    try:
        return spelled.decode("utf-8")
    except UnicodeDecodeError:
        return list(spelled)
