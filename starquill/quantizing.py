"""Quantizing a checkpoint as options say, and writing it to a new folder tensor by tensor."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from starquill.calibration import (
    Importances,
    Moments,
    cut,
    is_imatrix,
    read_imatrix,
    second_moments,
)
from starquill.checkpoint.build import compare, is_matrix, renamed
from starquill.checkpoint.files import read_text, read_texts
from starquill.checkpoint.hub import locate
from starquill.checkpoint.memory import check_memory
from starquill.checkpoint.opening import Checkpoint, open_checkpoint
from starquill.checkpoint.save import SHARD_BYTES, ShardWriter, copy_companions, new_folder
from starquill.checkpoint.source import TensorInfo
from starquill.checkpoint.vocabulary import check_vocabulary
from starquill.distilling import LENGTH, Teaching, distilled
from starquill.errors import BadRequestError, CheckpointError, UnsupportedError, listing
from starquill.isq import (
    IsqPlan,
    Organization,
    Override,
    apply_isq,
    parse_override,
    plan_isq,
    topology_overrides,
)
from starquill.placement.topology import parse_topology
from starquill.quant.schemes import Scheme
from starquill.quant.weight import Computing, PermutedWeight

log = logging.getLogger("starquill")


@dataclass(frozen=True)
class QuantOptions:
    """How to quantize: a scheme or recipe, exceptions to it, and what weights the error.

    `topology` is a file of schemes by layer; `overrides` are `REGEX=SCHEME` and come after it.
    `calibrate` is a text file or folder (its files with `suffix`) that the model is run on, or
    llama.cpp's imatrix file. `strict` refuses a width that does not fit its scheme, which else
    gets a smaller group or stays dense.

    `organization` "moqe" quantizes the experts of a mixture alone, and the rest by `trunk` if it
    is given; None takes what the topology says, or all. `distill` is text that scales and biases
    are then trained on, each layer for `steps` steps; layers that are finished are kept in
    `distilled`, so that an interrupted run goes on.
    """

    scheme: str
    overrides: tuple[str, ...] = ()
    topology: Path | None = None
    calibrate: Path | None = None
    suffix: str = ".py"
    strict: bool = False
    organization: str | None = None
    trunk: str | None = None
    distill: Path | None = None
    steps: int = 100
    seed: int = 0
    distilled: Path | None = None


@dataclass(frozen=True)
class QuantizeResult:
    """What was done: bytes on disk before and after, and the plan in one line."""

    bytes_read: int
    bytes_written: int
    summary: str


@dataclass(frozen=True)
class LoadProgress:
    """How far the reading of a checkpoint has come, in bytes, and what it will take.

    The first report has `done` 0, before anything is read. `result` is the size of the weights
    that come out, `peak` the most memory that is needed on the way; `summary` the plan to
    quantize, or empty.
    """

    done: int
    total: int
    result: int
    peak: int
    summary: str

    def sizes(self) -> str:
        return f"{self.result / 1e9:.2f} GB, {self.peak / 1e9:.2f} GB of memory on the way"


OnProgress = Callable[[LoadProgress], None]


class Reading:
    """Follows a checkpoint as it is read tensor by tensor, refusing one that cannot fit."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: IsqPlan,
        result: int,
        kept: int,
        on_progress: OnProgress | None,
    ) -> None:
        """`result` bytes of weights come out, of which at most `kept` are in memory at once."""
        self._infos = stored_infos(checkpoint)
        largest = max((info.nbytes for info in self._infos.values()), default=0)
        summary = plan.summary(self._infos) if plan.schemes else ""
        total = sum(info.nbytes for info in self._infos.values())
        self._at = LoadProgress(0, total, result, kept + largest, summary)
        self._on_progress = on_progress
        check_memory(self._at.peak, plan.schemes != {})
        self._report()

    def read(self, name: str) -> None:
        """The tensor that we call `name` has been read."""
        self._at = replace(self._at, done=self._at.done + self._infos[name].nbytes)
        self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._at)


