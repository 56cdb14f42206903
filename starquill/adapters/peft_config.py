"""`adapter_config.json` as PEFT writes it, and what it says of each module."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starquill.adapters.adapter import BaseModules, Problems
from starquill.nn.linear import Embedding

ALL_LINEAR = "all-linear"
# Without meaning where nothing is trained; those of an initialisation are in `_INITIAL`.
_IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "runtime_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "fan_in_fan_out",
})  # fmt: skip
_READ = frozenset({
    "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "lora_bias",
    "bias", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "task_type", "modules_to_save", "init_lora_weights", "ensure_weight_tying", "target_parameters",
})  # fmt: skip
# These leave the base as it is; others (pissa, olora, corda, loftq, lora_ga) take their beginning
# away from it, which what was saved does not tell.
_INITIAL = ("gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class PeftConfig:
    """All names in it are those that the model had where the adapter was trained: `said`."""

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    b_bias: bool
    bias: str
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    targets: str | tuple[str, ...] | None = None
    excluded: str | tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    ties_head: bool = False
    parameters: tuple[str, ...] = ()
    version: tuple[int, ...] = ()

    def rank_of(self, said: str) -> int:
        key = self._key(said)
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, key), self.rank)

    def scale_of(self, said: str, rank: int) -> float:
        key = self._key(said)
        alpha = self.alpha_pattern.get(_pattern_key(self.alpha_pattern, key), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def _key(self, said: str) -> str:
        """What patterns are held against: a parameter's name where that is the target."""
        weight = f"{said}.weight"
        return weight if self.targets_parameter(weight) else said

    def is_saved(self, said: str) -> bool:
        """Whether it is, or lies in, one of `modules_to_save`."""
        return any(re.match(rf"(.*\.)?{name}(\..*)?$", said) for name in self.saved)

    def targets_parameter(self, said: str) -> bool:
        return bool(self.parameters) and _names(self.parameters, said)

    def is_target(self, path: str, base: BaseModules, said: str | None = None) -> bool:
        """Whether an adapter was made for the module at `path`, which was called `said`."""
        said = path if said is None else said
        if self.targets_parameter(f"{said}.weight"):
            return True
        if self.is_saved(said) or _names(self.excluded, said):
            return False
        if self.targets == ALL_LINEAR:
            return not isinstance(base.products[path], Embedding) and path != base.spec.head
        if self.targets is None or not _names(self.targets, said):
            return False
        if isinstance(self.targets, str) or said in self.targets or not self.layers:
            return True
        patterns = self.layers_pattern or (r"[^.]*",)
        match = next(
            (m for p in patterns if (m := re.match(rf"(?:^|.*?\.){p}\.(\d+)\.", said))), None
        )
        return match is not None and int(match[1]) in self.layers


def _names(said: str | tuple[str, ...], path: str) -> bool:
    """A string is a pattern for all of `path`; a list has names that it is or ends in."""
    if isinstance(said, str):
        return re.fullmatch(said, path) is not None
    return path in said or path.endswith(tuple(f".{name}" for name in said))


def _pattern_key(patterns: Mapping[str, Any], path: str) -> str:
    """The first key that matches the end of `path`, as PEFT looks them up."""
    for key in patterns:
        if re.match(rf"(.*\.)?({key})$", path):
            return key
    return path


