"""Quantizing a checkpoint as options say, and writing it to a new folder tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from starquill.calibration import Importances, read_imatrix, second_moments
from starquill.checkpoint.build import build, compare, renamed
from starquill.checkpoint.files import read_text
from starquill.checkpoint.hub import locate
from starquill.checkpoint.opening import Checkpoint, open_checkpoint
from starquill.checkpoint.save import ShardWriter, copy_companions, new_folder
from starquill.checkpoint.source import TensorInfo
from starquill.errors import UnsupportedError
from starquill.isq import (
    IsqPlan,
    Override,
    apply_isq,
    parse_override,
    plan_isq,
    topology_overrides,
)
from starquill.placement import read_topology
from starquill.quant.weight import PermutedWeight


@dataclass(frozen=True)
class QuantOptions:
    """How to quantize: a scheme or recipe, exceptions to it, and what weights the error.

    `topology` is a file of schemes by layer; `overrides` are `REGEX=SCHEME` and come after it.
    `calibrate` is a text file or folder that the model is run on, or llama.cpp's imatrix file.
    """

    scheme: str
    overrides: tuple[str, ...] = ()
    topology: Path | None = None
    calibrate: Path | None = None


@dataclass(frozen=True)
class QuantizeResult:
    """What was done: bytes on disk before and after, and the plan in one line."""

    bytes_read: int
    bytes_written: int
    summary: str


def _infos(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """What is stored, by our names."""
    found = checkpoint.source.infos
    return {ours: found[name] for ours, name in renamed(checkpoint.spec, found).items()}


def plan_checkpoint(checkpoint: Checkpoint, options: QuantOptions) -> IsqPlan:
    """Plan the quantization of a whole checkpoint; runs the model if it is to be calibrated."""
    infos = _infos(checkpoint)
    overrides: list[Override] = []
    if options.topology is not None:
        layers = checkpoint.config.num_hidden_layers
        text = read_text(options.topology)
        overrides += topology_overrides(read_topology(text, layers, str(options.topology)))
    overrides += [parse_override(text) for text in options.overrides]
    plan = plan_isq(checkpoint.spec, checkpoint.config, infos, options.scheme, overrides)
    if options.calibrate is None:
        return plan
    return replace(plan, importances=_importances(checkpoint, options.calibrate))


def planned_bytes(checkpoint: Checkpoint, plan: IsqPlan, itemsize: int) -> int:
    """What the weights will take in memory, dense ones in a dtype of `itemsize` bytes."""
    total = 0.0
    for ours, info in _infos(checkpoint).items():
        weights = math.prod(info.shape)
        if info.is_quantized:
            total += info.nbytes
        elif ours in plan.schemes:
            total += weights * plan.schemes[ours].bits_per_weight / 8
        else:
            total += weights * itemsize
    return round(total)


def _importances(checkpoint: Checkpoint, data: Path) -> Importances:
    if data.suffix in (".imatrix", ".dat"):
        found = read_imatrix(data, checkpoint.spec.gguf)
    else:
        tokenizer = checkpoint.tokenizer
        if tokenizer is None:
            raise UnsupportedError(f"{checkpoint.folder} has no tokenizer.json to calibrate with")
        files = sorted(data.rglob("*.py")) if data.is_dir() else [data]
        texts = (tokenizer.encode(read_text(path)) for path in files)
        built = build(checkpoint.spec, checkpoint.config, checkpoint.source, torch.float32)
        found = second_moments(built.model, checkpoint.config, texts, torch.float32)
    head, embedding = f"{checkpoint.spec.head}.weight", f"{checkpoint.spec.embedding}.weight"
    if head in found and head not in _infos(checkpoint):
        found[embedding] = found.pop(head)  # tied: it is multiplied with as the head
    return found


def quantize_checkpoint(
    model: str | Path,
    out: Path,
    options: QuantOptions,
    *,
    revision: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> QuantizeResult:
    """Write `model` quantized to the new folder `out`, all of it or nothing.

    The layout is MLX's, so mlx-lm loads it too. `on_progress` gets bytes read and their total.
    """
    checkpoint = open_checkpoint(locate(model, revision))
    spec = checkpoint.spec
    fit = compare(spec, spec.Model(checkpoint.config), checkpoint.source.infos)
    fit.check()
    infos = _infos(checkpoint)
    plan = plan_checkpoint(checkpoint, options)
    total, done = sum(info.nbytes for info in infos.values()), 0
    with new_folder(out) as folder:
        writer = ShardWriter(folder)
        for ours, name in fit.names.items():
            value = apply_isq(plan, ours, checkpoint.source.read(name))
            assert not isinstance(value, PermutedWeight), "quantized sources are refused"
            writer.add(ours, value)
            done += infos[ours].nbytes
            if on_progress is not None:
                on_progress(done, total)
        _write_companions(checkpoint, folder)
        writer.finish(checkpoint.raw_config)
    return QuantizeResult(total, writer.total_bytes, plan.summary(infos))


def _write_companions(checkpoint: Checkpoint, folder: Path) -> None:
    if checkpoint.is_folder:  # what lies beside a GGUF file belongs to something else
        copy_companions(checkpoint.folder, folder)
    tokenizer = checkpoint.tokenizer
    if tokenizer is None or (folder / "tokenizer.json").exists():
        return
    # A GGUF file has its tokenizer inside; the folder gets it as a file.
    for name, value in (
        ("tokenizer.json", tokenizer.definition),
        ("tokenizer_config.json", tokenizer.config),
    ):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
