"""Bodies of routes that other servers defined first: read leniently, and documented."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.server.errors import ApiError, shown
from starquill.server.metrics import MeasuredEngine

Body = TypeVar("Body", bound=BaseModel)
# How models of several makers have fills written: prefix, suffix, middle.
_FORMS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<PRE>", "<SUF>", "<MID>"),
)


async def read_body(http: Request, kind: type[Body]) -> Body:
    """The body as `kind`, whatever content type it claims: `curl -d` calls everything a form.

    Raises ApiError naming the first field that is wrong.
    """
    try:
        body = (await http.body()).removeprefix(codecs.BOM_UTF8)
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(part for part in first["loc"] if _is_field(part)) or None
        found = "" if field is None else f" (found {shown(first['input'])})"
        raise ApiError(400, f"{field or 'the body'}: {first['msg']}{found}", field) from None


def _is_field(part: object) -> TypeGuard[str]:
    """Places in lists and members of a union are part of a location, but are no fields."""
    return isinstance(part, str) and part.isidentifier() and part not in ("str", "int", "bool")


def documented(kind: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a route that reads `kind` by itself."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(parts[node["$ref"].rpartition("/")[2]])
        return {key: inlined(value) for key, value in node.items()}

    content = {"application/json": {"schema": inlined(schema)}}
    return {"requestBody": {"required": True, "content": content}}


def context_length(engine: MeasuredEngine) -> int:
    """How long a sequence may get."""
    length = engine.model.config.context_length
    return min(length, engine.options.context or length)


def check_length(tokenizer: Tokenizer, texts: Sequence[str], context: int, field: str) -> None:
    """Refuse, unread, texts that cannot fit however few tokens they are."""
    most = tokenizer.most_bytes
    least = sum(len(text.encode(errors="surrogatepass")) for text in texts) // (most or sys.maxsize)
    if least > context:
        told = f"{field} has at least {least} tokens; the context is {context}"
        raise ApiError(400, told, field)


def check_template(tokenizer: Tokenizer, prompt: str) -> None:
    """Refuse a fill that an editor wrote in another model's form: it would be read as text."""
    ending = prompt.rstrip()
    for prefix, suffix, middle in _FORMS:
        written = ending.endswith(middle) and prefix in prompt and suffix in prompt
        if written and tokenizer.id_of(middle) not in tokenizer.special_ids:
            fim = tokenizer.fim
            own = f"its own are {tokenizer.added[fim.prefix]}..." if fim else "it has none"
            raise ApiError(
                400,
                f"the prompt is a fill by {prefix}, {suffix}, {middle}, which are no tokens of "
                f"this model ({own}); choose another template in the editor",
                "prompt",
            )


def control_stops(tokenizer: Tokenizer, stop: tuple[str, ...]) -> frozenset[int]:
    """Tokens named by stop strings: a control token never shows in the text that is searched."""
    ids = {text: i for i, text in tokenizer.added.items() if i in tokenizer.special_ids}
    return frozenset(ids[text] for text in stop if text in ids)
