"""starquill: StarCoder2 and code mixtures of experts on your own machine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from starquill.errors import (
    BadRequestError,
    BusyError,
    CapacityError,
    CheckpointError,
    NumericsError,
    StarquillError,
    UnsupportedError,
)
from starquill.types import ContextFile, Delta, EngineOptions, GenerateRequest, Hole, SamplingParams

if TYPE_CHECKING:
    from starquill.engine.engine import Engine
    from starquill.engine.loaded import LoadedModel
    from starquill.loading import load

__version__ = "0.1.0"

__all__ = [
    "BadRequestError",
    "BusyError",
    "CapacityError",
    "CheckpointError",
    "ContextFile",
    "Delta",
    "Engine",
    "EngineOptions",
    "GenerateRequest",
    "Hole",
    "LoadedModel",
    "NumericsError",
    "SamplingParams",
    "StarquillError",
    "UnsupportedError",
    "load",
]

# These need torch, which takes a second to import: fetched at first use, so that
# `starquill --help` answers at once.
_LAZY = {
    "Engine": "starquill.engine.engine",
    "LoadedModel": "starquill.engine.loaded",
    "load": "starquill.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'starquill' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
