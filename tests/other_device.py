"""A device that is none: its values are on the CPU, and what would fail on a GPU fails on it too.

Operations over tensors of several devices, addresses that native code would take, `numpy()`. It
needs no hardware, so it shows what breaks; how a GPU rounds, and how fast it is, it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
_TO = ("aten::_to_copy", "aten::to")
# Those that torch itself lets go between devices, or that say where their result is to be.
_BETWEEN = (
    "aten::_to_copy",
    "aten::copy_",
    "aten::index",
    "aten::index_put_",
    "aten::_index_put_impl_",
)


class There(Tensor):
    """A tensor of the device `where`; `inner` has its values. To torch's own code it is `meta`."""

    inner: Tensor
    where: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> There:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        made.inner, made.where = inner, device
        found: There = made
        return found

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.where

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, int | float):  # which torch would first put on `meta`
            self[index].fill_(value)
        else:
            super().__setitem__(index, value)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        if not force:
            raise TypeError(f"can't convert {self.where} tensor to numpy")
        return self.inner.numpy()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"There({self.inner!r}, {self.where})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        raise RuntimeError(f"an address on {self.where} is none on the CPU")

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, There) else value


def _place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Where the result is; RuntimeError as torch has it for tensors of several devices."""
    name = func._schema.name
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if name == "aten::_local_scalar_dense":
        return torch.device("cpu")
    named = [kwargs.get("device"), *(each for each in args if isinstance(each, torch.device))]
    for device in named:
        if device is not None:
            return torch.device(device)
    if name in _TO and len(tensors) > 1:  # like another
        return tensors[1].device
    if name in _BETWEEN:
        own, *others = tensors
        if name.startswith("aten::_index") or name.startswith("aten::index"):
            # Indices on the CPU may index anything; those on a device only what is there too.
            strange = [each for each in others if each.device not in (own.device, CPU)]
            if strange:
                raise RuntimeError(f"{name}: indices on {strange[0].device} for {own.device}")
        return own.device
    devices = {each.device for each in tensors if each.dim() or isinstance(each, There)}
    if len(devices) > 1:
        raise RuntimeError(f"expected all tensors to be on the same device, {name} got {devices}")
    return next(iter(devices), CPU)


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    place = _place(func, args, kwargs)
    inside = [CPU if isinstance(each, torch.device) else _inner(each) for each in args]
    named = {k: CPU if k == "device" and v is not None else v for k, v in kwargs.items()}
    made = func(*tree_map(_inner, inside), **tree_map(_inner, named))
    if func._schema.is_mutable:
        for given in args:
            if isinstance(given, There) and given.inner is made:
                return given
    if func._schema.name in _TO and made is _inner(args[0]):
        if args[0].device == place:
            return args[0]
        made = made.clone()  # another device has memory of its own
    if place == CPU:
        return made
    # As tensors of before inference: torch's own views of such need that of what they return.
    with torch.inference_mode(False):
        return tree_map(lambda each: There(each, place) if isinstance(each, Tensor) else each, made)


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        # With this key torch does not look for the device's driver when it reads its name.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        meta = (kwargs or {}).get("device")
        if meta is not None and torch.device(meta).type == "meta":
            return func(*args, **(kwargs or {}))
        return _run(func, args, dict(kwargs or {}))


@contextmanager
def devices(patch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """Within, `names` (`cuda:0`...) are devices of this machine, with room without end."""
    free = {"cpu": float("inf"), **dict.fromkeys(names, float("inf"))}
    patch.setattr("starquill.placing.free_memory", lambda: free)
    patch.setattr("starquill.settling.free_memory", lambda: free)
    with _Mode():
        yield
