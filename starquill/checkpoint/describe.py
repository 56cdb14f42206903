"""What a model is, from its small files and the headers of its weights; no weight is read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starquill.checkpoint.build import expected_tensors, renamed, tensor_problems
from starquill.checkpoint.files import read_json, read_json_if_there
from starquill.checkpoint.hub import locate
from starquill.checkpoint.source import TensorInfo, open_headers
from starquill.checkpoint.tokenizer import load_tokenizer
from starquill.checkpoint.vocabulary import end_tokens
from starquill.models import architecture
from starquill.models.spec import ArchSpec


@dataclass(frozen=True)
class ModelFacts:
    """Counts are of parameters and bytes on disk; `head` is absent from `bytes` when tied.

    `fill_in_the_middle` is None when there is no tokenizer to tell.
    """

    name: str
    folder: str
    model_type: str
    parameters: int
    bytes: dict[str, int]
    dtypes: dict[str, int]
    quantization: str | None
    layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    sliding_window: int | None
    chat_template: bool
    special_tokens: dict[str, int]
    end_tokens: tuple[int, ...]
    fill_in_the_middle: bool | None
    warnings: tuple[str, ...]


def describe(model: str | Path, revision: str | None = None) -> ModelFacts:
    """Read the facts of a model.

    Files that cannot be read are errors, as in `starquill.load`; tensors that do not fit the
    config are told in `warnings`.
    """
    files = locate(model, revision)
    raw = read_json(files.folder / "config.json")
    spec = architecture(raw)
    config = spec.read_config(raw)
    infos = open_headers(files).infos
    tokenizer = load_tokenizer(files.folder)
    generation = read_json_if_there(files.folder / "generation_config.json")
    ends, warnings = end_tokens((raw, generation), tokenizer, config.vocab_size)
    expected = expected_tensors(spec.Model(config))
    names = renamed(spec, infos)
    if f"{spec.head}.weight" not in names:
        del expected[f"{spec.head}.weight"]
    if problems := tensor_problems(expected, names, infos):
        warnings.append(f"cannot be loaded: {problems}")
    special = {tokenizer.added[i]: i for i in sorted(tokenizer.special_ids)} if tokenizer else {}
    return ModelFacts(
        name=str(model),
        folder=str(files.folder),
        model_type=spec.model_type,
        parameters=sum(math.prod(shape) for shape in expected.values()),
        bytes=_bytes_per_part(spec, infos),
        dtypes=dict(Counter(info.dtype for info in infos.values())),
        quantization=_quantization(raw),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        sliding_window=config.sliding_window,
        chat_template=bool(tokenizer and tokenizer.config.get("chat_template")),
        special_tokens=special,
        end_tokens=tuple(sorted(ends)),
        fill_in_the_middle=None if tokenizer is None else tokenizer.fim is not None,
        warnings=tuple(warnings),
    )


def _bytes_per_part(spec: ArchSpec, infos: dict[str, TensorInfo]) -> dict[str, int]:
    parts = Counter[str]()
    for name, info in infos.items():
        parts[_part(spec, name)] += info.nbytes
    return dict(sorted(parts.items()))


def _part(spec: ArchSpec, name: str) -> str:
    if name.startswith(spec.embedding):
        return "embedding"
    if name.startswith(spec.head):
        return "head"
    if ".self_attn." in name:
        return "attention"
    if ".mlp." in name:
        return "mlp"
    return "norms" if "norm." in name else "other"


def _quantization(raw: dict[str, Any]) -> str | None:
    """One line on how the checkpoint's config says it is quantized."""
    settings = raw.get("quantization") or raw.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    method = settings.get("quant_method") or settings.get("mode") or "affine"
    return f"{method}, {settings.get('bits')} bits, group {settings.get('group_size')}"
