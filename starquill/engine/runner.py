"""The runner: tensors, no policy. It alone moves a cache forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from starquill.engine.loaded import LoadedModel
from starquill.errors import NumericsError
from starquill.kernels.native import is_finite
from starquill.models.spec import StepBatch
from starquill.nn.cache import KvCache

PREFILL_CHUNK = 512


class Runner:
    """Runs one model over a cache of `slots` sequences."""

    def __init__(
        self, loaded: LoadedModel, slots: int = 1, prefill_chunk: int = PREFILL_CHUNK
    ) -> None:
        self.loaded = loaded
        self.prefill_chunk = prefill_chunk
        self.cache = KvCache(loaded.config.cache_shape(slots), loaded.dtype)

    def prefill(self, slot: int, ids: Sequence[int], span: int) -> Tensor:
        """Append `ids` to a slot, chunk by chunk; logits `[V]` after the last of them.

        `span` is the length that the slot's sequence may reach; it must not change while the
        slot holds the sequence.
        """
        for start in range(0, len(ids), self.prefill_chunk):
            chunk = torch.tensor([ids[start : start + self.prefill_chunk]])
            hidden = self._step(chunk, torch.tensor([slot]), torch.tensor([span]))
        return self._logits(hidden[:, -1])[0]

    def score(self, slot: int, ids: Sequence[int], span: int) -> Iterator[Tensor]:
        """Append `ids` to a slot; logits `[t, V]` after each of them, chunk by chunk."""
        for start in range(0, len(ids), self.prefill_chunk):
            chunk = torch.tensor([ids[start : start + self.prefill_chunk]])
            hidden = self._step(chunk, torch.tensor([slot]), torch.tensor([span]))
            yield self._logits(hidden)[0]

    def decode(self, slots: Sequence[int], ids: Sequence[int], spans: Sequence[int]) -> Tensor:
        """Append one token to each of `slots`; logits `[B, V]`."""
        chunk = torch.tensor(ids)[:, None]
        hidden = self._step(chunk, torch.tensor(slots), torch.tensor(spans))
        return self._logits(hidden[:, -1])

    @torch.inference_mode()
    def _step(self, ids: Tensor, slots: Tensor, spans: Tensor) -> Tensor:
        tokens = ids.shape[1]
        positions = self.cache.lens[slots][:, None] + torch.arange(tokens)  # [B, T]
        batch = StepBatch(ids, positions, slots, spans, self.cache)
        hidden: Tensor = self.loaded.model.hidden(batch)  # [B, T, D]
        self.cache.lens[slots] += tokens
        return hidden

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.loaded.model.logits(hidden)  # [B, V]
        if not is_finite(logits, threads=1):
            dtype = str(self.loaded.dtype).removeprefix("torch.")
            remedy = "the weights are damaged" if dtype == "float32" else "try --dtype float32"
            raise NumericsError(
                f"{self.loaded.name} computed logits that are not finite in {dtype}; {remedy}"
            )
        return logits