def stored_infos(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """What is stored, by our names."""
    found = checkpoint.source.infos
    return {ours: found[name] for ours, name in renamed(checkpoint.spec, found).items()}


def plan_checkpoint(checkpoint: Checkpoint, options: QuantOptions) -> IsqPlan:
    """Plan the quantization of a whole checkpoint; runs the model if it is to be calibrated."""
    plan = _plan(checkpoint, options)
    if options.strict:
        plan.check_met()
    teaching = Teaching(options.steps, options.seed, options.distilled)
    if options.calibrate is not None:
        plan = _calibrated(checkpoint, plan, options)
    if options.distill is None:
        return plan
    texts = _texts(checkpoint, options.distill, options.suffix, LENGTH)
    return distilled(checkpoint, plan, texts, teaching)


def _plan(checkpoint: Checkpoint, options: QuantOptions) -> IsqPlan:
    infos, name = stored_infos(checkpoint), options.organization
    overrides: list[Override] = []
    if options.topology is not None:
        layers = checkpoint.config.num_hidden_layers
        text, said = read_text(options.topology), str(options.topology)
        topology = parse_topology(text, layers, said)
        overrides += topology_overrides(topology.quants)
        name = name or topology.organization
    overrides += [parse_override(text) for text in options.overrides]
    organization = Organization(name or "default", options.trunk)
    return plan_isq(
        checkpoint.spec,
        checkpoint.config,
        infos,
        options.scheme,
        overrides,
        organization=organization,
    )


def _calibrated(checkpoint: Checkpoint, plan: IsqPlan, options: QuantOptions) -> IsqPlan:
    assert options.calibrate is not None
    plan = replace(plan, schemes={n: _with_hqq(s) for n, s in plan.schemes.items()})
    found = _moments(checkpoint, plan, options.calibrate, options.suffix)
    lacking = sorted(plan.schemes.keys() - found.squares.keys() - _never_multiplied(checkpoint))
    if lacking:
        said = listing(lacking, 3)
        log.warning("%s has no activations for %s: quantized without", options.calibrate, said)
    unseen = {name: few for name, few in found.unseen.items() if name in plan.schemes}
    plan = replace(plan, importances=found.squares, products=found.products, unseen=unseen)
    if unseen:
        few = "; ".join(plan.unseen_experts())
        log.warning("%s has too few tokens for %s: quantized without", options.calibrate, few)
    return plan


def _with_hqq(scheme: Scheme) -> Scheme:
    """With activations at hand hqq is the best method at every number of bits."""
    return replace(scheme, method="hqq") if scheme.method == "auto" else scheme


def plan_warnings(checkpoint: Checkpoint, plan: IsqPlan) -> tuple[str, ...]:
    """What became of the matrices that could not have what was asked for, if there are any."""
    return (f"quantized as {plan.summary(stored_infos(checkpoint))}",) if plan.unmet else ()


def planned_bytes(checkpoint: Checkpoint, plan: IsqPlan, computing: Computing | None = None) -> int:
    """What the weights will take: in memory, or without `computing` on disk."""
    total = 0.0
    for ours, info in stored_infos(checkpoint).items():
        weights = math.prod(info.shape)
        if ours in plan.schemes:
            total += weights * plan.schemes[ours].bits_per_weight / 8
        elif computing is None or info.is_quantized:
            total += info.nbytes
        elif not is_matrix(ours, info.shape):
            total += weights * torch.float32.itemsize  # norms, and most biases
        else:
            total += info.nbytes if computing.as_stored else weights * computing.dtype.itemsize
    return round(total)


def _moments(checkpoint: Checkpoint, plan: IsqPlan, data: Path, suffix: str) -> Moments:
    head, embedding = f"{checkpoint.spec.head}.weight", f"{checkpoint.spec.embedding}.weight"
    tied = head not in stored_infos(checkpoint)
    if not data.is_dir() and is_imatrix(data):
        found = Moments(read_imatrix(data, checkpoint.spec.gguf), {})
    else:
        wanted = {n for n, scheme in plan.schemes.items() if scheme.resolved_method == "hqq"}
        if tied and embedding in wanted:
            wanted.add(head)
        texts = _texts(checkpoint, data, suffix, checkpoint.config.context_length)
        found = second_moments(checkpoint, texts, wanted)

    def ours(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A tied head is stored as the embedding, which is multiplied with as the head."""
        return {embedding if tied and n == head else n: value for n, value in values.items()}

    squares = _fitting(checkpoint, data, ours(found.squares))
    return Moments(squares, ours(found.products), found.unseen)


def _fitting(checkpoint: Checkpoint, data: Path, found: Mapping[str, Tensor]) -> Importances:
    """Those of matrices that are there, in their shape; CheckpointError if it is another."""
    infos = stored_infos(checkpoint)
    fitting = {}
    for name in found.keys() & {n for n, info in infos.items() if is_matrix(n, info.shape)}:
        *lead, _, width = infos[name].shape
        count, expected = found[name].numel(), math.prod((*lead, width))
        if count != expected:
            raise CheckpointError(
                f"{data} has {count} values for {name} (expected {expected}); it was made with "
                "another model"
            )
        fitting[name] = found[name].reshape(*lead, width)
    return fitting


def _never_multiplied(checkpoint: Checkpoint) -> set[str]:
    """The embedding of a model that has a head of its own."""
    spec = checkpoint.spec
    return (
        {f"{spec.embedding}.weight"} if f"{spec.head}.weight" in stored_infos(checkpoint) else set()
    )


def _texts(checkpoint: Checkpoint, data: Path, suffix: str, context: int) -> list[list[int]]:
    tokenizer, config = checkpoint.tokenizer, checkpoint.config
    if tokenizer is None:
        raise UnsupportedError(f"{checkpoint.folder} has no tokenizer.json to read {data} with")
    check_vocabulary(tokenizer, config.vocab_size, allow_padded=True)
    pieces = min(context, config.context_length)
    texts = cut(read_texts(data, suffix, "--calibrate-suffix"), tokenizer.encode, pieces)
    if not texts:
        raise BadRequestError(f"{data} holds no text to calibrate with")
    return texts


def quantize_checkpoint(
    model: str | Path,
    out: Path,
    options: QuantOptions,
    *,
    revision: str | None = None,
    on_progress: OnProgress | None = None,
) -> QuantizeResult:
    """Write `model` quantized to the new folder `out`, all of it or nothing.

    The layout is MLX's, so mlx-lm loads it too. Layers that were distilled stay in a hidden folder
    beside `out` until all is done.
    """
    return write_checkpoint(open_checkpoint(locate(model, revision)), out, options, on_progress)


def write_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    options: QuantOptions | None,
    on_progress: OnProgress | None = None,
) -> QuantizeResult:
    """Write what `checkpoint` holds to the new folder `out`, quantized if there are `options`."""
    spec = checkpoint.spec
    fit = compare(spec, spec.Model(checkpoint.config), checkpoint.source.infos)
    fit.check()
    infos = stored_infos(checkpoint)
    kept = out.parent / f".{out.name}.distilled"
    if options is not None and options.distill is not None and options.distilled is None:
        options = replace(options, distilled=kept)
    with new_folder(out) as folder:  # first: a name that is taken is not for the end of hours
        plan = IsqPlan({}) if options is None else plan_checkpoint(checkpoint, options)
        result = planned_bytes(checkpoint, plan)
        # What stays in memory until it is written is a shard.
        reading = Reading(checkpoint, plan, result, min(result, SHARD_BYTES), on_progress)
        writer = ShardWriter(folder)
        for ours, name in fit.names.items():
            value = apply_isq(plan, ours, checkpoint.source.read(name))
            assert not isinstance(value, PermutedWeight), "what is quantized so is refused before"
            writer.add(spec.saved(ours), value)
            reading.read(ours)
        _write_companions(checkpoint, folder)
        writer.finish(checkpoint.raw_config)
    if options is not None and options.distilled == kept:
        shutil.rmtree(kept, ignore_errors=True)
    total = sum(info.nbytes for info in infos.values())
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
