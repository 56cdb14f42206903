"""What X-LoRA's two published forms say in their config files, and which folder is which adapter.

`xlora_config.json` is that of EricLBuehler/xlora, `adapter_config.json` with peft_type XLORA is
PEFT's. mistral.rs puts an ordering file beside the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from starquill.adapters.adapter import CONFIG, Problems
from starquill.checkpoint.files import read_json
from starquill.checkpoint.hub import locate_xlora
from starquill.errors import AdapterError, CheckpointError, listing

XLORA_CONFIG = "xlora_config.json"
_SIZE = 2048
_MOST_DEPTH = 64
# Without meaning where nothing is trained, or told by the base model.
_IGNORED = frozenset({
    "adapters", "auto_mapping", "base_model_id", "base_model_name_or_path", "device",
    "inference_mode", "model_type", "peft_type", "peft_version", "revision", "runtime_config",
    "stop_token_id", "task_type", "use_trainable_adapters",
})  # fmt: skip
_READ = frozenset({
    "enable_relu_and_dropout", "enable_softmax", "enable_softmax_topk", "global_scaling_weight",
    "hidden_size", "layerwise_scalings", "scaling_pass_value", "softmax_temperature", "top_k_lora",
    "use_bias", "xlora_depth", "xlora_dropout_p", "xlora_size",
})  # fmt: skip


@dataclass(frozen=True)
class XLoraFolder:
    """An X-LoRA's folder, before anything in it was checked.

    `ordering` is mistral.rs's file: `order` names the adapters, `layers` numbers the modules.
    """

    root: Path
    is_peft: bool
    raw: Mapping[str, Any]
    ordering: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class XLoraConfig:
    """`bias` is None where the config does not say; `slots` is how many of torch's modules each
    hidden product of the classifier takes, which its tensors' names count."""

    hidden_size: int | None = None
    depth: int = 1
    size: int = _SIZE
    bias: bool | None = None
    relu: bool = True
    slots: int = 3
    softmax: bool = True
    temperature: float = 1.0
    layerwise: bool = False
    top_k: int | None = None
    softmax_topk: bool = False
    pass_value: float = 0.0
    weight: float = 1.0


def find_xlora(path: str | Path) -> XLoraFolder:
    """The X-LoRA at `path`: its folder, mistral.rs's ordering file in it, or a hub id."""
    path = locate_xlora(path)
    root = path.parent if path.is_file() else path
    if (root / XLORA_CONFIG).exists():
        return XLoraFolder(root, False, _json(root / XLORA_CONFIG), _ordering(path))
    if (root / CONFIG).exists():
        raw = _json(root / CONFIG)
        if raw.get("peft_type") == "XLORA":
            return XLoraFolder(root, True, raw, _ordering(path))
        raise AdapterError(
            f"{root} is an adapter with peft_type {raw.get('peft_type')!r:.40} (expected XLORA); "
            "a plain adapter is loaded with model.adapters.load"
        )
    raise AdapterError(
        f"no X-LoRA at {path}: expected a folder with {XLORA_CONFIG}, or with {CONFIG} of "
        "peft_type XLORA"
    )


def _ordering(path: Path) -> Mapping[str, Any]:
    found = [path] if path.is_file() else sorted(path.glob("*ordering*.json"))
    if len(found) > 1:
        names = listing([file.name for file in found])
        raise AdapterError(f"{path} has several ordering files, {names}; give one of them as path")
    return _json(found[0]) if found else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None


