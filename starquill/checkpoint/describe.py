"""What a model is, from its small files and the headers of its weights; no weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starquill.checkpoint.build import compare, is_matrix
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import open_checkpoint
from starquill.checkpoint.source import TensorInfo
from starquill.models.spec import ArchSpec


@dataclass(frozen=True)
class ModelFacts:
    """Counts are of parameters and bytes on disk; `head` is absent from `bytes` when tied.

    `bits` are those of a parameter on average, scales included. `resident` is what the weights
    take in memory once they are loaded as they are, without what they are computed with.
    `fill_in_the_middle` is None when there is no tokenizer to tell.
    """

    name: str
    folder: str
    model_type: str
    parameters: int
    bytes: dict[str, int]
    bits: dict[str, float]
    resident: dict[str, int]
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
    checkpoint = open_checkpoint(locate(model, revision), headers_only=True)
    spec, config, tokenizer = checkpoint.spec, checkpoint.config, checkpoint.tokenizer
    infos, warnings = checkpoint.source.infos, list(checkpoint.warnings)
    fit = compare(spec, spec.Model(config), infos)
    if fit.problems:
        warnings.append(f"cannot be loaded: {fit.problems}")
    special = {tokenizer.added[i]: i for i in sorted(tokenizer.special_ids)} if tokenizer else {}
    return ModelFacts(
        name=str(model),
        folder=str(checkpoint.folder),
        model_type=spec.model_type,
        parameters=sum(math.prod(shape) for shape in fit.expected.values()),
        bytes=_per_part(spec, infos, lambda _, info: info.nbytes),
        bits=_bits_per_part(spec, infos),
        resident=_per_part(spec, infos, _resident),
        dtypes=dict(Counter(info.dtype for info in infos.values())),
        quantization=_quantization(infos),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        sliding_window=config.sliding_window,
        chat_template=bool(tokenizer and tokenizer.config.get("chat_template")),
        special_tokens=special,
        end_tokens=tuple(sorted(checkpoint.end_ids)),
        fill_in_the_middle=None if tokenizer is None else tokenizer.fim is not None,
        warnings=tuple(warnings),
    )


def _per_part(
    spec: ArchSpec, infos: Mapping[str, TensorInfo], size: Callable[[str, TensorInfo], int]
) -> dict[str, int]:
    parts = Counter[str]()
    for name, info in infos.items():
        ours = spec.rename(name) or name
        parts[spec.part(ours)] += size(ours, info)
    return dict(sorted(parts.items()))


def _resident(name: str, info: TensorInfo) -> int:
    """As `load` keeps it: norms and biases are float32."""
    as_stored = info.is_quantized or info.dtype in ("BF16", "F16")
    return info.nbytes if as_stored and is_matrix(name, info.shape) else 4 * math.prod(info.shape)


def _bits_per_part(spec: ArchSpec, infos: Mapping[str, TensorInfo]) -> dict[str, float]:
    counts = _per_part(spec, infos, lambda _, info: math.prod(info.shape))
    sizes = _per_part(spec, infos, lambda _, info: info.nbytes)
    return {part: round(8 * sizes[part] / max(count, 1), 3) for part, count in counts.items()}


def _quantization(infos: dict[str, TensorInfo]) -> str | None:
    """One line on how the matrices are quantized, the commonest scheme first."""
    schemes = Counter(info.dtype for info in infos.values() if info.is_quantized)
    return ", ".join(f"{s} ({n} tensors)" for s, n in schemes.most_common()) or None
