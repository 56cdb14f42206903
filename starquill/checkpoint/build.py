"""Put a checkpoint's tensors into a model, one at a time, or say all that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from starquill.checkpoint.source import Stored, TensorInfo, WeightSource
from starquill.checkpoint.stacked import piece_name, piece_of
from starquill.errors import CheckpointError, NumericsError, listing
from starquill.kernels.native import is_finite
from starquill.models.spec import ArchSpec, ModelConfig
from starquill.nn.experts import ExpertLinear
from starquill.nn.linear import Embedding, Linear
from starquill.quant.affine import AffineWeight
from starquill.quant.weight import (
    Computing,
    DenseWeight,
    PermutedWeight,
    Weight,
    moved,
    tensors_of,
)

TWO_BYTES = (torch.bfloat16, torch.float16)
_READABLE = ("BF16", "F16", "F32")
_HOLDERS = Linear | Embedding | ExpertLinear  # what has a `Weight`

Prepare = Callable[[str, Stored], Stored]
Settle = Callable[[nn.Module, str], None]
IsHere = Callable[[str], bool]


def as_read(_: str, value: Stored) -> Stored:
    """The `prepare` that changes nothing."""
    return value


def everything(_: str) -> bool:
    """The `is_here` of a model that this process has whole."""
    return True


@dataclass(frozen=True)
class BuiltModel:
    """A model with every tensor in place, and what the user should know about it."""

    model: Any
    warnings: tuple[str, ...]


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a `Weight`, or a stack of them: the biases of experts are not."""
    return len(shape) > 1 and name.endswith(".weight")


