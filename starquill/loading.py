"""The composition root: from a name and options to a `LoadedModel`."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch

from starquill.adapters.xlora import load_xlora
from starquill.adapters.xlora_config import find_xlora
from starquill.checkpoint.build import build
from starquill.checkpoint.hub import ModelFiles, locate
from starquill.checkpoint.opening import Checkpoint, open_checkpoint
from starquill.checkpoint.vocabulary import check_vocabulary
from starquill.engine.chat import chat_template
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError
from starquill.isq import IsqPlan, apply_isq
from starquill.quant.weight import Computing
from starquill.quantizing import (
    OnProgress,
    QuantOptions,
    Reading,
    plan_checkpoint,
    plan_warnings,
    planned_bytes,
)
from starquill.requantizing import Requantizer

log = logging.getLogger("starquill")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def load(
    model: str | Path,
    *,
    dtype: Dtype = "auto",
    revision: str | None = None,
    allow_padded_vocab: bool = False,
    quant: str | QuantOptions | None = None,
    exact: bool = False,
    xlora: str | Path | None = None,
    xlora_freeze: int | None = None,
    on_progress: OnProgress | None = None,
) -> LoadedModel:
    """Load a model: `default` (the embedded one), a folder, a file or a hub id.

    `dtype` is what is computed in; `auto` is float32, with two-byte weights kept as stored.
    `allow_padded_vocab` accepts a model with more rows in its vocabulary than the tokenizer
    has ids. `quant` quantizes while loading, one tensor at a time: a scheme (`4`, `q3-g32`), a
    recipe (`mixed-2-6`), or `QuantOptions`. Products with quantized weights round activations
    to int8 for each group, unless `exact`. `xlora` is the folder of an X-LoRA that acts on every
    request; its weights stay as they are after `xlora_freeze` written tokens.
    Raises CheckpointError, AdapterError or UnsupportedError, each naming all that is wrong.
    """
    _check_freeze(xlora, xlora_freeze)
    found = None if xlora is None else find_xlora(xlora)  # told now, not after the weights are read
    files = locate(model, revision)
    checkpoint = open_checkpoint(files)
    computing = Computing(_compute_dtype(dtype), as_stored=dtype == "auto", exact=exact)
    tokenizer, config = checkpoint.tokenizer, checkpoint.config
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size, allow_padded_vocab)
    plan = _planned(checkpoint, quant)
    resident = planned_bytes(checkpoint, plan, computing)
    reading = Reading(checkpoint, plan, resident, resident, on_progress)
    built = build(
        checkpoint.spec,
        config,
        checkpoint.source,
        computing,
        partial(apply_isq, plan),
        on_read=reading.read,
    )
    warnings = (*checkpoint.warnings, *plan_warnings(checkpoint, plan), *built.warnings)
    for warning in warnings:
        log.warning("%s: %s", files.weights or files.folder, warning)
    loaded = LoadedModel(
        name=_display_name(model, files),
        folder=checkpoint.folder,
        spec=checkpoint.spec,
        config=config,
        model=built.model,
        dtype=computing.dtype,
        end_ids=checkpoint.end_ids,
        tokenizer=tokenizer,
        chat_template=chat_template(tokenizer) if tokenizer else None,
        warnings=warnings,
        requantizer=Requantizer(built.model, checkpoint, computing),
    )
    return (
        loaded if found is None else replace(loaded, xlora=load_xlora(found, loaded, xlora_freeze))
    )


def _check_freeze(xlora: str | Path | None, freeze: int | None) -> None:
    """Refuse a count of tokens that makes no sense."""
    if freeze is not None and (xlora is None or freeze < 0):
        wrong = "needs an X-LoRA" if xlora is None else "is below 0 (expected a count of tokens)"
        raise BadRequestError(f"xlora_freeze {freeze} {wrong}")


def _planned(checkpoint: Checkpoint, quant: str | QuantOptions | None) -> IsqPlan:
    if quant is None:
        return IsqPlan({})
    return plan_checkpoint(checkpoint, QuantOptions(quant) if isinstance(quant, str) else quant)


def _display_name(model: str | Path, files: ModelFiles) -> str:
    return str(model) if isinstance(model, str) else files.folder.name


def _compute_dtype(name: str) -> torch.dtype:
    if name not in get_args(Dtype):
        raise BadRequestError(f"dtype is {name!r} (expected {', '.join(get_args(Dtype))})")
    if name == "auto":
        return torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
