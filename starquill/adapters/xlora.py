"""X-LoRA (arXiv 2402.07148): a classifier weighs several adapters, anew for every token.

It reads the last hidden state of a pass without adapters; the pass that counts then has them as
strong as it said.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from starquill.adapters.adapter import (
    PEFT_FILE,
    Adapter,
    AdapterPart,
    Base,
    BaseModules,
    Problems,
    check_part,
    read_config,
    read_tensors,
)
from starquill.adapters.banks import put
from starquill.adapters.fitting import fit
from starquill.adapters.opening import open_adapter
from starquill.adapters.peft_config import read_peft_config
from starquill.adapters.xlora_config import (
    XLoraConfig,
    XLoraFolder,
    adapter_folders,
    adapter_names,
    read_xlora_config,
)
from starquill.checkpoint.hub import PICKLE_REFUSED
from starquill.checkpoint.source import read_header
from starquill.errors import AdapterError, StarquillError, listing
from starquill.kernels.native import is_finite
from starquill.nn.linear import Linear
from starquill.nn.lora import AdapterMix
from starquill.quant.weight import DenseWeight

log = logging.getLogger("starquill")
CLASSIFIER = "xlora_classifier.safetensors"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SAVED_LORA = re.compile(r"(?:base_model\.)?lora_model\.model\.(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_SAVED_HEAD = re.compile(r"(?:.+\.)?internal_xlora_classifier\.(layers\.\d+\.(?:weight|bias))")


@dataclass(frozen=True, eq=False)
class XLora:
    """A loaded X-LoRA: K adapters in a model's banks, and what weighs them.

    `layers` are the M Linears that carry any, in the order of the classifier's outputs. `head` is
    the classifier's products, first to last. After `freeze` written tokens their weights stay.
    """

    config: XLoraConfig
    names: tuple[str, ...]
    layers: tuple[str, ...]
    head: tuple[tuple[DenseWeight, Tensor | None], ...]
    slots: tuple[int, ...]
    banks: Tensor  # [M]: the number of each layer's bank
    modules: int  # how many numbers banks have
    freeze: int | None = None
    _mixes: dict[int, AdapterMix] = field(default_factory=dict)

    @torch.inference_mode()
    def scalings(self, hidden: Tensor) -> Tensor:
        """`[B, T, D] -> [B, T, M, K]`, or `[B, T, 1, K]` where one serves all layers.

        Single tokens of several sequences are rows of one token: each comes out the same in any
        company.
        """
        x = hidden.cpu().float()  # as a mix is
        for weight, bias in self.head[:-1]:
            x = weight.matmul(x, bias)
            x = x.relu() if self.config.relu else x
        weight, bias = self.head[-1]
        found = weight.matmul(x, bias).unflatten(-1, (-1, len(self.names)))
        if self.config.softmax:
            found = (found / self.config.temperature).softmax(-1)
        return found

    def acting(self, scalings: Tensor) -> Tensor:
        """How strongly adapters act, `[..., K]`, without the weight that all have."""
        if self.config.top_k is not None:
            best = scalings.topk(self.config.top_k, -1).indices
            scalings = scalings * torch.zeros_like(scalings).scatter(-1, best, 1.0)
        if self.config.softmax_topk:
            off = scalings == 0
            scalings = scalings.masked_fill(off, -torch.inf).softmax(-1).masked_fill(off, 0.0)
        return scalings

    def mix(self, scalings: Tensor) -> AdapterMix:
        """For tokens with these `scalings` `[B, T, M or 1, K]`."""
        shares = self.config.weight * self.acting(scalings)
        if shares.shape[2] == 1:
            return AdapterMix(self.slots, shares.expand(-1, -1, self.modules, -1))
        rows, tokens, _, count = shares.shape
        by_bank = torch.zeros(rows, tokens, self.modules, count)
        by_bank[:, :, self.banks] = shares
        return AdapterMix(self.slots, by_bank)

    def pass_mix(self, rows: int) -> AdapterMix | None:
        """For the scaling pass of so many rows; None for the base model alone."""
        if not self.config.pass_value * self.config.weight:
            return None
        if rows not in self._mixes:
            value = torch.full((len(self.names),), self.config.pass_value)
            shares = self.config.weight * self.acting(value)
            self._mixes[rows] = AdapterMix(self.slots, shares.expand(rows, -1))
        return self._mixes[rows]


def load_xlora(found: XLoraFolder, model: Base, freeze: int | None = None) -> XLora:
    """Read what is in the folder and put its adapters into `model`'s banks.

    Raises all that does not fit in one AdapterError, and then leaves the model as it was.
    """
    base, problems = BaseModules.of(model), Problems(found.root)
    config = read_xlora_config(found, problems)
    names = adapter_names(found, problems)
    folders = adapter_folders(found, names, problems)
    adapters = [_adapter(name, folders[name], base, problems) for name in names if name in folders]
    layers = _layers(found, adapters, base, problems)
    width = base.modules[base.spec.embedding].weight.shape[1]
    problems.require(
        config.hidden_size in (None, width),
        f"hidden_size is {config.hidden_size} (expected {width}, {base.name}'s)",
    )
    top_k, count = config.top_k, len(names)
    problems.require(
        top_k is None or top_k <= count or not count,
        f"top_k_lora is {top_k}, and there are {count} adapters",
    )
    outputs = count * (len(layers) if config.layerwise else 1)
    # Without all adapters its size is not known; what is wrong with them is told anyway.
    known = bool(outputs) and len(adapters) == count and all(adapters)
    head = _head(found, config, (width, outputs if known else None), problems)
    problems.finish()
    _warn_of_base(found, base)
    loaded = [adapter for adapter in adapters if adapter is not None]
    slots = _fill(base, loaded)
    numbers = {path: number for number, path in enumerate(base.modules)}
    banks = torch.tensor([numbers[path] for path in layers])
    return XLora(config, names, layers, head, slots, banks, len(base.modules), freeze)


def _adapter(name: str, folder: Path, base: BaseModules, problems: Problems) -> Adapter | None:
    """One of the adapters; None, and its problems noted, for one that cannot be used."""
    own = Problems(folder)
    try:
        path = folder / PEFT_FILE
        names = read_header(path) if path.exists() else {}
        if any(_SAVED_HEAD.fullmatch(key) or "lora_model.model." in key for key in names):
            adapter = _from_peft_save(name, folder, read_tensors(path), base)
        else:
            adapter = open_adapter(folder, base)
        for module, part in adapter.parts.items():
            others = sorted(part.tensors.keys() - {"a", "b", "base_weight"})
            own.require(not others, f"{module} has {', '.join(others)}, which X-LoRA cannot weigh")
            kind = "an expert" if module in base.singles else "an embedding"
            is_linear = isinstance(base.products.get(module), Linear)
            own.require(is_linear or bool(others), f"{module} is {kind}, which it cannot weigh")
        own.finish()
    except StarquillError as error:
        problems.add(f"adapter {name!r}: {error}")
        return None
    for warning in adapter.warnings:
        log.warning("adapter %s (%s): %s", name, folder, warning)
    return adapter


def _from_peft_save(
    name: str, folder: Path, tensors: Mapping[str, Tensor], base: BaseModules
) -> Adapter:
    """An adapter as `XLoraModel` saves it: among the base's tensors, under other names.

    PEFT 0.21 leaves out those whose names have another adapter's number in them.
    """
    problems = Problems(folder)
    config = read_peft_config(read_config(folder), problems)
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        if match := _SAVED_LORA.fullmatch(key):
            found[match[1]][match[2].lower()] = tensor
    targets = [path for path in base.modules if config.is_target(path, base)]
    lacking = [
        f"{path}.lora_{which.upper()}.weight"
        for path in targets
        for which in ("a", "b")
        if which not in found.get(path, {})
    ]
    problems.require(bool(targets), "target_modules names no module of the model")
    problems.require(not lacking, f"the save is incomplete: it lacks {listing(lacking, 8)}")
    unknown = sorted(found.keys() - set(targets))
    problems.require(not unknown, f"{base.name} has no targeted module {listing(unknown, 8)}")
    parts = {}
    for path in targets:
        a = found.get(path, {}).get("a")
        rank = a.shape[0] if a is not None and a.dim() == 2 and a.shape[0] else 1
        parts[path] = AdapterPart.of(found.get(path, {}), config.scale_of(path, rank))
        if len(found.get(path, {})) == 2:
            check_part(path, parts[path], base, problems)
            said = config.rank_of(path)
            problems.require(rank == said, f"{path}: A has rank {rank}, and the config {said}")
    problems.require(not config.dora, "use_dora is true, which X-LoRA cannot weigh")
    problems.finish()
    return Adapter(name, "PEFT", parts)


def _layers(
    found: XLoraFolder, adapters: Sequence[Adapter | None], base: BaseModules, problems: Problems
) -> tuple[str, ...]:
    """The Linears that carry LoRA, in the model's order or in that of mistral.rs's file."""
    carrying = {
        path
        for adapter in adapters
        if adapter is not None
        for path, part in adapter.parts.items()
        if part.a is not None
    }
    layers = [path for path in base.modules if path in carrying]
    said = found.ordering.get("layers")
    if said is None or not all(adapters):
        return tuple(layers)
    numbers = list(said.values()) if isinstance(said, dict) else []
    if not all(type(n) is int for n in numbers) or sorted(numbers) != list(range(len(numbers))):
        problems.add(f"the ordering's layers do not number the modules from 0 on: {str(said)[:60]}")
    elif sorted(said) != sorted(layers):
        other = sorted(carrying.symmetric_difference(said))
        problems.add(
            f"the ordering file numbers {len(said)} modules, and the adapters act on "
            f"{len(layers)}; not in both: {listing(other, 8)}"
        )
    else:
        layers.sort(key=lambda path: int(said[path]))
    return tuple(layers)


def _head(
    found: XLoraFolder, config: XLoraConfig, ends: tuple[int, int | None], problems: Problems
) -> tuple[tuple[DenseWeight, Tensor | None], ...]:
    """The classifier's products, every tensor of its file being one of them."""
    tensors = _head_tensors(found, problems)
    if tensors is None:
        return ()
    names = [
        f"layers.{place * config.slots}" if found.is_peft else f"inner.{place * config.slots}"
        for place in range(config.depth - 1)
    ]
    last = f"layers.{(config.depth - 1) * config.slots}" if found.is_peft else "last"
    names.append(last)
    bias = config.bias
    if bias is None:
        bias = any(key.endswith(".bias") for key in tensors)
    fields = ("weight", "bias") if bias else ("weight",)
    expected = {f"{name}.{one}": one for name in names for one in fields}
    lacking = [key for key in expected if key not in tensors]
    problems.require(
        not lacking, f"the classifier lacks {listing(lacking)}: the save is incomplete"
    )
    unknown = sorted(tensors.keys() - expected.keys())
    problems.require(
        not unknown,
        f"the classifier has {listing(unknown)} (expected {listing(list(expected))} for "
        f"xlora_depth {config.depth})",
    )
    for place, name in enumerate(names):
        rows = config.size if name != last else ends[1]
        columns = config.size if place else ends[0]
        _check_product(name, tensors, (rows, columns), problems)
    if problems.found:
        return ()
    return tuple(
        (DenseWeight(tensors[f"{name}.weight"].float()), _bias(tensors, name)) for name in names
    )