def read_peft_config(raw: Mapping[str, Any], problems: Problems) -> PeftConfig:
    """Read and check it; problems are noted, and a harmless value taken."""
    if raw.get("peft_type") != "LORA":
        problems.unsupported.append(f"peft_type {raw.get('peft_type')!r:.40} (implemented: LORA)")
    if raw.get("task_type") not in (None, "CAUSAL_LM", "FEATURE_EXTRACTION"):
        problems.unsupported.append(f"task_type {raw['task_type']!r:.40} (implemented: CAUSAL_LM)")
    problems.unsupported.extend(
        f"{key} {value!r:.40}"
        for key, value in raw.items()
        if value and key not in _READ and key not in _IGNORED
    )
    initial = raw.get("init_lora_weights")
    if not (initial is None or isinstance(initial, bool) or initial in _INITIAL):
        problems.unsupported.append(
            f"init_lora_weights {initial!r:.40}, which changed the base it was trained on: save it "
            "again with PEFT's path_initial_model_for_weight_conversion"
        )
    bias = raw.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        problems.add(f"bias is {bias!r:.40} (expected none, all or lora_only)")
    config = PeftConfig(
        rank=_whole(raw.get("r", 8), "r", problems),
        alpha=_number(raw.get("lora_alpha", 8), "lora_alpha", problems),
        rslora=_flag(raw, "use_rslora", problems),
        dora=_flag(raw, "use_dora", problems),
        b_bias=_flag(raw, "lora_bias", problems),
        bias=bias if isinstance(bias, str) else "none",
        rank_pattern={
            key: _whole(value, f"rank_pattern {key}", problems)
            for key, value in _patterns(raw, "rank_pattern", problems).items()
        },
        alpha_pattern={
            key: _number(value, f"alpha_pattern {key}", problems)
            for key, value in _patterns(raw, "alpha_pattern", problems).items()
        },
        targets=_pattern_or_names(raw, "target_modules", problems),
        excluded=_pattern_or_names(raw, "exclude_modules", problems) or (),
        layers=_layers(raw.get("layers_to_transform"), problems),
        layers_pattern=_as_names(raw, "layers_pattern", problems),
        saved=_as_names(raw, "modules_to_save", problems),
        ties_head=_flag(raw, "ensure_weight_tying", problems),
        parameters=_as_names(raw, "target_parameters", problems),
        version=_version(raw.get("peft_version")),
    )
    if config.dora and config.b_bias:
        problems.unsupported.append("lora_bias with use_dora")
    if config.parameters:
        problems.unsupported.extend(
            f"{key} with target_parameters" for key in ("use_dora", "lora_bias") if raw.get(key)
        )
    return config


def _version(said: Any) -> tuple[int, ...]:
    """`0.19.1` as numbers; empty where there is none."""
    match = re.match(r"\d+(\.\d+)*", said) if isinstance(said, str) else None
    return tuple(map(int, match[0].split("."))) if match else ()


def _flag(raw: Mapping[str, Any], key: str, problems: Problems) -> bool:
    value = raw.get(key)
    problems.require(value is None or isinstance(value, bool), f"{key} is {value!r:.40}")
    return value is True


def _whole(value: Any, key: str, problems: Problems) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    problems.add(f"{key} is {value!r:.40} (expected a whole number above 0)")
    return 1


def _number(value: Any, key: str, problems: Problems) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
        return float(value)
    problems.add(f"{key} is {value!r:.40} (expected a number)")
    return 1.0


def _patterns(raw: Mapping[str, Any], key: str, problems: Problems) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        problems.add(f"{key} is {value!r:.40} (expected an object)")
        return {}
    return {name: number for name, number in value.items() if _compiles(name, key, problems)}


def _compiles(pattern: str, key: str, problems: Problems) -> bool:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        problems.add(f"{key} has {pattern!r:.40}, which is no regular expression: {error}")
        return False
    return True


def _pattern_or_names(
    raw: Mapping[str, Any], key: str, problems: Problems
) -> str | tuple[str, ...] | None:
    value = raw.get(key)
    if isinstance(value, str):
        if value.lower() == ALL_LINEAR:
            return ALL_LINEAR
        return value if _compiles(value, key, problems) else None
    return None if value is None else _as_names(raw, key, problems)


def _as_names(raw: Mapping[str, Any], key: str, problems: Problems) -> tuple[str, ...]:
    value = raw.get(key) or []
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        problems.add(f"{key} is {value!r:.40} (expected names)")
        return ()
    return tuple(name for name in value if _compiles(name, key, problems))


def _layers(value: Any, problems: Problems) -> tuple[int, ...]:
    value = [value] if isinstance(value, int) else value or []
    if not isinstance(value, list) or not all(type(n) is int for n in value):
        problems.add(f"layers_to_transform is {value!r:.40} (expected layers' numbers)")
        return ()
    return tuple(value)
