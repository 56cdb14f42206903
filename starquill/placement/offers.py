"""What would fit where a model does not: fewer bits, fewer sequences, a shorter context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from starquill.placement.plan import DoesNotFitError, Placement, plan
from starquill.placement.sizes import ModelSizes, Needs

# A context too short for any use is no way out.
LEAST_SEQ_LEN = 256


@dataclass(frozen=True)
class Variant:
    """A model quantized in another way; `quant` is None for as the user asked."""

    quant: str | None
    sizes: ModelSizes


@dataclass(frozen=True)
class Offer:
    """What to ask for instead, and the plan that it gives."""

    quant: str | None
    needs: Needs
    placement: Placement


def offers(variants: Sequence[Variant], budgets: Mapping[str, float], needs: Needs) -> list[Offer]:
    """What fits on the devices of `budgets`, changing one thing at a time, or else all.

    `variants` begin with what was asked for and go on with ever fewer bits.
    """
    found = list(_one_change(variants, budgets, needs))
    if found:
        return found
    for variant in variants:
        if offer := _shorter(variant, budgets, replace(needs, max_batch_size=1)):
            return [offer]
    return []


def _one_change(
    variants: Sequence[Variant], budgets: Mapping[str, float], needs: Needs
) -> Iterator[Offer]:
    for variant in variants:
        if placement := _fits(variant, budgets, needs):
            yield Offer(variant.quant, needs, placement)
            if variant is variants[0]:  # it was a map of the user's that had no room
                return
            break
    if offer := _shorter(variants[0], budgets, needs):
        yield offer
    if offer := _fewer(variants[0], budgets, needs):
        yield offer


def _shorter(variant: Variant, budgets: Mapping[str, float], needs: Needs) -> Offer | None:
    """The longest context that fits, in steps that people like."""
    step = LEAST_SEQ_LEN
    most = -(-needs.max_seq_len // step) - 1

    def offer(count: int) -> Offer | None:
        return _offer(variant, budgets, replace(needs, max_seq_len=count * step))

    return _most(offer, most)


def _fewer(variant: Variant, budgets: Mapping[str, float], needs: Needs) -> Offer | None:
    def offer(count: int) -> Offer | None:
        return _offer(variant, budgets, replace(needs, max_batch_size=count))

    return _most(offer, needs.max_batch_size - 1)


def _most(offer: Callable[[int], Offer | None], most: int) -> Offer | None:
    """The offer for the largest number from 1 to `most` that has one: fewer always do then."""
    best, low, high = None, 1, most
    while low <= high:
        middle = (low + high) // 2
        if found := offer(middle):
            best, low = found, middle + 1
        else:
            high = middle - 1
    return best


def _offer(variant: Variant, budgets: Mapping[str, float], needs: Needs) -> Offer | None:
    placement = _fits(variant, budgets, needs)
    return None if placement is None else Offer(variant.quant, needs, placement)


def _fits(variant: Variant, budgets: Mapping[str, float], needs: Needs) -> Placement | None:
    try:
        return plan(variant.sizes, budgets, needs)
    except DoesNotFitError:
        return None
