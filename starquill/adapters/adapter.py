"""`Adapter`: what an adapter's files hold, and the base model that they are held against."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from starquill.checkpoint.files import read_json
from starquill.checkpoint.source import SafetensorsSource, read_header
from starquill.checkpoint.stacked import piece_name
from starquill.errors import AdapterError, CheckpointError, UnsupportedError, listing
from starquill.kernels.native import is_finite
from starquill.models.spec import ArchSpec
from starquill.nn.experts import DeltaLinear, ExpertLinear, GatedExperts, OneExpert, PlainExperts
from starquill.nn.linear import Embedding, Linear
from starquill.nn.norm import LayerNorm, RMSNorm
from starquill.quant.weight import tensors_of

Product = Linear | Embedding | OneExpert  # what A and B may act on
Norm = LayerNorm | RMSNorm
CONFIG, PEFT_FILE, MLX_FILE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapters.safetensors",
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class AdapterPart:
    """What an adapter holds for one module.

    `a` `[R, in]`, `b` `[out, R]`; for an embedding `[R, V]` and `[D, R]`. DoRA's `magnitude` is
    `[out]`, or `[D]`. `b_bias` `[out]` is scaled as B is; `weight` and `bias` stand in for the
    module's own, which may be a norm's `[D]`. `base_weight` is a copy of the module's that came
    along.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    magnitude: Tensor | None = None
    b_bias: Tensor | None = None
    bias: Tensor | None = None
    weight: Tensor | None = None
    base_weight: Tensor | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], scale: float = 1.0) -> AdapterPart:
        """With `tensors` by the names of the fields."""
        return cls(scale=scale, **tensors)

    @property
    def tensors(self) -> dict[str, Tensor]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter that fits its base model. `form` is whose files they were: PEFT or MLX."""

    name: str
    form: str
    parts: Mapping[str, AdapterPart]
    warnings: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The highest."""
        ranks = [part.a.shape[0] for part in self.parts.values() if part.a is not None]
        return max(ranks, default=0)

    @property
    def nbytes(self) -> int:
        tensors = (t for part in self.parts.values() for t in part.tensors.values())
        # Two stacks that are one in the file share their A.
        own = {(t.data_ptr(), t.shape): t.numel() * t.element_size() for t in tensors}
        return sum(own.values())


class AwayLayers(Protocol):
    """Layers of a model that another process has, and their adapters."""

    @property
    def layers(self) -> range: ...

    def fill(self, slot: int, parts: Mapping[str, AdapterPart]) -> None:
        """Put `parts`, those of these layers by path, into a slot that nobody uses yet.

        Raises AdapterError for what does not fit, and StageLostError.
        """
        ...

    def empty(self, slot: int) -> None:
        """Take away what a slot has, if anything. Raises StageLostError."""
        ...