def read_xlora_config(found: XLoraFolder, problems: Problems) -> XLoraConfig:
    """Read and check it; problems are noted, and a harmless value taken."""
    raw = found.raw
    for key, value in raw.items():
        if key not in _READ and key not in _IGNORED and value:
            problems.add(f"{key} is {value!r:.40}, which starquill does not implement")
    fields = _Fields(raw, problems)
    depth = fields.whole("xlora_depth", 1)
    problems.require(depth <= _MOST_DEPTH, f"xlora_depth is {depth} (at most {_MOST_DEPTH})")
    dropout = fields.number("xlora_dropout_p", 0.2)
    relu = found.is_peft or fields.flag("enable_relu_and_dropout", True)
    slots = 1 if not relu else 2 if found.is_peft and dropout <= 0 else 3
    temperature = fields.number("softmax_temperature", 1.0)
    problems.require(temperature > 0, f"softmax_temperature is {temperature} (expected above 0)")
    said = found.is_peft or raw.get("use_bias") is not None
    return XLoraConfig(
        hidden_size=None if raw.get("hidden_size") is None else fields.whole("hidden_size", 1),
        depth=min(depth, _MOST_DEPTH),
        size=fields.whole("xlora_size", _SIZE),
        bias=(found.is_peft or fields.flag("use_bias", True)) if said else None,
        relu=relu,
        slots=slots,
        softmax=fields.flag("enable_softmax", True),
        temperature=temperature,
        layerwise=fields.flag("layerwise_scalings", False),
        top_k=None if raw.get("top_k_lora") is None else fields.whole("top_k_lora", 1),
        softmax_topk=fields.flag("enable_softmax_topk", False),
        pass_value=fields.number("scaling_pass_value", 0.0),
        weight=fields.number("global_scaling_weight", 1.0),
    )


@dataclass(frozen=True)
class _Fields:
    raw: Mapping[str, Any]
    problems: Problems

    def _take(self, key: str, default: Any, holds: Any, expected: str) -> Any:
        value = self.raw.get(key)
        if value is None:
            return default
        if holds(value):
            return value
        self.problems.add(f"{key} is {value!r:.40} (expected {expected})")
        return default

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._take(key, default, lambda v: isinstance(v, bool), "true or false"))

    def whole(self, key: str, default: int) -> int:
        return int(self._take(key, default, lambda v: type(v) is int and v > 0, "1 or more"))

    def number(self, key: str, default: float) -> float:
        def holds(value: Any) -> bool:
            return type(value) in (int, float) and abs(value) < 1e4

        return float(self._take(key, default, holds, "a number"))


def adapter_names(found: XLoraFolder, problems: Problems) -> tuple[str, ...]:
    """The adapters in the order of the classifier's outputs."""
    said, order = found.raw.get("adapters"), found.ordering.get("order")
    for key, value in (("adapters", said), ("the ordering's order", order)):
        if value is not None and not _are_names(value):
            problems.add(f"{key} is {value!r:.40} (expected names, each once)")
            return ()
    names = list(said or ())
    if found.is_peft and all(name.isdecimal() for name in names):
        # PEFT numbers its adapters, and sorts the keys that it writes: "10" comes before "2".
        names.sort(key=int)
    if order is not None:
        problems.require(
            not names or sorted(names) == sorted(order),
            f"the ordering file has the adapters {listing(sorted(order))}, and the config has "
            f"{listing(sorted(names))}",
        )
        names = list(order)
    problems.require(
        bool(names), "the config names no adapters; mistral.rs's ordering file beside it may"
    )
    return tuple(names)


def _are_names(value: Any) -> bool:
    names = list(value) if isinstance(value, list | dict) else [None]
    return all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names)


def adapter_folders(
    found: XLoraFolder, names: tuple[str, ...], problems: Problems
) -> dict[str, Path]:
    """Each adapter's folder: the one with just its name, or where the config says in this folder.

    Paths that lead out of it are those of the machine that it was trained on.
    """
    below = [path.parent for path in sorted(found.root.rglob(CONFIG)) if path.parent != found.root]
    said = found.raw.get("adapters")
    folders = {}
    for name in names:
        where = said.get(name) if isinstance(said, dict) else None
        place = [f for f in below if isinstance(where, str) and _ends_with(where, f, found.root)]
        named = [folder for folder in below if folder.name == name] or place
        if len(named) == 1:
            folders[name] = named[0]
        elif named:
            several = listing([str(folder.relative_to(found.root)) for folder in named])
            problems.add(f"adapter {name!r} may be in {several}; one folder must have its name")
        else:
            problems.add(f"no folder {name!r} with {CONFIG} for the adapter of this name")
    return folders


def _ends_with(said: str, folder: Path, root: Path) -> bool:
    """Whether a path in the config ends in where `folder` is below `root`, part by part."""
    own = folder.relative_to(root).parts
    return PurePosixPath(said.replace("\\", "/")).parts[-len(own) :] == own
