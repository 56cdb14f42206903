"""Which layers each of several processes has: a model's stages, one after the other.

2               # so many, of about the same size
0-11,12-29      # the layers of each
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from starquill.errors import BadRequestError

MOST_STAGES = 1000
_COUNT = re.compile(r"[0-9]{1,4}")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


@dataclass(frozen=True)
class Stages:
    """What was asked for: `count` of them, the layers of each where they were told."""

    count: int
    ranges: tuple[range, ...] | None = None

    def layers(self, sizes: Sequence[int], outside: int) -> tuple[range, ...]:
        """The layers of each, of a model whose layers have these `sizes` in bytes.

        The first stage has the `outside` too: the embedding, the final norm and the head. Where
        layers were not told, the largest stage is as small as can be. Raises BadRequestError for
        more stages than layers, and ranges of another model.
        """
        if self.ranges is not None:
            last = self.ranges[-1].stop - 1
            if last != len(sizes) - 1:
                raise BadRequestError(
                    f"--stages ends with layer {last} (expected {len(sizes) - 1}, the model's last)"
                )
            return self.ranges
        if self.count > len(sizes):
            raise BadRequestError(
                f"--stages is {self.count}, and the model has {len(sizes)} layers (expected no "
                "more stages than layers)"
            )
        return _evenly(sizes, outside, self.count)


@dataclass(frozen=True)
class StageOf:
    """Which one is meant, counted from 0."""

    stages: Stages
    number: int


def read_stages(text: str) -> Stages:
    """`text` as above; BadRequestError with all that is wrong."""
    text = text.strip()
    if _COUNT.fullmatch(text) and 1 <= int(text) <= MOST_STAGES:
        return Stages(int(text))
    found = [_RANGE.fullmatch(item.strip()) for item in text.split(",")]
    if len(found) < 2 or not all(found):
        raise BadRequestError(
            f"--stages is {text!r} (expected a number of stages, 1 or more, or the layers of each, "
            "as 0-11,12-29)"
        )
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1) for m in found if m]
    problems, at = [], 0
    for part in ranges:
        if part.start != at or not part:
            wanted = f"to begin with layer {at}" if part else "the first layer before the last"
            problems.append(f"{part.start}-{part.stop - 1} (expected {wanted})")
        at = max(at, part.stop)
    if problems:
        raise BadRequestError(f"--stages has {', '.join(problems)}")
    return Stages(len(ranges), tuple(ranges))


def _evenly(sizes: Sequence[int], outside: int, count: int) -> tuple[range, ...]:
    """Ranges of layers whose largest sum is the least; of those the first stage's the shortest.

    A largest sum is possible if stages filled one after the other take all layers, none empty.
    """
    low, high = max(sizes), sum(sizes) + outside
    while low < high:
        middle = (low + high) // 2
        if _filled(sizes, outside, count, middle) is None:
            low = middle + 1
        else:
            high = middle
    found = _filled(sizes, outside, count, low)
    assert found is not None, "all in one stage is possible"
    return found


def _filled(sizes: Sequence[int], outside: int, count: int, most: int) -> tuple[range, ...] | None:
    """`count` ranges, each of at most `most` bytes; None where there are none.

    From the last stage to the first, as each must leave a layer for those before it; the first has
    one in any case, however large what is outside.
    """
    ranges, stop = [], len(sizes)
    for before in range(count - 1, 0, -1):
        start = stop - 1
        while start > before and sum(sizes[start - 1 : stop]) <= most:
            start -= 1
        if sum(sizes[start:stop]) > most:
            return None
        ranges.append(range(start, stop))
        stop = start
    if stop > 1 and sum(sizes[:stop]) + outside > most:
        return None
    return (range(stop), *reversed(ranges))
