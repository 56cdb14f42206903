"""starquill: StarCoder2 and code mixtures of experts on your own machine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from starquill.errors import (
    AdapterError,
    BadRequestError,
    CapacityError,
    CheckpointError,
    NumericsError,
    StarquillError,
    UnsupportedError,
)
from starquill.types import Delta, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from starquill.engine.engine import Engine
    from starquill.engine.fim import ContextFile, Hole
    from starquill.engine.loaded import LoadedModel
    from starquill.loading import load

__version__ = "0.1.0"

__all__ = [
    "AdapterError",
    "BadRequestError",
    "CapacityError",
    "CheckpointError",
    "ContextFile",
    "Delta",
    "Engine",
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
    "ContextFile": "starquill.engine.fim",
    "Engine": "starquill.engine.engine",
    "Hole": "starquill.engine.fim",
    "LoadedModel": "starquill.engine.loaded",
    "load": "starquill.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'starquill' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
