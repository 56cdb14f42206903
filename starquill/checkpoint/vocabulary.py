"""Do tokenizer and model belong together, and which tokens end a text?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starquill.checkpoint.tokenizer import Tokenizer
from starquill.errors import CheckpointError


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, allow_padded: bool) -> None:
    """Refuse a tokenizer that does not belong to a model of `vocab_size`."""
    ids = tokenizer.id_bound
    if ids > vocab_size:
        raise CheckpointError(
            f"tokenizer.json has ids up to {ids - 1}, but config.json's vocab_size is "
            f"{vocab_size}; the two are from different models"
        )
    if ids < vocab_size and not allow_padded:
        raise CheckpointError(
            f"tokenizer.json has {ids} ids, but config.json's vocab_size is {vocab_size}; use "
            "the model's own tokenizer.json, or --allow-padded-vocab if the rows are padding"
        )


def end_tokens(
    configs: tuple[Mapping[str, Any], ...], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[frozenset[int], list[str]]:
    """The union of all that files name as end of text, and warnings about ids that cannot be."""
    named: list[Any] = []
    for raw in configs:
        value = raw.get("eos_token_id")
        named += value if isinstance(value, list) else [value]
    if tokenizer is not None:
        named.append(tokenizer.eos_id)
    whole = {i for i in named if isinstance(i, int) and not isinstance(i, bool)}
    inside = frozenset(i for i in whole if 0 <= i < vocab_size)
    warnings = [
        f"end token {i} is outside the vocabulary of {vocab_size} and is ignored"
        for i in sorted(whole - inside)
    ]
    if not inside:
        warnings.append("no file names an end token: generation ends at the token limit alone")
    return inside, warnings
