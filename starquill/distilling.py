"""Training scales and biases of quantized weights, so that layers give what they gave before.

One layer at a time: the target is what the unquantized layer makes of the unquantized model's
states, the input is what the quantized layers before it make, so that a layer also learns to make
up for them. The integers stay. Some of the text is held out; a layer keeps what was best there,
which may be what it began with.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from starquill.calibration import Stream
from starquill.checkpoint.build import assign, compare
from starquill.checkpoint.opening import Checkpoint
from starquill.errors import BadRequestError
from starquill.isq import IsqPlan, apply_isq
from starquill.kernels.attention import Paged
from starquill.models.spec import ModelParts, StepBatch
from starquill.nn.cache import CacheStep, KvCache
from starquill.quant.affine import AffineWeight
from starquill.quant.bands import each_expert
from starquill.quant.weight import Computing

LENGTH = 256  # tokens of a piece of text, which is what a step learns from
_HELD_OUT = 8  # each so many-th piece
_PEAK = 0.02  # Adam's rate, in steps between levels
_LOOKS = 8  # how often the held-out text is looked at


@dataclass(frozen=True)
class Teaching:
    """How long each layer learns, and a folder for those that have: what is there is used again."""

    steps: int = 100
    seed: int = 0
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise BadRequestError(f"--steps is {self.steps} (expected at least 1)")


@dataclass(frozen=True, eq=False)
class _Piece:
    """Token ids `[1, T]` and their states `[1, T, D]` in both models; layers replace these."""

    ids: Tensor
    teacher: Tensor
    student: Tensor


def distilled(
    checkpoint: Checkpoint, plan: IsqPlan, texts: Sequence[list[int]], teaching: Teaching
) -> IsqPlan:
    """`plan` with the weights of its layers quantized and trained on `texts` (token ids).

    In memory are the states of all tokens, twice, and one layer.
    """
    spec = checkpoint.spec
    if not any(name.startswith(spec.layer_prefix) for name in plan.schemes):
        raise BadRequestError("--distill trains quantized layers, and no layer is quantized")
    if len(texts) < 2:
        raise BadRequestError(
            f"--distill has {sum(map(len, texts))} tokens of text (expected more than {LENGTH}, "
            "so that some can be held out)"
        )
    finished = _Finished.open(teaching.folder, _fingerprint(checkpoint, plan, texts, teaching))
    with torch.inference_mode(False), torch.no_grad():
        class_ = _Class(checkpoint, plan, teaching, finished)
        errors = class_.through_layers(texts)
    before, after = (sum(each) / len(errors) for each in zip(*errors, strict=True))
    note = (
        f"{len(errors)} layers distilled, mean error of their outputs on held-out text "
        f"{before:.3%} -> {after:.3%}"
    )
    return replace(plan, made=finished.read, note=note)


class _Class:
    """A model on `meta` whose layers are filled, taught and let go one after the other."""

    def __init__(
        self, checkpoint: Checkpoint, plan: IsqPlan, teaching: Teaching, finished: _Finished
    ) -> None:
        spec = checkpoint.spec
        self._plan, self._teaching, self._finished = plan, teaching, finished
        self._checkpoint = checkpoint
        self._model: Any = spec.Model(checkpoint.config).eval()
        fit = compare(spec, self._model, checkpoint.source.infos)
        fit.check()
        self._names = fit.names
        self._stream = Stream(self._model, checkpoint.source, fit.names)

    def _quantized(self, name: str) -> AffineWeight | None:
        if name not in self._plan.schemes:
            return None
        value = apply_isq(self._plan, name, self._checkpoint.source.read(self._names[name]))
        assert isinstance(value, AffineWeight)
        return value.computing(torch.float32, exact=True)

    def through_layers(self, texts: Sequence[list[int]]) -> list[tuple[float, float]]:
        """The errors of each quantized layer before and after."""
        spec, stream = self._checkpoint.spec, self._stream
        layers = self._checkpoint.config.num_hidden_layers
        inside = stream.below(spec.layer_prefix, spec.embedding, spec.head)
        errors = []
        with stream.filled([name for name in self._names if name not in set(inside)]):
            pieces = self._embedded([torch.tensor([text]) for text in texts])
            for number in range(layers):
                path = f"{spec.layer_prefix}{number}"
                with stream.filled(stream.below(f"{path}.")):
                    found = self._through_layer(number, path, pieces)
                errors += [found] if found is not None else []
        return errors

    def _embedded(self, ids: Sequence[Tensor]) -> list[_Piece]:
        parts: ModelParts = self._model
        name = f"{self._checkpoint.spec.embedding}.weight"
        with self._stream.filled(self._stream.below(f"{self._checkpoint.spec.embedding}.")):
            teacher = [parts.embed(each) for each in ids]
            if (weight := self._quantized(name)) is None:
                student = [x.clone() for x in teacher]
            else:
                assign(self._model, name, weight, Computing())
                student = [parts.embed(each) for each in ids]
        return [_Piece(*each) for each in zip(ids, teacher, student, strict=True)]

    def _through_layer(
        self, number: int, path: str, pieces: Sequence[_Piece]
    ) -> tuple[float, float] | None:
        layer = self._model.get_submodule(path)
        run = _Runner(self._model, layer, self._checkpoint.config.sliding_window)
        for piece in pieces:
            piece.teacher.copy_(run(piece.ids, piece.teacher))
        names = [n for n in self._plan.schemes if n.startswith(f"{path}.")]
        errors = None
        if names:
            done = self._finished.layer(number, names)
            if done is None:
                done = self._taught(number, names, run, pieces)
                self._finished.keep(number, done)
            done.put(self._model)
            errors = done.errors
        for piece in pieces:
            piece.student.copy_(run(piece.ids, piece.student))
        return errors

    def _taught(
        self, number: int, names: Sequence[str], run: _Runner, pieces: Sequence[_Piece]
    ) -> _Done:
        weights = {name: weight for name in names if (weight := self._quantized(name)) is not None}
        student = _Student(self._model, weights)
        held = pieces[::_HELD_OUT]
        others = [piece for index, piece in enumerate(pieces) if index % _HELD_OUT]
        rng = random.Random(f"{self._teaching.seed}/{number}")
        return student.learn(self._teaching.steps, run, held, _endlessly(others, rng))


def _endlessly(pieces: Sequence[_Piece], rng: random.Random) -> Iterator[_Piece]:
    """All in random order, again and again."""
    while True:
        yield from rng.sample(pieces, len(pieces))


@dataclass(frozen=True)
class _Runner:
    """A layer applied to whole texts, in operations that have gradients."""

    parts: ModelParts
    layer: nn.Module
    window: int | None

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        length = ids.shape[1]
        cache = cast(KvCache, _NoCache(self.window))
        positions, nothing = torch.arange(length)[None], torch.zeros(1, 1, dtype=torch.int64)
        step = self.parts.step(StepBatch(ids, positions, nothing, torch.tensor([length]), cache))
        made: Tensor = self.layer(x, step)
        return made

    def error(self, pieces: Sequence[_Piece]) -> float:
        """Squared distance from the teacher as a share of its states' squares."""
        off = sum(float((self(p.ids, p.student) - p.teacher).square().sum()) for p in pieces)
        return off / max(sum(float(p.teacher.square().sum()) for p in pieces), 1e-30)


