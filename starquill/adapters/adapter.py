"""`Adapter`: what an adapter's files hold, and the base model that they are held against."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from starquill.checkpoint.build import weight_of
from starquill.checkpoint.files import read_json
from starquill.checkpoint.source import SafetensorsSource, read_header
from starquill.errors import AdapterError, CheckpointError, UnsupportedError, listing
from starquill.kernels.native import is_finite
from starquill.models.spec import ArchSpec
from starquill.nn.linear import Embedding, Linear
from starquill.quant.weight import tensors_of

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
    module's own. `base_weight` is a copy of the module's that came along.
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
        return sum(t.numel() * t.element_size() for t in tensors)


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

    `others` are the parameters that adapters cannot change: those of norms.
    """

    name: str
    spec: ArchSpec
    modules: Mapping[str, Linear | Embedding]
    others: Mapping[str, Tensor]
    dtype: torch.dtype

    @classmethod
    def of(cls, base: Base) -> BaseModules:
        model: nn.Module = base.model
        modules = {
            path: module
            for path, module in model.named_modules()
            if isinstance(module, Linear | Embedding)
        }
        others = {
            name: value
            for name, value in model.named_parameters()
            if name.rpartition(".")[0] not in modules
        }
        return cls(base.name, base.spec, modules, others, base.dtype)

    def is_here(self, path: str) -> bool:
        """Whether this process has the module's weight; of others it knows the shape."""
        return not next(tensors_of(self.modules[path].weight)).is_meta

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
    if experts := sorted(p for p in paths if base.spec.experts and _EXPERT.search(p)):
        problems.unsupported.append(f"adapters on single experts ({listing(experts, 4)})")
    if paths := [path for path in paths if path not in experts]:
        problems.add(
            f"{base.name} has no module for {listing(sorted(paths), 8)} (its last layer is "
            f"{base.layers - 1}; in a layer it has {', '.join(_kinds(base))})"
        )


def _kinds(base: BaseModules) -> list[str]:
    names = {path.rpartition(".")[2]: None for path in base.modules if base.layer_of(path) == 0}
    return list(names)


def check_part(path: str, part: AdapterPart, base: BaseModules, problems: Problems) -> None:
    """Hold one part's tensors against each other and against the module."""
    module = base.modules[path]
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
        problems.require(
            list(tensor.shape) == shape,
            f"{path}: {_LONG.get(name, name)} is {list(tensor.shape)} (expected {shape} for "
            f"{base.name}'s weight {list(own)})",
        )
        if tensor.dtype not in _FLOATS:
            problems.add(f"{path}: {name} is {tensor.dtype} (expected a 16 or 32 bit float)")
        elif tensor.numel() and not is_finite(tensor):
            problems.add(f"{path}: {name} has values that are not finite: the file is damaged")
    has_bias = isinstance(module, Linear) and module.bias is not None
    problems.require(part.bias is None or has_bias, f"{path} has a bias, and the model's has none")


_LONG = {"a": "A", "b": "B", "b_bias": "B's bias", "base_weight": "the base's weight"}


def check_others(name: str, tensor: Tensor, base: BaseModules, problems: Problems) -> None:
    """A norm's parameter that came along: it must be the model's own."""
    own = base.others[name]
    if own.shape != tensor.shape:
        problems.add(f"{name} is {list(tensor.shape)} (expected {list(own.shape)})")
    elif own.is_meta:
        problems.unsupported.append(f"{name}, which is in another process and cannot be compared")
    elif not torch.allclose(tensor.float(), own.float(), rtol=2**-8, atol=1e-6):
        problems.unsupported.append(f"another {name}: what a norm does cannot be adapted")


def check_base_weight(path: str, part: AdapterPart, base: BaseModules, problems: Problems) -> None:
    """A copy of the base's weight that came along must be the model's, but for its rounding."""
    if part.base_weight is None or part.base_weight.shape != base.modules[path].weight.shape:
        return
    if not base.is_here(path):
        return  # who has it compares it
    own = weight_of(nn.ModuleDict({"it": base.modules[path]}), "it")
    dense = own.scheme in ("float32", "float16", "bfloat16")
    off = torch.linalg.norm(own.dequantize().float() - part.base_weight.float())
    size = torch.linalg.norm(part.base_weight.float())
    problems.require(
        bool(off <= (2**-7 if dense else 0.5) * size),
        f"{path}: the base's weight that came with the adapter is not {base.name}'s; it was "
        "trained on another model",
    )
