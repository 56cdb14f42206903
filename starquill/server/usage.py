"""What a call cost, as OpenAI's routes tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starquill.types import GenerationStats


def usage(stats: Sequence[GenerationStats], tries: int) -> dict[str, Any]:
    """Each prompt counts once, whatever `n`; texts that `best_of` left out count too.

    `stats` are of `tries` requests for each prompt.
    """
    firsts = stats[::tries]
    prompt = sum(one.prompt_tokens for one in firsts)
    written = sum(one.generated_tokens for one in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in firsts)},
    }
