"""The architectures that starquill runs: one file each, one line here each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starquill.errors import CheckpointError, UnsupportedError
from starquill.models.mixtral import SPEC as MIXTRAL
from starquill.models.olmoe import SPEC as OLMOE
from starquill.models.phimoe import SPEC as PHIMOE
from starquill.models.qwen3_moe import SPEC as QWEN3_MOE
from starquill.models.spec import ArchSpec
from starquill.models.starcoder2 import SPEC as STARCODER2
from starquill.models.starcoder2_moe import SPEC as STARCODER2_MOE

ARCHITECTURES: dict[str, ArchSpec] = {
    spec.model_type: spec
    for spec in (STARCODER2, STARCODER2_MOE, MIXTRAL, QWEN3_MOE, PHIMOE, OLMOE)
}


def architecture(raw_config: Mapping[str, Any]) -> ArchSpec:
    """The spec that `config.json` names by `model_type`."""
    model_type = raw_config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"config.json: model_type is {model_type!r} (expected a name)")
    if model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"model_type {model_type!r} is not implemented (there are: {known})")
    return ARCHITECTURES[model_type]
