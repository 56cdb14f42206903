"""The architectures that starquill runs: one file each, one line here each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starquill.errors import CheckpointError, UnsupportedError
from starquill.models.spec import ArchSpec
from starquill.models.starcoder2 import SPEC as STARCODER2

ARCHITECTURES: dict[str, ArchSpec] = {spec.model_type: spec for spec in (STARCODER2,)}


def architecture(raw_config: Mapping[str, Any]) -> ArchSpec:
    """The spec that `config.json` names by `model_type`."""
    model_type = raw_config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"config.json: model_type is {model_type!r} (expected a name)")
    if model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"model_type {model_type!r} is not implemented (there are: {known})")
    return ARCHITECTURES[model_type]
