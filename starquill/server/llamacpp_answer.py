"""What llama.cpp's clients read: the objects of a stream, and the one at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.engine.loaded import LoadedModel
from starquill.server.llamacpp_schema import Options
from starquill.server.submitted import Submitted
from starquill.types import Delta, GenerationStats, Logprobs, SamplingParams


@dataclass(frozen=True)
class Shape:
    """What an answer tells beside its text. A `silent` one only filled the cache."""

    loaded: LoadedModel
    name: str
    context: int
    body: Options
    silent: bool = False
    truncated: bool = False


def partial(shape: Shape, work: Submitted, delta: Delta, index: int) -> dict[str, Any]:
    """One object of a stream."""
    ids = [] if delta.token_id is None or delta.is_prompt else [delta.token_id]
    chunk: dict[str, Any] = {
        "index": index,
        "content": delta.text,
        "tokens": ids,
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": len(work.ids),
        "tokens_evaluated": work.request.prompt_tokens,
    }
    if delta.logprobs is not None and ids:
        chunk["completion_probabilities"] = probabilities(shape.loaded, [delta])
    return chunk


def final(shape: Shape, work: Submitted, index: int) -> dict[str, Any]:
    """The answer, or the last object of a stream, which has no text."""
    stats, request, body = work.stats, work.request, shape.body
    stop_type, stopping_word = work.ending()
    tokenizer = shape.loaded.require_tokenizer()
    streamed = bool(body.stream)
    predicted = 0 if shape.silent else len(work.ids)
    full = request.prompt_tokens + predicted >= shape.context
    answer: dict[str, Any] = {
        "index": index,
        "content": "" if streamed or shape.silent else work.text,
        "tokens": work.ids if body.return_tokens and not (streamed or shape.silent) else [],
        "id_slot": -1,
        "stop": True,
        "model": shape.name,
        "tokens_predicted": predicted,
        "tokens_evaluated": request.prompt_tokens,
        "tokens_cached": stats.cached_tokens,
        "generation_settings": settings(shape, request.params),
        "prompt": tokenizer.decode(request.prompt_ids, skip_special=False)
        + request.heal.decode("utf-8", errors="replace"),
        "has_new_line": not shape.silent and "\n" in work.text,
        "truncated": shape.truncated or full,
        "stop_type": "limit" if shape.silent else stop_type,
        "stopping_word": "" if shape.silent else stopping_word,
        "timings": timings(stats, predicted),
    }
    if body.n_probs and not streamed:
        answer["completion_probabilities"] = probabilities(shape.loaded, work.read)
    return chosen_fields(answer, body.response_fields)


def settings(shape: Shape, params: SamplingParams) -> dict[str, Any]:
    """The sampling that was used, by llama.cpp's names."""
    body = shape.body
    return {
        "n_ctx": shape.context,
        "model": shape.name,
        "n_predict": body.limit,
        "max_tokens": body.limit,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "n_probs": params.logprobs or 0,
        "stream": bool(body.stream),
        "t_max_predict_ms": body.t_max_predict_ms or 0,
    }


def timings(stats: GenerationStats, predicted: int) -> dict[str, float]:
    computed = stats.prompt_tokens - stats.cached_tokens
    return {
        "cache_n": stats.cached_tokens,
        **_timing("prompt", computed, stats.time_to_first_token),
        **_timing("predicted", predicted, stats.generation_seconds if predicted else 0.0),
    }


def _timing(part: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{part}_n": tokens,
        f"{part}_ms": 1000 * seconds,
        f"{part}_per_token_ms": 1000 * seconds / tokens if tokens else 0.0,
        f"{part}_per_second": tokens / seconds if seconds > 0 else 0.0,
    }


def probabilities(loaded: LoadedModel, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    """Each token of the output with its likeliest alternatives."""
    tokenizer = loaded.require_tokenizer()
    return [
        {
            **_token(tokenizer, delta.token_id, delta.logprobs.chosen),
            "top_logprobs": _top(tokenizer, delta.logprobs),
        }
        for delta in deltas
        if delta.token_id is not None and delta.logprobs is not None and not delta.is_prompt
    ]


def _top(tokenizer: Tokenizer, logprobs: Logprobs) -> list[dict[str, Any]]:
    return [_token(tokenizer, top.token_id, top.logprob) for top in logprobs.top]


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = spelling(tokenizer, token)
    text = spelled.decode("utf-8", errors="replace")
    # JSON has no infinity; a banned token can have no other.
    return {
        "id": token,
        "token": text,
        "bytes": list(spelled),
        "logprob": max(logprob, -1e9),
    }


def spelling(tokenizer: Tokenizer, token: int) -> bytes:
    """A token's bytes; of a control token its name's."""
    if token in tokenizer.special_ids:
        return tokenizer.added[token].encode()
    return tokenizer.token_bytes[token] if token < tokenizer.id_bound else b""


def chosen_fields(answer: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """Those of `fields` that there are; `a/b` is the member b of a, under that whole name."""
    if not fields:
        return answer
    chosen = {}
    for field in fields:
        value: Any = answer
        for part in field.split("/"):
            value = value[part] if isinstance(value, dict) and part in value else None
        if value is not None:
            chosen[field] = value
    return chosen