@dataclass(frozen=True)
class _NoCache:
    """Stands in for a cache where a text is seen whole: keys and values keep their gradients."""

    window: int | None

    def plan(self, tables: Tensor, positions: Tensor, _: int = 0) -> CacheStep:
        paged = Paged(tables, positions[:, 0], self.window)
        distance = positions[:, :, None] - positions[:, None, :]
        if self.window is None or positions.shape[1] <= self.window:
            return CacheStep(paged, native=False, causal=True)
        hidden = (distance < 0) | (distance >= self.window)
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None]
        return CacheStep(paged, native=False, mask=mask)

    def update(self, _: int, keys: Tensor, values: Tensor, __: CacheStep) -> tuple[Tensor, Tensor]:
        return keys, values


@dataclass(frozen=True, eq=False)
class _Done:
    """A layer's weights by name, and its errors before and after it was taught."""

    weights: Mapping[str, AffineWeight]
    errors: tuple[float, float]

    def put(self, model: nn.Module) -> None:
        for name, weight in self.weights.items():
            assign(model, name, weight, Computing(exact=True))


class _Learning:
    """A quantized weight whose scales and biases are trained, its integers as they are.

    What is trained is how far they move, in steps between levels: that is alike for all weights.
    """

    def __init__(self, start: AffineWeight) -> None:
        self.start, self.shape = start, start.shape
        self._q = start.integers().unflatten(-1, (-1, start.group))
        self._scales, self._biases = start.scales.float(), start.biases.float()
        self._unit = self._scales.abs()
        self._top = 2**start.bits - 1
        self.moved = [nn.Parameter(torch.zeros_like(self._scales)) for _ in range(2)]

    def _fit(self) -> tuple[Tensor, Tensor]:
        by_scale, by_bias = self.moved
        return (
            self._scales + by_scale * self._unit / self._top,
            self._biases + by_bias * self._unit,
        )

    def stored(self) -> AffineWeight:
        """As it is now, in the types that it is stored in."""
        parts = []
        for now, then in zip(self._fit(), (self.start.scales, self.start.biases), strict=True):
            most = torch.finfo(then.dtype).max
            parts.append(now.detach().clamp(-most, most).to(then.dtype))
        return replace(self.start, scales=parts[0], biases=parts[1])

    def matmul(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        scales, biases = self._fit()
        weight = self._q * scales[..., None] + biases[..., None]
        return F.linear(x, weight.flatten(-2), bias)

    def matmul_grouped(self, x: Tensor, counts: Tensor, *, one: bool = False) -> Tensor:  # noqa: ARG002
        scales, biases = self._fit()

        def product(expert: int, rows: Tensor) -> Tensor:
            weight = self._q[expert] * scales[expert][..., None] + biases[expert][..., None]
            return F.linear(rows, weight.flatten(-2))

        return each_expert(x, counts, self.shape[1], product)


class _Student:
    """A layer with weights that learn."""

    def __init__(self, model: nn.Module, weights: Mapping[str, AffineWeight]) -> None:
        self._model = model
        self._learning = {name: _Learning(weight) for name, weight in weights.items()}

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """With gradients, and the weights that have them in place."""
        for name, weight in self._learning.items():
            self._model.get_submodule(name.removesuffix(".weight")).weight = weight  # type: ignore[assignment]
        with torch.enable_grad():
            yield

    def learn(
        self, steps: int, run: _Runner, held: Sequence[_Piece], pieces: Iterator[_Piece]
    ) -> _Done:
        """The best on `held`, looked at now and then, of what `steps` of Adam lead through."""
        best = _Done({name: w.start for name, w in self._learning.items()}, (0.0, 0.0))
        best.put(self._model)
        before = least = run.error(held)
        moved = [p for weight in self._learning.values() for p in weight.moved]
        optimizer = torch.optim.Adam(moved, betas=(0.9, 0.99))
        size = max(sum(float(p.teacher.square().mean()) for p in held) / len(held), 1e-30)
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = _PEAK * (1 - (step - 1) / steps)
            piece = next(pieces)
            with self._at_work():
                off = run(piece.ids, piece.student) - piece.teacher
                (off.square().mean() / size).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % max(1, steps // _LOOKS) == 0 or step == steps:
                now = _Done({n: w.stored() for n, w in self._learning.items()}, (0.0, 0.0))
                now.put(self._model)
                error = run.error(held)
                if error < least:  # False for NaN
                    best, least = now, error
        return replace(best, errors=(before, least))


def _fingerprint(
    checkpoint: Checkpoint, plan: IsqPlan, texts: Sequence[list[int]], teaching: Teaching
) -> str:
    """What a finished layer depends on: with any of it changed, it is trained again."""
    told = [
        str(checkpoint.folder.resolve()),
        {name: (info.dtype, info.shape) for name, info in checkpoint.source.infos.items()},
        {name: f"{s} {s.resolved_method}" for name, s in plan.schemes.items()},
        {name: float(values.sum()) for name, values in plan.importances.items()},
        [teaching.steps, teaching.seed],
        list(texts),
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class _Finished:
    """A folder with one file for each layer that was taught; a scratch folder vanishes with it."""

    folder: Path
    fingerprint: str
    scratch: tempfile.TemporaryDirectory[str] | None = None
    _of: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path | None, fingerprint: str) -> _Finished:
        if folder is None:
            scratch = tempfile.TemporaryDirectory(prefix="starquill-distilled-")
            return cls(Path(scratch.name), fingerprint, scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, fingerprint)

    def _path(self, number: int) -> Path:
        return self.folder / f"layer-{number:05d}.safetensors"

    def keep(self, number: int, done: _Done) -> None:
        """Write a layer; the file is there whole or not at all."""
        tensors: dict[str, Tensor] = {}
        packings = {}
        for name, weight in done.weights.items():
            packings[name] = (weight.bits, weight.group)
            tensors |= {f"{name}.{part}": getattr(weight, part).contiguous() for part in _PARTS}
            self._of[name] = self._path(number)
        about = {
            "fingerprint": self.fingerprint,
            "packings": json.dumps(packings),
            "errors": json.dumps(done.errors),
        }
        part = self._path(number).with_suffix(".part")
        save_file(tensors, part, metadata=about)
        part.replace(self._path(number))

    def layer(self, number: int, names: Sequence[str]) -> _Done | None:
        """A layer that was finished before, with this fingerprint; None if there is none."""
        try:
            with safe_open(self._path(number), "pt") as file:
                about = file.metadata() or {}
                if about.get("fingerprint") != self.fingerprint:
                    return None
                packings = json.loads(about["packings"])
                weights = {name: _weight(file.get_tensor, name, packings[name]) for name in names}
                before, after = json.loads(about["errors"])
        except (OSError, SafetensorError, ValueError, KeyError):
            return None  # not there, or not whole: it is trained again
        self._of.update(dict.fromkeys(names, self._path(number)))
        return _Done(weights, (before, after))

    def read(self, name: str) -> AffineWeight | None:
        """A finished weight."""
        if name not in self._of:
            return None
        with safe_open(self._of[name], "pt") as file:
            packings = json.loads(file.metadata()["packings"])
            return _weight(file.get_tensor, name, packings[name])


_PARTS = ("packed", "scales", "biases")


def _weight(read: Callable[[str], Tensor], name: str, packing: Sequence[int]) -> AffineWeight:
    packed, scales, biases = (read(f"{name}.{part}") for part in _PARTS)
    bits, group = packing
    return AffineWeight(packed, scales, biases, bits, group)
