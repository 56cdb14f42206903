"""From text to a request: plain completion and chat. Filling is in `fim`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from starquill.engine.chat import Message
from starquill.engine.healing import split_for_healing
from starquill.engine.loaded import LoadedModel
from starquill.engine.params import check_params
from starquill.errors import BadRequestError, UnsupportedError
from starquill.types import GenerateRequest, SamplingParams

_numbers = itertools.count(1)


def new_request_id() -> str:
    return f"request-{next(_numbers)}"


def plain_request(
    loaded: LoadedModel,
    prompt: str,
    params: SamplingParams,
    *,
    heal: bool = True,
    parse_special: bool = True,
    start: bool = True,
) -> GenerateRequest:
    """Complete `prompt` at its end.

    Special-token strings are control tokens unless `parse_special` is False. With `heal` the
    prompt's last token is taken back (see `healing`). A text that the model was trained to see
    behind a start token gets one, unless it has it already or `start` is False: it goes on after
    what is there. An empty prompt starts from the model's text-start token in any case.
    """
    tokenizer = loaded.require_tokenizer()
    ids = tokenizer.encode(prompt, parse_special, inside=not start)
    if start:
        ids = tokenizer.started(ids)
    if not ids:
        first = tokenizer.id_of(tokenizer.named_token("bos_token") or "")
        if first is None:
            raise BadRequestError("the prompt is empty, and the model has no token to start from")
        ids = [first]
    ids, healed = split_for_healing(tokenizer, ids) if heal else (ids, b"")
    # A fill-in-the-middle prompt written by hand ends as one of ours does.
    fim = tokenizer.fim
    stops = fim.stops if fim is not None and fim.middle in ids else frozenset()
    return GenerateRequest(new_request_id(), tuple(ids), params, heal=healed, stop_ids=stops)


def chat_request(
    loaded: LoadedModel, messages: Sequence[Message], params: SamplingParams
) -> GenerateRequest:
    """Answer the last of `messages` ({"role", "content"}) by the model's own chat template.

    The template writes the start token, if there is one.
    """
    template = loaded.chat_template
    if template is None:
        raise UnsupportedError(
            f"{loaded.name} has no chat template (a base model); complete plain text instead"
        )
    check_params(params, loaded.config.vocab_size)
    ids = template.encode(messages)
    params = replace(params, stop=(*params.stop, *template.stop))
    return GenerateRequest(new_request_id(), tuple(ids), params, begins_text=True)
