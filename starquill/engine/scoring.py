"""How well a model predicts given text: bits per byte, perplexity, and distance to another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from starquill.engine.loaded import LoadedModel
from starquill.engine.runner import Runner
from starquill.errors import BadRequestError
from starquill.nn.cache import blocks_for
from starquill.nn.lora import AdapterMix

CHUNK = 256
WINDOW = 4096


@dataclass(frozen=True)
class Score:
    """Sums over tokens: -log p in nats, and if compared, KL(reference ‖ model) and equal tops."""

    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0
    kl_nats: float = 0.0
    same_top: int = 0
    compared: bool = False

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / max(self.bytes, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / max(self.tokens, 1))

    @property
    def kl_divergence(self) -> float:
        """Mean over tokens, in nats."""
        return self.kl_nats / max(self.tokens, 1)

    @property
    def top_agreement(self) -> float:
        """Share of tokens at which both models' likeliest token is the same."""
        return self.same_top / max(self.tokens, 1)

    def __add__(self, other: Score) -> Score:
        return Score(
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.nats + other.nats,
            self.kl_nats + other.kl_nats,
            self.same_top + other.same_top,
            self.compared or other.compared,
        )


def log_probabilities(
    loaded: LoadedModel, ids: Sequence[int], mix: AdapterMix | None = None
) -> Iterator[Tensor]:
    """log p `[t, V]` of the token after each of `ids`, chunk by chunk."""
    runner = Runner(loaded, blocks_for(len(ids)), CHUNK)
    for logits in runner.score(runner.cache.place(len(ids)), ids, mix):
        yield logits.log_softmax(-1)


def score_texts(
    loaded: LoadedModel,
    texts: Iterable[str],
    against: LoadedModel | None = None,
    adapters: Mapping[str, float] | None = None,
) -> Score:
    """Score each text from its own start, over windows that overlap by half.

    Each token is scored once, with at least half a window before it (or the text's start). A
    text begins after the start token, or where there is none the end-of-text token, as in
    training. `against` is a reference model with the same vocabulary. `adapters` act on `loaded`
    alone, each with its weight.
    """
    tokenizer = loaded.require_tokenizer()
    if against is not None and against.config.vocab_size != loaded.config.vocab_size:
        raise BadRequestError(
            f"the models' vocabularies differ ({loaded.config.vocab_size} and "
            f"{against.config.vocab_size} tokens), so they cannot be compared"
        )
    theirs = None if against is None else against.tokenizer
    if theirs is not None and theirs.token_bytes != tokenizer.token_bytes:
        raise BadRequestError("the models' vocabularies differ in their tokens")
    both = [loaded] if against is None else [loaded, against]
    window = min(WINDOW, *(model.config.context_length for model in both))
    if window < 2:
        raise BadRequestError("a context of one token predicts nothing")
    with loaded.adapters.lease(adapters or {}) as lease:
        mix = loaded.adapters.mix_of([lease], [1])
        return _score_all(loaded, texts, window, against, mix)


def _score_all(
    loaded: LoadedModel,
    texts: Iterable[str],
    window: int,
    against: LoadedModel | None,
    mix: AdapterMix | None,
) -> Score:
    tokenizer, total = loaded.require_tokenizer(), Score()
    for text in texts:
        start_id = next(iter(tokenizer.start_ids), min(loaded.end_ids, default=0))
        ids = [start_id, *tokenizer.encode(text)]
        total += Score(bytes=len(text.encode()))
        done = 1
        while done < len(ids):
            first = max(0, done - window // 2)
            end = min(first + window, len(ids))
            total += _score_window(loaded, ids[first:end], done - first, against, mix)
            done = end
    return total


def _score_window(
    loaded: LoadedModel,
    ids: list[int],
    known: int,
    against: LoadedModel | None,
    mix: AdapterMix | None,
) -> Score:
    """Score `ids[known:]`; those before are context."""
    ours = log_probabilities(loaded, ids[:-1], mix)
    theirs = None if against is None else log_probabilities(against, ids[:-1])
    total = Score(compared=against is not None)
    position = 1  # of the token that a row of log probabilities is about
    for logp in ours:
        reference = None if theirs is None else next(theirs)
        skip = min(max(known - position, 0), len(logp))
        wanted = torch.tensor(ids[position : position + len(logp)])[skip:]
        position += len(logp)
        logp = logp[skip:]
        nats = -float(logp.gather(1, wanted[:, None]).sum())
        kl, same = 0.0, 0
        if reference is not None:
            reference = reference[skip:]
            kl = float((reference.exp() * (reference - logp)).sum())
            same = int((reference.argmax(1) == logp.argmax(1)).sum())
        total += Score(len(wanted), 0, nats, kl, same)
    return total
