"""Prompts of a model whose gates choose experts once for a sequence, by the mean over its prompt.

Layer by layer instead of piece by piece: what a layer chooses from is the mean over the whole
prompt, as the layers before it, with the experts that they chose, have made it. That is what gates
are trained on (`anymoe.states`), and no way of cutting a prompt changes it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from starquill.models.spec import StepBatch
from starquill.nn.cache import Place
from starquill.nn.experts import PooledMlp, mean_of
from starquill.nn.router import Routes

Pooling = Generator[None, None, Tensor]


def pieces_of(tokens: int, most: int) -> list[range]:
    """`tokens` in pieces of `most`; the last may be one longer.

    A piece of one token would be computed as written ones are, not as the rest of a prompt.
    """
    starts = [start for start in range(0, tokens, most) if not start or tokens - start > 1]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], tokens], strict=True)]


@torch.inference_mode()
def pool_prompt(model: Any, place: Place, prompt: StepBatch, most: int) -> Pooling:
    """Compute the whole `prompt` of the new sequence at `place`, and choose its experts on the way.

    Yields after each piece of half a layer, of at most `most` tokens (or one more), so that others
    may have their turn; returns the final hidden states `[T, D]`. Only then has the sequence its
    length and routes.
    """
    assert place.length == 0, "the mean is over the whole prompt"
    tokens, mix = prompt.ids.shape[1], prompt.mix
    pieces = [_cut(prompt, piece) for piece in pieces_of(tokens, most)]
    states = [model.embed(piece.ids, mix) for piece in pieces]
    chosen: Routes | None = None
    for number, layer in enumerate(model.model.layers):
        for at, piece in enumerate(pieces):
            states[at] = model.layer(number, layer.attend, states[at], piece)
            yield
        if isinstance(mlp := layer.mlp, PooledMlp):
            given = (layer.post_attention_layernorm(x, mix) for x in states)
            mean = mean_of(tokens, given).to(states[0].dtype)
            own = mlp.choose(mean, mix)
            if chosen is None:
                chosen = Routes.none_yet(len(model.model.layers), own.experts.shape[-1])
            chosen.experts[number], chosen.weights[number] = own.experts[0], own.weights[0]
        routes = None if chosen is None else Routes.of_rows([chosen])
        for at, piece in enumerate(pieces):
            routed = replace(piece, routes=routes)
            states[at] = model.layer(number, layer.feed, states[at], routed)
            yield
    place.length += tokens
    place.routes = chosen
    return torch.cat([model.finish(model.route.to_end(x), mix)[0] for x in states])


def _cut(prompt: StepBatch, piece: range) -> StepBatch:
    ids, positions = (t[:, piece.start : piece.stop] for t in (prompt.ids, prompt.positions))
    return replace(prompt, ids=ids, positions=positions)


def to_the_end(pooling: Pooling) -> Tensor:
    """All of it at once."""
    while True:
        try:
            next(pooling)
        except StopIteration as ended:
            hidden: Tensor = ended.value
            return hidden