def expected_tensors(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Every tensor that `model` is made of, by its name in a checkpoint, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        if isinstance(module, _HOLDERS):
            shapes[f"{path}.weight"] = module.weight.shape
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            shapes[name] = tuple(parameter.shape)
    return shapes


def build(
    spec: ArchSpec,
    config: ModelConfig,
    source: WeightSource,
    computing: Computing,
    prepare: Prepare = as_read,
    *,
    on_read: Callable[[str], None] | None = None,
    settle: Settle | None = None,
    is_here: IsHere = everything,
) -> BuiltModel:
    """Build the model of `config` and fill it from `source`.

    `prepare` may quantize a tensor on its way: it gets our name and what was read; `settle` puts
    it on its device; `on_read` is told each name. What is not `is_here` by our name stays a shape
    without memory. Norm parameters are float32 whatever `computing` says. Raises CheckpointError
    with every missing, unexpected and misshapen tensor at once, before any weight is read.
    """
    model = spec.Model(config)
    fit = compare(spec, model, source.infos, is_here)
    fit.check()
    names = fit.names
    head, embedding = f"{spec.head}.weight", f"{spec.embedding}.weight"
    warnings = list(_head_warnings(config, head in names, head)) if is_here(head) else []
    for ours, theirs in names.items():
        assign(model, ours, prepare(ours, source.read(theirs)), computing)
        if settle is not None:
            settle(model, ours)
        if on_read is not None:
            on_read(ours)
    stored = head in renamed(spec, source.infos)
    own_head = stored and not (is_here(head) and _same_tensor(model, spec))
    if own_head and is_here(head) and config.tie_word_embeddings is not False:
        said = "is true" if config.tie_word_embeddings else "is not in config.json"
        warnings.append(
            f"tie_word_embeddings {said}, but {head} differs from {embedding}: using {head}"
        )
    if not own_head:
        tie(model, spec)
    _check_nothing_on_meta(model, is_here)
    return BuiltModel(model.eval(), tuple(warnings))


@dataclass(frozen=True)
class Fit:
    """A model's tensors beside those that were found.

    `expected` has their shapes, without the head where it is tied; `names` maps our names to
    those found; `problems` is one line, empty if there are none.
    """

    expected: dict[str, tuple[int, ...]]
    names: dict[str, str]
    problems: str

    def check(self) -> None:
        if self.problems:
            raise CheckpointError(f"the weights do not fit config.json: {self.problems}")


def compare(
    spec: ArchSpec,
    model: nn.Module,
    found: Mapping[str, TensorInfo],
    is_here: IsHere = everything,
) -> Fit:
    """Hold the tensors that were `found` against those that `model` is made of; those here."""
    expected, names = expected_tensors(model), renamed(spec, found)
    if f"{spec.head}.weight" not in names:
        del expected[f"{spec.head}.weight"]
    expected = {name: shape for name, shape in expected.items() if is_here(name)}
    names = {ours: theirs for ours, theirs in names.items() if is_here(ours)}
    return Fit(expected, names, _problems(_one_by_one(expected, names), names, found))


def _one_by_one(
    expected: Mapping[str, tuple[int, ...]], names: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """`expected`, but experts that were found one by one are expected so.

    What is found so is not whole, or else it would have been found as a stack.
    """
    broken = {piece[0] for name in names if (piece := piece_of(name))}
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in expected.items():
        if name in broken and name not in names:
            found |= {piece_name(name, e): shape[1:] for e in range(shape[0])}
        else:
            found[name] = shape
    return found


def renamed(spec: ArchSpec, found: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Our name -> the checkpoint's name."""
    names: dict[str, str] = {}
    for theirs in found:
        ours = spec.rename(theirs)
        if ours is None:
            continue
        if ours in names:
            raise CheckpointError(f"tensors {names[ours]} and {theirs} both stand for {ours}")
        names[ours] = theirs
    return names


def _head_warnings(config: ModelConfig, has_head: bool, head: str) -> Iterator[str]:
    if config.tie_word_embeddings is False and not has_head:
        yield (
            f"tie_word_embeddings is false, but the checkpoint has no {head}: "
            "using the embedding as the head"
        )


def _problems(
    expected: dict[str, tuple[int, ...]], names: dict[str, str], found: Mapping[str, TensorInfo]
) -> str:
    problems = []
    if missing := sorted(expected.keys() - names.keys()):
        problems.append(f"missing tensors: {listing(missing)}")
    if unexpected := sorted(names[name] for name in names.keys() - expected.keys()):
        problems.append(f"unexpected tensors: {listing(unexpected)}")
    infos = {ours: found[theirs] for ours, theirs in names.items() if ours in expected}
    wrong = [
        f"{name} {list(info.shape)} (expected {list(expected[name])})"
        for name, info in sorted(infos.items())
        if info.shape != expected[name]
    ]
    if wrong:
        problems.append(f"wrong shapes: {listing(wrong)}")
    if not problems and (mixed := _mixed(infos)):
        problems.append(f"experts of one layer are of different types: {listing(mixed)}")
    matrices = {name for name, shape in expected.items() if is_matrix(name, shape)}
    odd = [
        f"{name} {i.dtype}"
        for name, i in sorted(infos.items())
        if i.dtype not in _READABLE and not (i.is_quantized and name in matrices)
    ]
    if odd:
        problems.append(f"unreadable dtypes: {listing(odd)} (expected {', '.join(_READABLE)})")
    return "; ".join(problems)


def _mixed(infos: Mapping[str, TensorInfo]) -> list[str]:
    """Stacks that are there expert by expert, and nothing but their types keeps apart."""
    types: dict[str, set[str]] = {}
    for name, info in infos.items():
        if piece := piece_of(name):
            types.setdefault(piece[0], set()).add(info.dtype)
    return [f"{stack} {' and '.join(sorted(found))}" for stack, found in sorted(types.items())]


def assign(model: nn.Module, name: str, value: Stored, computing: Computing) -> None:
    """Put one tensor in its place, as `computing` wants it; it must be finite."""
    dtype = computing.dtype
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, _HOLDERS) and attribute == "weight":
        if isinstance(value, Tensor):
            kept = value.dtype if computing.as_stored and value.dtype in TWO_BYTES else dtype
            weight: Weight = DenseWeight(_convert(value, name, kept), dtype)
        else:
            affine = value.inner if isinstance(value, PermutedWeight) else value
            _check_finite(affine.scales, name)
            _check_finite(affine.biases, name)
            weight = value.computing(dtype, computing.exact)
        # In place of another it goes where that one is.
        device = next((str(tensor.device) for tensor in tensors_of(module.weight)), "cpu")
        module.weight = weight if device in ("meta", "cpu") else moved(weight, device)
        return
    assert isinstance(value, Tensor), f"{name} cannot be quantized"
    # Norms are computed in float32, so their parameters are kept in it.
    wanted = dtype if isinstance(module, Linear | ExpertLinear) else torch.float32
    setattr(module, attribute, nn.Parameter(_convert(value, name, wanted), requires_grad=False))


def _convert(tensor: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    _check_finite(tensor, name)
    converted = tensor.to(dtype)
    if tensor.dtype != dtype and dtype != torch.float32 and not is_finite(converted):
        kind = str(dtype).removeprefix("torch.")
        raise NumericsError(f"{name} has values that {kind} cannot hold; use --dtype float32")
    return converted


def _check_finite(tensor: Tensor, name: str) -> None:
    if not is_finite(tensor):
        raise CheckpointError(f"{name} has values that are not finite: the file is damaged")


def _same_tensor(model: nn.Module, spec: ArchSpec) -> bool:
    """Whether head and embedding are stored alike, to the bit: writes out neither."""
    head, embedding = weight_of(model, spec.head), weight_of(model, spec.embedding)
    pairs: tuple[tuple[Tensor, Tensor], ...]
    if isinstance(head, DenseWeight) and isinstance(embedding, DenseWeight):
        pairs = ((head.data, embedding.data),)
    elif isinstance(head, AffineWeight) and isinstance(embedding, AffineWeight):
        if head.scheme != embedding.scheme:
            return False
        pairs = (
            (head.packed, embedding.packed),
            (head.scales, embedding.scales),
            (head.biases, embedding.biases),
        )
    else:
        return False
    return all(
        one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
        for one, other in pairs
    )


def tie(model: nn.Module, spec: ArchSpec) -> None:
    """Let the head multiply with the embedding, as it is now."""
    head = model.get_submodule(spec.head)
    assert isinstance(head, Linear)
    head.weight = weight_of(model, spec.embedding)


def weight_of(model: nn.Module, path: str) -> Weight:
    """The weight of the `Linear` or `Embedding` at `path`."""
    module = model.get_submodule(path)
    assert isinstance(module, _HOLDERS)
    return module.weight


def _check_nothing_on_meta(model: nn.Module, is_here: IsHere) -> None:
    for path, module in model.named_modules():
        if not is_here(f"{path}."):
            continue
        for name, tensor in module.named_parameters(recurse=False):
            assert not tensor.is_meta, f"{path}.{name} was never loaded"
        for name, tensor in module.named_buffers(recurse=False):
            assert not tensor.is_meta, f"{path}.{name} was never filled"
        if isinstance(module, _HOLDERS):
            for tensor in tensors_of(module.weight):
                assert not tensor.is_meta, f"{path}.weight was never loaded"
