"""Adapters of whole stacks of experts, taken apart into a part for each expert.

PEFT wraps a parameter, not a module: `gate_up_proj`, which is two of our stacks, and `down_proj`.
Ranks lie expert by expert in A, and experts rank by rank in B (`ParamWrapper` in peft 0.21).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from starquill.adapters.adapter import AdapterPart, BaseModules, Problems, check_tensor
from starquill.adapters.peft_config import PeftConfig
from starquill.checkpoint.stacked import piece_name
from starquill.errors import listing

_WRAPPED = ".base_layer"
# A mixture's parameters in the order in which PEFT wraps them, and the stacks that each is.
_PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# Until then a parameter [E, out, in] was read as [E, in, out].
_TURNED = (0, 19)


def mixtures(base: BaseModules) -> list[str]:
    """The paths of what holds stacks that PEFT knows as parameters."""
    return [path.removesuffix(".gate_proj") for path in base.stacks if path.endswith(".gate_proj")]


@dataclass(eq=False)
class Stacks:
    """A and B of stacks, as they are found: by mixture, by how deep they were wrapped, by name."""

    base: BaseModules
    found: dict[str, dict[int, dict[str, Tensor]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )

    def takes(self, path: str, name: str | None, tensor: Tensor) -> bool:
        """Whether `tensor` is A or B of a stack, and then kept."""
        mixture, depth = path, 0
        while mixture.endswith(_WRAPPED):
            mixture, depth = mixture.removesuffix(_WRAPPED), depth + 1
        if name not in ("a", "b") or f"{mixture}.gate_proj" not in self.base.stacks:
            return False
        self.found[mixture][depth][name] = tensor
        return True

    def parts(
        self, config: PeftConfig, say: Callable[[str], str], problems: Problems
    ) -> dict[str, AdapterPart]:
        """A part for each expert; `say` gives a path's name in `config`."""
        parts: dict[str, AdapterPart] = {}
        for mixture in mixtures(self.base):
            said = say(mixture)
            named = [n for n in _PARAMETERS if config.targets_parameter(f"{said}.{n}")]
            found = self.found.get(mixture, {})
            # The first is wrapped first, and so lies the deepest.
            if sorted(found) != list(range(len(named))):
                problems.add(
                    f"{mixture} has A and B of {len(found)} parameters, and target_parameters "
                    f"names {listing(named) or 'none'}"
                )
                continue
            for place, name in enumerate(reversed(named)):
                one = _Parameter(self.base, mixture, name)
                parts |= one.parts(found[place], config, f"{said}.{name}", problems)
        return parts


@dataclass(frozen=True, eq=False)
class _Parameter:
    """A parameter `[E, out, in]` of a mixture."""

    base: BaseModules
    mixture: str
    name: str

    def parts(
        self, tensors: Mapping[str, Tensor], config: PeftConfig, said: str, problems: Problems
    ) -> dict[str, AdapterPart]:
        path, before = f"{self.mixture}.{self.name}", len(problems.found)
        stacks = [f"{self.mixture}.{name}" for name in _PARAMETERS[self.name]]
        count, rows, inputs = self.base.stacks[stacks[0]].weight.shape
        outputs, rank = rows * len(stacks), config.rank_of(said)
        for name, other in (("a", "B and no A"), ("b", "A and no B")):
            problems.require(name in tensors, f"{path} has {other}")
        if len(problems.found) > before:
            return {}
        turned = _is_turned(tensors, (outputs, inputs), config, problems)
        ends = (outputs, inputs) if turned else (inputs, outputs)
        own = f"for {count} experts of rank {rank}"
        for name, shape in (("a", [count * rank, ends[0]]), ("b", [ends[1], count * rank])):
            expected = (shape, f"{shape} {own}")
            check_tensor(f"{path}: {name.upper()}", tensors[name], expected, problems)
        if len(problems.found) > before:
            return {}
        by_expert = tensors["a"].reshape(count, rank, ends[0])  # [E, R, in]
        by_rank = tensors["b"].reshape(ends[1], rank, count).permute(2, 0, 1)  # [E, out, R]
        a, b = (by_rank.mT, by_expert.mT) if turned else (by_expert, by_rank)
        scale = config.scale_of(said, rank)
        return split(stacks, a, b, scale)


def split(stacks: list[str], a: Tensor, b: Tensor, scale: float) -> dict[str, AdapterPart]:
    """`a` `[E, R, in]` and `b` `[E, out, R]`, of which each of `stacks` has as many rows."""
    return {
        piece_name(stack, expert): AdapterPart(a[expert], rows[expert], scale)
        for stack, rows in zip(stacks, b.chunk(len(stacks), dim=1), strict=True)
        for expert in range(a.shape[0])
    }


def _is_turned(
    tensors: Mapping[str, Tensor], shape: tuple[int, int], config: PeftConfig, problems: Problems
) -> bool:
    """Whether A has a parameter's outputs, and B its inputs."""
    outputs, inputs = shape
    if outputs != inputs:
        return tensors["a"].shape[-1:] == (outputs,) and tensors["b"].shape[:1] == (inputs,)
    if not config.version:
        problems.unsupported.append(
            "target_parameters that are square, without peft_version, which tells which way they "
            "are to be read"
        )
    return config.version < _TURNED