class Base(Protocol):
    """A loaded model."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> ArchSpec: ...

    @property
    def model(self) -> Any: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, eq=False)
class BaseModules:
    """The modules of a model that adapters may act on, by path in the model's order.

    `stacks` are the experts of mixtures, of which each may have a part of its own: see `singles`.
    """

    name: str
    spec: ArchSpec
    modules: Mapping[str, Linear | Embedding]
    stacks: Mapping[str, ExpertLinear]
    norms: Mapping[str, Norm]
    dtype: torch.dtype

    @classmethod
    def of(cls, base: Base) -> BaseModules:
        model: nn.Module = base.model
        found = dict(model.named_modules())
        for path in [p for p, m in found.items() if isinstance(m, DeltaLinear)]:
            del found[f"{path}.base"]  # all experts share it, and no adapter is given to it
        mixtures = {
            f"{path}.{name}"
            for path, module in found.items()
            if isinstance(module, GatedExperts | PlainExperts)
            for name, _ in module.named_children()
        }
        return cls(
            base.name,
            base.spec,
            {p: m for p, m in found.items() if isinstance(m, Linear | Embedding)},
            {p: m for p, m in found.items() if isinstance(m, ExpertLinear) and p in mixtures},
            {p: m for p, m in found.items() if isinstance(m, Norm)},
            base.dtype,
        )

    @cached_property
    def singles(self) -> Mapping[str, OneExpert]:
        """Every expert's `Linear`s, by the path that it has where experts are stored one by one."""
        return {
            piece_name(path, expert): OneExpert(stack, expert)
            for path, stack in self.stacks.items()
            for expert in range(stack.weight.shape[0])
        }

    @cached_property
    def products(self) -> Mapping[str, Product]:
        """`modules`, and then `singles`."""
        return {**self.modules, **self.singles}

    def is_here(self, path: str) -> bool:
        """Whether this process has the module's weight; of others it knows the shape."""
        if path in self.norms:
            return not self.norms[path].weight.is_meta
        return not next(tensors_of(self.products[path].weight)).is_meta

    @property
    def tied(self) -> bool:
        head, embedding = self.modules[self.spec.head], self.modules[self.spec.embedding]
        return head.weight is embedding.weight

    @property
    def layers(self) -> int:
        return len({n for n in map(self.layer_of, self.modules) if n is not None})

    def layer_of(self, path: str) -> int | None:
        match = re.match(re.escape(self.spec.layer_prefix) + r"(\d+)\.", path)
        return int(match[1]) if match else None


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def read_config(folder: Path) -> dict[str, Any]:
    """`adapter_config.json`, or one line that says what was expected where."""
    if not folder.is_dir():
        raise AdapterError(f"no adapter at {folder}: expected a folder with {CONFIG}")
    if not (folder / CONFIG).exists():
        found = [name for name in (PEFT_FILE, MLX_FILE) if (folder / name).exists()]
        beside = f" beside {found[0]}" if found else ""
        raise AdapterError(
            f"{folder} has no {CONFIG}{beside}: PEFT's has peft_type in it and lies beside "
            f"{PEFT_FILE}, MLX's has lora_parameters and lies beside {MLX_FILE}"
        )
    try:
        return read_json(folder / CONFIG)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one safetensors file."""
    try:
        header = read_header(path)
        source = SafetensorsSource(dict.fromkeys(header, path), {path: header})
        return {name: source.read(name) for name in header}
    except CheckpointError as error:
        raise AdapterError(str(error)) from None


def bias_of(norm: Norm) -> Tensor | None:
    return norm.bias if isinstance(norm, LayerNorm) else None


def without_unchanged(
    parts: Mapping[str, AdapterPart], base: BaseModules
) -> dict[str, AdapterPart]:
    """Without norms that came along as the model has them."""

    def changes(path: str, part: AdapterPart) -> bool:
        norm = base.norms.get(path)
        if norm is None or not base.is_here(path):
            return True
        pairs = ((part.weight, norm.weight), (part.bias, bias_of(norm)))
        return any(
            new is not None and own is not None and not torch.equal(new.float(), own.data.cpu())
            for new, own in pairs
        )

    return {path: part for path, part in parts.items() if changes(path, part)}


class Problems:
    """What is wrong with an adapter, told all at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[str] = []
        self.unsupported: list[str] = []
        self.warnings: list[str] = []

    def add(self, problem: str) -> None:
        self.found.append(problem)

    def require(self, holds: bool, problem: str) -> None:
        if not holds:
            self.found.append(problem)

    def finish(self) -> None:
        """Raise what was found: faults first, then what starquill does not implement."""
        if self.found:
            raise AdapterError(f"{self.folder} does not fit: {'; '.join(_limited(self.found))}")
        if self.unsupported:
            raise UnsupportedError(f"{self.folder} asks for {listing(self.unsupported)}")


def _limited(items: Sequence[str], most: int = 20) -> list[str]:
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return [*items[:most], *more]


def unknown_modules(paths: Sequence[str], base: BaseModules, problems: Problems) -> None:
    """Note tensors that belong to no module of the model."""
    mixture = base.spec.experts is not None
    # A LoRA's delta of a shared MLP is no `Linear` of an expert's own.
    if mixture and not base.stacks and (found := sorted(p for p in paths if _EXPERT.search(p))):
        problems.unsupported.append(
            f"adapters on single experts, which this mixture has as deltas ({listing(found, 4)})"
        )
        paths = [path for path in paths if path not in found]
    if paths:
        problems.add(
            f"{base.name} has no module for {listing(sorted(paths), 8)} (its last layer is "
            f"{base.layers - 1}; in a layer it has {', '.join(_kinds(base))})"
        )