def _bias(tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    bias = tensors.get(f"{name}.bias")
    return None if bias is None else bias.float()


def _check_product(
    name: str, tensors: Mapping[str, Tensor], shape: tuple[int | None, int], problems: Problems
) -> None:
    rows, columns = shape
    for key, wanted in ((f"{name}.weight", [rows, columns]), (f"{name}.bias", [rows])):
        tensor = tensors.get(key)
        if tensor is None:
            continue
        own = list(tensor.shape)
        fits = len(own) == len(wanted) and all(
            want in (None, n) for n, want in zip(own, wanted, strict=True)
        )
        problems.require(fits, f"the classifier's {key} is {own} (expected {wanted})")
        if tensor.dtype not in _FLOATS:
            problems.add(
                f"the classifier's {key} is {tensor.dtype} (expected a 16 or 32 bit float)"
            )
        elif not is_finite(tensor):
            problems.add(f"the classifier's {key} has values that are not finite")


def _head_tensors(found: XLoraFolder, problems: Problems) -> dict[str, Tensor] | None:
    path = found.root / (PEFT_FILE if found.is_peft else CLASSIFIER)
    if not path.exists():
        pickles = [path.with_suffix(suffix) for suffix in (".pt", ".bin")]
        pickle = next((other for other in pickles if other.exists()), None)
        problems.add(PICKLE_REFUSED.format(pickle) if pickle else f"there is no {path.name}")
        return None
    try:
        tensors = read_tensors(path)
    except AdapterError as error:
        problems.add(str(error))
        return None
    if not found.is_peft:
        return tensors
    named = {}
    for key, tensor in tensors.items():
        match = _SAVED_HEAD.fullmatch(key)
        named[match[1] if match else key] = tensor
    return named


def _warn_of_base(found: XLoraFolder, base: BaseModules) -> None:
    said = found.raw.get("base_model_id") or found.raw.get("base_model_name_or_path")
    if isinstance(said, str) and Path(said).name.lower() != Path(base.name).name.lower():
        log.warning("%s was made for %s, and this is %s", found.root, said, base.name)


def _fill(base: BaseModules, adapters: Sequence[Adapter]) -> tuple[int, ...]:
    """Into slots below 0: those of the `AdapterStore` are not."""
    fitted = [fit(adapter, base) for adapter in adapters]
    slots = tuple(-1 - place for place in range(len(adapters)))
    for slot, parts in zip(slots, fitted, strict=True):
        put(base, slot, parts)
    return slots
