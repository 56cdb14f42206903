"""The composition root: from a name and options to a `LoadedModel`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from starquill.checkpoint.build import build
from starquill.checkpoint.files import read_json, read_json_if_there
from starquill.checkpoint.hub import ModelFiles, fetch_weights, locate
from starquill.checkpoint.source import open_source
from starquill.checkpoint.tokenizer import load_tokenizer
from starquill.checkpoint.vocabulary import check_vocabulary, end_tokens
from starquill.engine.chat import chat_template
from starquill.engine.loaded import LoadedModel
from starquill.errors import BadRequestError, UnsupportedError
from starquill.models import architecture

log = logging.getLogger("starquill")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def load(
    model: str | Path,
    *,
    dtype: Dtype = "auto",
    revision: str | None = None,
    allow_padded_vocab: bool = False,
) -> LoadedModel:
    """Load a model: `default` (the embedded one), a folder, a .safetensors file or a hub id.

    `dtype` is what is computed in; `auto` is float32, whatever the checkpoint stores.
    `allow_padded_vocab` accepts a model with more rows in its vocabulary than the tokenizer
    has ids. Raises CheckpointError or UnsupportedError, each naming all that is wrong.
    """
    files = locate(model, revision)
    raw_config = read_json(files.folder / "config.json")
    spec = architecture(raw_config)
    _refuse_quantized(raw_config)
    config = spec.read_config(raw_config)
    compute_dtype = _compute_dtype(dtype)
    tokenizer = load_tokenizer(files.folder)
    if tokenizer is not None:
        check_vocabulary(tokenizer, config.vocab_size, allow_padded_vocab)
    generation = read_json_if_there(files.folder / "generation_config.json")
    end_ids, end_warnings = end_tokens((raw_config, generation), tokenizer, config.vocab_size)
    built = build(spec, config, open_source(fetch_weights(files)), compute_dtype)
    warnings = (*built.warnings, *end_warnings)
    for warning in warnings:
        log.warning("%s: %s", files.folder, warning)
    return LoadedModel(
        name=_display_name(model, files),
        folder=files.folder,
        spec=spec,
        config=config,
        model=built.model,
        dtype=compute_dtype,
        end_ids=end_ids,
        tokenizer=tokenizer,
        chat_template=chat_template(tokenizer) if tokenizer else None,
        warnings=warnings,
    )


def _refuse_quantized(raw_config: Mapping[str, Any]) -> None:
    if raw_config.get("quantization") or raw_config.get("quantization_config"):
        raise UnsupportedError(
            "config.json says that the weights are quantized, and this version reads only dense "
            "ones; use the original checkpoint"
        )


def _display_name(model: str | Path, files: ModelFiles) -> str:
    return str(model) if isinstance(model, str) else files.folder.name


def _compute_dtype(name: str) -> torch.dtype:
    if name not in get_args(Dtype):
        raise BadRequestError(f"dtype is {name!r} (expected {', '.join(get_args(Dtype))})")
    if name == "auto":
        return torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype
