"""Layers that another process has: what it is sent for a step, and the way there and back.

A stage has its layers' weights and their part of the cache, under the same numbers of blocks as
here. So nobody who deals out blocks needs to know of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from starquill.nn.cache import Copy, Follower
from starquill.nn.lora import AdapterMix
from starquill.nn.route import ONE_DEVICE, MakeStep, OneDevice, Rows


@dataclass(frozen=True, eq=False)
class StageStep:
    """One step of a stage's layers, as arrays.

    `x` `[B, T, D]` is what enters its first layer, as `as_array` makes it. `positions` `[B, T]`,
    `tables` `[B, W]`, `spans` `[B]` and the adapters' `slots` and `scales` are those of the batch;
    no slots for the base model. `copies` are due in the cache that it calls `key` before the step.
    """

    key: int
    copies: tuple[Copy, ...]
    x: np.ndarray
    positions: np.ndarray
    tables: np.ndarray
    spans: np.ndarray
    slots: tuple[int, ...] = ()
    scales: np.ndarray | None = None

    @classmethod
    def of(cls, x: Tensor, rows: Rows, follower: Follower) -> StageStep:
        """For `x` of a batch's `rows`; what `follower` has yet to copy goes along."""
        copies, follower.copies = tuple(follower.copies), []
        mix = rows.mix
        return cls(
            follower.key,
            copies,
            as_array(x),
            rows.positions.numpy(),
            rows.tables.numpy(),
            rows.spans.numpy(),
            () if mix is None else mix.slots,
            None if mix is None else mix.scales.contiguous().numpy(),
        )

    def mix(self) -> AdapterMix | None:
        if self.scales is None:
            return None
        return AdapterMix(self.slots, torch.from_numpy(self.scales.copy()))


class ForwardStage(Protocol):
    """The part of a stage that a step needs."""

    def forward(self, step: StageStep) -> np.ndarray:
        """`[B, T, D]` behind its last layer, as `step.x` is before the first."""
        ...


@dataclass(frozen=True, eq=False)
class StagedRoute:
    """The way where the layers from number `first` on are in `stages`, one after the other."""

    first: int
    stages: Sequence[ForwardStage]
    own: OneDevice = ONE_DEVICE

    def through(self, layers: Iterable[nn.Module], x: Tensor, make_step: MakeStep) -> Tensor:
        return self.own.through(islice(layers, self.first), x, make_step)

    def beyond(self, x: Tensor, rows: Rows) -> Tensor:
        for stage, follower in zip(self.stages, rows.cache.followers, strict=True):
            x = as_tensor(stage.forward(StageStep.of(x, rows, follower)), x.dtype)
        return x

    def to_embedding(self, ids: Tensor) -> Tensor:
        return self.own.to_embedding(ids)

    def at_head(self) -> None:
        self.own.at_head()


def as_array(x: Tensor) -> np.ndarray:
    """The same bits; bfloat16, which NumPy lacks, as int16."""
    x = x.contiguous()
    array: np.ndarray = (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()
    return array


def as_tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """What `as_array` made of a tensor of `dtype`; a copy, because arrays may be read-only."""
    tensor = torch.from_numpy(array.copy())
    return tensor.view(dtype) if dtype is torch.bfloat16 else tensor
