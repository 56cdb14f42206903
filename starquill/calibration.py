"""How much each input of each matrix matters: second moments of activations on real text."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from starquill.errors import CheckpointError, UnsupportedError
from starquill.models.spec import GgufNames, StepBatch
from starquill.nn.cache import KvCache
from starquill.nn.linear import Linear
from starquill.quant.weight import Weight

Importances = Mapping[str, Tensor]
_CHUNK = 512


class _Watching:
    """A weight that adds up the squares of what it is multiplied with."""

    def __init__(self, inner: Weight) -> None:
        self.inner = inner
        self.squares = torch.zeros(inner.shape[-1], dtype=torch.float64)
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = x.flatten(0, -2)
        self.squares += flat.float().square().sum(0)
        self.count += len(flat)
        return self.inner.matmul(x, bias)


@torch.inference_mode()
def second_moments(
    model: Any, config: Any, texts: Iterable[list[int]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Mean square of every input of every `Linear`, by weight name, as `[in]` float32.

    `texts` are token ids; each is run from its own start, cut at the context. Memory is one
    vector a matrix and one cache, however long the texts are.
    """
    linears = {n: m for n, m in model.named_modules() if isinstance(m, Linear)}
    watching = {name: _Watching(module.weight) for name, module in linears.items()}
    _set_weights(linears, watching)
    try:
        for ids in texts:
            _run(model, config, ids[: config.context_length], dtype)
    finally:
        _set_weights(linears, {name: watch.inner for name, watch in watching.items()})
    return {
        f"{name}.weight": (watch.squares / watch.count).float()
        for name, watch in watching.items()
        if watch.count
    }


def _set_weights(linears: Mapping[str, Linear], weights: Mapping[str, Any]) -> None:
    for name, module in linears.items():
        module.weight = weights[name]


def _run(model: nn.Module, config: Any, ids: list[int], dtype: torch.dtype) -> None:
    cache = KvCache(config.cache_shape(1), dtype)
    slot, span = torch.tensor([0]), torch.tensor([len(ids)])
    hidden: Callable[[StepBatch], Tensor] = model.hidden  # type: ignore[assignment]
    logits: Callable[[Tensor], Tensor] = model.logits  # type: ignore[assignment]
    for start in range(0, len(ids), _CHUNK):
        piece = torch.tensor([ids[start : start + _CHUNK]])
        positions = cache.lens[:, None] + torch.arange(piece.shape[1])
        logits(hidden(StepBatch(piece, positions, slot, span, cache)))
        cache.lens += piece.shape[1]


def read_imatrix(path: Path, names: GgufNames | None) -> dict[str, Tensor]:
    """llama.cpp's importance matrix (the older binary form) by our weight names.

    Layout: int32 entries; per entry int32 name length, name, int32 calls, int32 values, then
    float32 sums of squares, each divided by the number of calls here.
    """
    if names is None:
        raise UnsupportedError(f"{path}: this architecture has no GGUF names")
    data = path.read_bytes()
    if data[:4] == b"GGUF":
        raise UnsupportedError(f"{path} is the newer GGUF form of imatrix; save it as .dat")
    result, at = {}, 4
    try:
        (entries,) = struct.unpack_from("<i", data, 0)
        for _ in range(entries):
            (length,) = struct.unpack_from("<i", data, at)
            name = data[at + 4 : at + 4 + length].decode()
            at += 4 + length
            calls, values = struct.unpack_from("<ii", data, at)
            sums = np.frombuffer(data, np.float32, values, at + 8)
            at += 8 + 4 * values
            result[names.rename(name)] = torch.from_numpy(sums / max(calls, 1))
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no imatrix file: {error}") from None
    if not any(re.search(r"layers\.\d+\.", name) for name in result):
        raise CheckpointError(f"{path} names no layer of this architecture")
    return result
