"""The composition root: from a name and options to a `LoadedModel`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from starquill.adapters.xlora import load_xlora
from starquill.adapters.xlora_config import find_xlora
from starquill.checkpoint.build import BuiltModel, build, everything
from starquill.checkpoint.hub import ModelFiles, locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.checkpoint.vocabulary import check_vocabulary
from starquill.engine.chat import chat_template
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError, UnsupportedError
from starquill.isq import IsqPlan, apply_isq
from starquill.placement.stages import StageOf
from starquill.placing import DeviceOptions, Request, Subject
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
from starquill.settling import ELSEWHERE, ON_DISK, Settler, Share, Stays, settler_for

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
    device_map: str | None = None,
    max_memory: str | Mapping[str, float] | None = None,
    max_seq_len: int | None = None,
    max_batch_size: int | None = None,
    topology: Path | None = None,
    stage: StageOf | None = None,
    on_progress: OnProgress | None = None,
) -> LoadedModel:
    """Load a model: `default` (the embedded one), a folder, a file or a hub id.

    `dtype` is what is computed in; `auto` is float32, with two-byte weights kept as stored.
    `allow_padded_vocab` accepts a model with more rows in its vocabulary than the tokenizer
    has ids. `quant` quantizes while loading, one tensor at a time: a scheme (`4`, `q3-g32`), a
    recipe (`mixed-2-6`), or `QuantOptions`. Products with quantized weights round activations
    to int8 for each group, unless `exact`. `xlora` is the folder or hub id of an X-LoRA that acts
    on every request; its weights stay as they are after `xlora_freeze` written tokens.
    `device_map`, `max_memory` and devices in the file `topology` say where layers go
    (docs/placement.md), `max_seq_len` and `max_batch_size` what must have room there; requests get
    no more than these.
    With `stage` only the layers of one of several processes are loaded (docs/scale-out.md), by the
    first the embedding and the head too; `engine.stages.joined` makes the whole of them.
    Raises CheckpointError, AdapterError or UnsupportedError, each naming all that is wrong, and
    CapacityError with what would fit.
    """
    _check_freeze(xlora, xlora_freeze)
    found = None if xlora is None else find_xlora(xlora)  # told now, not after the weights are read
    files = locate(model, revision)
    checkpoint = open_checkpoint(files)
    computing = Computing(_compute_dtype(dtype), as_stored=dtype == "auto", exact=exact)
    tokenizer, config = checkpoint.tokenizer, checkpoint.config
    if config.pools:
        _check_pooling(model, found is not None, stage is not None)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size, allow_padded_vocab)
    options = QuantOptions(quant) if isinstance(quant, str) else quant
    file = options.topology if topology is None and options is not None else topology
    where = DeviceOptions(device_map, max_memory, max_seq_len, max_batch_size, file)
    request = Request(Subject(checkpoint, computing, options), where)
    share = None if stage is None else Share(stage, request)
    plan = IsqPlan({}) if options is None else plan_checkpoint(checkpoint, options)
    settler = settler_for(files, request) if share is None else None
    built = _built(request, plan, settler, share, on_progress)
    warnings = (*checkpoint.warnings, *plan_warnings(checkpoint, plan), *built.warnings)
    for warning in warnings:
        log.warning("%s: %s", files.weights or files.folder, warning)
    loaded = _loaded(_display_name(model, files), request, built.model, settler, share)
    acting = None if found is None else load_xlora(found, loaded, xlora_freeze)
    return replace(loaded, warnings=warnings, xlora=acting)


def _loaded(
    name: str, request: Request, model: Any, settler: Settler | None, share: Share | None
) -> LoadedModel:
    """`model` with all that a request needs to know about it."""
    checkpoint, computing = request.subject.checkpoint, request.subject.computing
    tokenizer = checkpoint.tokenizer
    on_disk = settler is not None and settler.mapped is not None
    stays = ON_DISK if on_disk else None if share is None else ELSEWHERE
    return LoadedModel(
        name=name,
        folder=checkpoint.folder,
        spec=checkpoint.spec,
        config=checkpoint.config,
        model=model,
        dtype=computing.dtype,
        end_ids=checkpoint.end_ids,
        tokenizer=tokenizer,
        chat_template=chat_template(tokenizer) if tokenizer else None,
        requantizer=Stays(name, stays) if stays else Requantizer(model, checkpoint, computing),
        placement=None if settler is None else settler.placement,
        room=request.room(settler is not None),
        here=None if share is None else share.layers,
    )


def _check_pooling(model: str | Path, xlora: bool, stages: bool) -> None:
    """Refuse what cannot go with a model that chooses its experts once for a prompt."""
    said = f"{model} chooses its experts by the mean of a prompt (gate_type mean)"
    if xlora:
        raise UnsupportedError(
            f"{said}, and an X-LoRA weighs adapters token by token; use one of them"
        )
    if stages:
        raise UnsupportedError(
            f"{said}, for which all layers must be in one process; leave out stages"
        )


def _check_freeze(xlora: str | Path | None, freeze: int | None) -> None:
    """Refuse a count of tokens that makes no sense."""
    if freeze is not None and (xlora is None or freeze < 0):
        wrong = "needs an X-LoRA" if xlora is None else "is below 0 (expected a count of tokens)"
        raise BadRequestError(f"xlora_freeze {freeze} {wrong}")


def _built(
    request: Request,
    plan: IsqPlan,
    settler: Settler | None,
    share: Share | None,
    on_progress: OnProgress | None,
) -> BuiltModel:
    """The model with its weights in place, each on its device."""
    checkpoint, computing = request.subject.checkpoint, request.subject.computing
    read = checkpoint
    if share is not None:
        read, plan = share.cut(checkpoint), share.of_plan(plan)
    resident = planned_bytes(read, plan, computing)
    kept = resident if settler is None else settler.in_memory
    reading = Reading(read, plan, resident, kept, on_progress)
    built = build(
        checkpoint.spec,
        checkpoint.config,
        checkpoint.source if settler is None else settler.source(checkpoint.source),
        computing,
        partial(apply_isq, plan),
        on_read=reading.read,
        settle=None if settler is None else settler.settle,
        is_here=everything if share is None else share.is_here,
    )
    if settler is not None:
        built.model.route = settler.route(built.model)
    return built


def _display_name(model: str | Path, files: ModelFiles) -> str:
    return str(model) if isinstance(model, str) else files.folder.name


def _compute_dtype(name: str) -> torch.dtype:
    if name not in get_args(Dtype):
        raise BadRequestError(f"dtype is {name!r} (expected {', '.join(get_args(Dtype))})")
    if name == "auto":
        return torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
