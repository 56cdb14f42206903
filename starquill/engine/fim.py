"""Fill-in-the-middle: from the code around a hole to a request (arXiv 2207.14255).

`<fim_prefix>PREFIX<fim_suffix>SUFFIX<fim_middle>`, and with other files of the repository in
front, by the format StarCoder2 was trained on (arXiv 2402.19173 §5.1):
`<repo_name>NAME<file_sep>PATH\\nCODE<file_sep><fim_prefix>PATH\\nPREFIX<fim_suffix>...`. Qwen's
coders were trained on lines (arXiv 2409.12186), with tokens of their own spelling:
`<repo_name>NAME\\n<file_sep>PATH\\nCODE\\n<file_sep>PATH\\n<fim_prefix>PREFIX<fim_suffix>...`.

In suffix-prefix order (`spm`, that paper's second variant) the prefix goes where the middle begins:
`<fim_prefix><fim_suffix>SUFFIX<fim_middle>PREFIX`. Who types at the prefix's end then changes only
the end of what the model sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from starquill.checkpoint.tokenizer import FimTokens
from starquill.engine.healing import split_for_healing
from starquill.engine.loaded import LoadedModel
from starquill.engine.params import check_params
from starquill.engine.prompts import new_request_id
from starquill.errors import BadRequestError, CapacityError, UnsupportedError
from starquill.types import GenerateRequest, Hole, SamplingParams

FillOrder = Literal["psm", "spm"]


@dataclass(frozen=True)
class Trimmed:
    """What was left out to fit the context: tokens at the far ends, and whole files."""

    prefix_tokens: int = 0
    suffix_tokens: int = 0
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prefix_tokens or self.suffix_tokens or self.files)

    def __str__(self) -> str:
        parts = []
        if self.files:
            parts.append(f"the context files {', '.join(self.files)}")
        if self.prefix_tokens:
            parts.append(f"the first {self.prefix_tokens} tokens of the prefix")
        if self.suffix_tokens:
            parts.append(f"the last {self.suffix_tokens} tokens of the suffix")
        return " and ".join(parts)


def fill_request(
    loaded: LoadedModel,
    hole: Hole,
    params: SamplingParams,
    *,
    order: FillOrder = "psm",
    begun: str = "",
    context: int | None = None,
) -> tuple[GenerateRequest, Trimmed]:
    """Ids that ask for the middle of `hole`, and what had to be left out of them.

    All of `hole` is data, whatever it contains. Prefix and suffix come before context files:
    of those, the first named go first. `begun` is how the middle begins: it stands at the end,
    is never cut, and its last token is healed. `context` is how long the sequence may get (the
    model's own limit where None). Generation also stops at any fill or file token.
    Raises UnsupportedError for a model without the tokens, CapacityError when `max_tokens`
    leaves no room.
    """
    if order not in get_args(FillOrder):
        raise BadRequestError(f"the order is {order!r} (expected {', '.join(get_args(FillOrder))})")
    check_params(params, loaded.config.vocab_size)
    tokenizer, fim = loaded.require_tokenizer(), loaded.require_fim()
    if hole.context and (fim.file_sep is None or fim.repo_name is None):
        raise UnsupportedError(f"{loaded.name} has no repository tokens, so no context files")
    # All of it goes on behind a control token, and nothing is written between.
    encode = partial(tokenizer.encode, inside=True)
    middle = encode(begun)
    room = _room(loaded, hole, params.max_tokens + len(middle), context)
    after = encode(hole.suffix)
    # A path is only written behind a repository: the model has seen no other form.
    path = "" if fim.by_line else f"{hole.path}\n"
    before = encode(f"{path}{hole.prefix}") if hole.context else []
    front, dropped = _repository(encode, fim, hole, room - len(before) - len(after))
    cut_before = cut_after = 0
    if not front:
        before = encode(hole.prefix)
        kept_before, kept_after = _shares(len(before), len(after), room)
        cut_before, cut_after = len(before) - kept_before, len(after) - kept_after
        before, after = before[cut_before:], after[:kept_after]
    ids = [*front, *_arranged(fim, before, after, order), *middle]
    # What is written goes on inside the last word that was begun; a hole's edges are no such
    # case, since in training too they were cut anywhere.
    ids, healed = split_for_healing(tokenizer, ids) if middle else (ids, b"")
    request = GenerateRequest(new_request_id(), tuple(ids), params, heal=healed, stop_ids=fim.stops)
    return request, Trimmed(cut_before, cut_after, dropped)


def _arranged(
    fim: FimTokens, before: Sequence[int], after: Sequence[int], order: FillOrder
) -> list[int]:
    if order == "spm":
        return [fim.prefix, fim.suffix, *after, fim.middle, *before]
    return [fim.prefix, *before, fim.suffix, *after, fim.middle]


def _room(loaded: LoadedModel, hole: Hole, taken: int, context: int | None) -> int:
    """Tokens for the code around the hole, beside the three fill tokens and those `taken`."""
    length = min(loaded.config.context_length, context or loaded.config.context_length)
    room = length - taken - 3
    if room < bool(hole.prefix or hole.suffix):
        raise CapacityError(
            f"max_tokens and what is begun ({taken} tokens) leave {max(room + 3, 0)} tokens of the "
            f"context of {length} for the code around the hole; ask for fewer tokens"
        )
    return room


def _shares(before: int, after: int, room: int) -> tuple[int, int]:
    """How many tokens of prefix and suffix are kept when together they have `room`.

    A quarter is the suffix's own; whoever needs less leaves the rest to the other.
    """
    kept_after = min(after, max(room // 4, room - before))
    return min(before, room - kept_after), kept_after


def _repository(
    encode: Callable[[str], list[int]], fim: FimTokens, hole: Hole, room: int
) -> tuple[list[int], tuple[str, ...]]:
    """The repository's name and as many context files as fit, the last named kept longest.

    Nothing if none fits; and the paths of those that do not.
    """
    if fim.repo_name is None or fim.file_sep is None:
        return [], ()
    end = "\n" if fim.by_line else ""
    name = [fim.repo_name, *encode(hole.repo_name + end)]
    last = [fim.file_sep, *(encode(f"{hole.path}\n") if fim.by_line else [])]
    room -= len(name) + len(last)
    kept: list[list[int]] = []
    files = list(hole.context)
    while files:
        file = files[-1]
        ids = [fim.file_sep, *encode(f"{file.path}\n{file.code}{end}")]
        if len(ids) > room:
            break
        room -= len(ids)
        kept.insert(0, ids)
        files.pop()
    dropped = tuple(file.path for file in files)
    if not kept:
        return [], dropped
    return [*name, *(i for ids in kept for i in ids), *last], dropped
