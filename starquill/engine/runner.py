"""The runner: tensors, no policy. It alone moves a sequence forward in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from starquill.engine.loaded import LoadedModel
from starquill.engine.pooling import Pooling, pool_prompt, to_the_end
from starquill.engine.replay import Replay
from starquill.errors import NumericsError
from starquill.kernels.native import is_finite
from starquill.models.spec import StepBatch
from starquill.nn.cache import Follower, KvCache, Place
from starquill.nn.lora import AdapterMix
from starquill.nn.router import Routes

PREFILL_CHUNK = 512


class Runner:
    """Runs one model over a cache of `blocks`.

    A sequence's tokens are computed in one of two ways: pieces of a prompt one sequence at a time
    (`advance`), and single tokens of many sequences together (`decode`). Which way it was shows
    in the last bits; who else was there does not. A `mix` says which adapters act on which row: it
    has one for `advance` and what is like it, one for each token in `decode`.
    """

    def __init__(
        self, loaded: LoadedModel, blocks: int, prefill_chunk: int = PREFILL_CHUNK
    ) -> None:
        self.loaded = loaded
        self.prefill_chunk = prefill_chunk
        shape, devices = loaded.config.cache_shape(), loaded.cache_devices
        followers = [Follower(stage.open(blocks)) for stage in loaded.stages]
        self.cache = KvCache(shape, loaded.dtype, blocks, devices=devices, followers=followers)
        self._replay = Replay(loaded)

    def pool(self, place: Place, ids: Sequence[int], mix: AdapterMix | None = None) -> Pooling:
        """As `advance`, for a model that pools: a whole prompt, in small pieces of work."""
        prompt = StepBatch.after(place, torch.tensor([ids]), self.cache, mix)
        return pool_prompt(self.loaded.model, place, prompt, self.prefill_chunk)

    @torch.inference_mode()
    def advance(self, place: Place, ids: Sequence[int], mix: AdapterMix | None = None) -> Tensor:
        """Append `ids` to a sequence in one pass; hidden states `[T, D]`."""
        assert place.routes is not None or not self.loaded.config.pools, "its prompt comes first"
        batch = StepBatch.after(place, torch.tensor([ids]), self.cache, mix)
        hidden: Tensor = self.loaded.model.hidden(batch)  # [1, T, D]
        place.length += len(ids)
        return hidden[0]

    def prefill(self, place: Place, ids: Sequence[int], mix: AdapterMix | None = None) -> Tensor:
        """Append `ids` to a sequence, chunk by chunk; logits `[V]` after the last of them."""
        for hidden in self._pieces(place, ids, mix):
            last = hidden[-1:]
        logits = self.logits(last, mix)[0]
        self.check(logits)
        return logits

    def score(
        self, place: Place, ids: Sequence[int], mix: AdapterMix | None = None
    ) -> Iterator[Tensor]:
        """Append `ids` to a sequence; logits `[t, V]` after each of them, chunk by chunk."""
        for hidden in self._pieces(place, ids, mix):
            yield self.all_logits(hidden, mix)

    def _pieces(self, place: Place, ids: Sequence[int], mix: AdapterMix | None) -> Iterator[Tensor]:
        """Append `ids` to a sequence; hidden states `[t, D]`, chunk by chunk."""
        if self.loaded.config.pools and place.routes is None:
            yield from to_the_end(self.pool(place, ids, mix)).split(self.prefill_chunk)
            return
        for start in range(0, len(ids), self.prefill_chunk):
            yield self.advance(place, ids[start : start + self.prefill_chunk], mix)

    @torch.inference_mode()
    def all_logits(self, hidden: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """Of a piece of one sequence: `[T, D] -> [T, V]`, checked."""
        logits: Tensor = self._head(hidden[None], mix)[0]
        self.check(logits)
        return logits

    @torch.inference_mode()
    def decode(
        self,
        places: Sequence[Place],
        ids: Sequence[Sequence[int]],
        mix: AdapterMix | None = None,
    ) -> Tensor:
        """Append one or more tokens to each sequence; logits `[N, V]` after every token.

        N is the tokens of all, in their order.
        """
        logits = self.logits(self._hidden(places, ids, mix), mix)
        self._move(places, ids)
        return logits

    @torch.inference_mode()
    def step(
        self,
        places: Sequence[Place],
        ids: Sequence[Sequence[int]],
        mix: AdapterMix | None = None,
    ) -> Tensor:
        """As `decode`, but hidden states `[N, D]`."""
        hidden = self._hidden(places, ids, mix)
        self._move(places, ids)
        return hidden

    def _move(self, places: Sequence[Place], ids: Sequence[Sequence[int]]) -> None:
        for place, new in zip(places, ids, strict=True):
            place.length += len(new)

    def _hidden(
        self, places: Sequence[Place], ids: Sequence[Sequence[int]], mix: AdapterMix | None
    ) -> Tensor:
        rows = [(place, place.length + i) for place, new in zip(places, ids, strict=True)
                for i in range(len(new))]  # fmt: skip
        for place, new in zip(places, ids, strict=True):
            place.check_room(len(new))
        width = _rounded(max(len(place.table) for place in places))
        tables = np.zeros((len(rows), width), dtype=np.int64)
        for table, (place, _) in zip(tables, rows, strict=True):
            table[: len(place.table)] = place.table
        batch = StepBatch(
            _column([token for new in ids for token in new]),
            _column([position for _, position in rows]),
            torch.from_numpy(tables),
            _column([place.span for place, _ in rows])[:, 0],
            self.cache,
            mix,
            _routes(places, ids) if self.loaded.config.pools else None,
        )
        hidden: Tensor = self._replay.hidden(batch)  # [N, 1, D]
        return hidden[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, mix: AdapterMix | None = None) -> Tensor:
        """`[N, D] -> [N, V]`; what is not finite is for `check` to find."""
        logits: Tensor = self._head(hidden[:, None], mix)  # row by row, however many
        return logits[:, 0]

    def _head(self, hidden: Tensor, mix: AdapterMix | None) -> Tensor:
        model = self.loaded.model
        logits: Tensor = model.logits(hidden) if mix is None else model.logits(hidden, mix)
        return logits.cpu()

    def check(self, logits: Tensor) -> None:
        """Raise NumericsError for logits that are not finite."""
        if not is_finite(logits, threads=1):
            dtype = str(self.loaded.dtype).removeprefix("torch.")
            remedy = "the weights are damaged" if dtype == "float32" else "try --dtype float32"
            raise NumericsError(
                f"{self.loaded.name} computed logits that are not finite in {dtype}; {remedy}"
            )


def _column(values: list[int]) -> Tensor:
    """`[N, 1]` int64. By way of numpy, which takes a third of the time."""
    return torch.from_numpy(np.array(values, dtype=np.int64)[:, None])


def _rounded(width: int) -> int:
    """To a power of two: steps of one shape are written down once."""
    return 1 << (width - 1).bit_length()


def _routes(places: Sequence[Place], ids: Sequence[Sequence[int]]) -> Routes:
    """`[N, layers, A]`: of each token's sequence, as its prompt has chosen them."""
    rows = [place.routes for place, new in zip(places, ids, strict=True) for _ in new]
    chosen = [routes for routes in rows if routes is not None]
    assert len(chosen) == len(rows), "a prompt comes first"
    return Routes.of_rows(chosen)