def _kinds(base: BaseModules) -> list[str]:
    names = {path.rpartition(".")[2]: None for path in base.modules if base.layer_of(path) == 0}
    stacks = {path.rpartition(".")[2]: None for path in base.stacks}
    return [*names, *(f"experts.N.{name}" for name in stacks)]


def check_part(path: str, part: AdapterPart, base: BaseModules, problems: Problems) -> None:
    """Hold one part's tensors against each other and against the module."""
    if path in base.norms:
        _check_norm(path, part, base, problems)
        return
    module = base.products[path]
    outputs, inputs = module.weight.shape
    is_rows = isinstance(module, Embedding)
    if is_rows:
        outputs, inputs = inputs, outputs
    rank = part.a.shape[0] if part.a is not None and part.a.dim() == 2 else None
    problems.require(part.a is None or part.b is not None, f"{path} has A and no B")
    problems.require(part.b is None or part.a is not None, f"{path} has B and no A")
    problems.require(
        part.magnitude is None or part.a is not None, f"{path} has a magnitude and no A and B"
    )
    if rank is None and part.a is None and part.b is not None and part.b.dim() == 2:
        rank = part.b.shape[1]
    own = (inputs, outputs) if is_rows else (outputs, inputs)
    expected = {
        "a": (rank, inputs),
        "b": (outputs, rank),
        "weight": own,
        "base_weight": own,
        **dict.fromkeys(("magnitude", "b_bias", "bias"), (outputs,)),
    }
    for name, tensor in part.tensors.items():
        shape = [n for n in expected[name] if n is not None]
        check_tensor(
            f"{path}: {_LONG.get(name, name)}",
            tensor,
            (shape, f"{shape} for {base.name}'s weight {list(own)}"),
            problems,
        )
    has_bias = not isinstance(module, Embedding) and module.bias is not None
    problems.require(part.bias is None or has_bias, f"{path} has a bias, and the model's has none")


def check_tensor(
    what: str, tensor: Tensor, expected: tuple[Sequence[int], str], problems: Problems
) -> None:
    """Shape, type and values; `expected` is the shape, and how the user is told of it."""
    shape, said = expected
    problems.require(
        list(tensor.shape) == list(shape), f"{what} is {list(tensor.shape)} (expected {said})"
    )
    if tensor.dtype not in _FLOATS:
        problems.add(f"{what} is {tensor.dtype} (expected a 16 or 32 bit float)")
    elif tensor.numel() and not is_finite(tensor):
        problems.add(f"{what} has values that are not finite: the file is damaged")


def _check_norm(path: str, part: AdapterPart, base: BaseModules, problems: Problems) -> None:
    own = list(base.norms[path].weight.shape)
    for name, tensor in part.tensors.items():
        if name not in ("weight", "bias"):
            problems.add(f"{path}, a norm, has {_LONG.get(name, name)} (expected weight or bias)")
            continue
        check_tensor(f"{path}.{name}", tensor, (own, f"{own}"), problems)
    has_bias = bias_of(base.norms[path]) is not None
    problems.require(part.bias is None or has_bias, f"{path} has a bias, and the model's has none")


_LONG = {"a": "A", "b": "B", "b_bias": "B's bias", "base_weight": "the base's weight"}


def check_base_weight(path: str, part: AdapterPart, base: BaseModules, problems: Problems) -> None:
    """A copy of the base's weight that came along must be the model's, but for its rounding."""
    if part.base_weight is None or path in base.norms:
        return
    own = base.products[path].weight
    if part.base_weight.shape != own.shape:
        return
    if not base.is_here(path):
        return  # who has it compares it
    dense = own.scheme in ("float32", "float16", "bfloat16")
    off = torch.linalg.norm(own.dequantize().cpu().float() - part.base_weight.float())
    size = torch.linalg.norm(part.base_weight.float())
    problems.require(
        bool(off <= (2**-7 if dense else 0.5) * size),
        f"{path}: the base's weight that came with the adapter is not {base.name}'s; it was "
        "trained on another model",
    )
