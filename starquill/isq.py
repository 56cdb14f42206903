"""In-situ quantization: which tensor gets which scheme, and doing it while loading."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from starquill.checkpoint.build import is_matrix
from starquill.checkpoint.source import Stored, TensorInfo
from starquill.errors import BadRequestError, NumericsError, UnsupportedError, listing
from starquill.models.spec import ArchSpec, ModelConfig
from starquill.placement.topology import ORGANIZATIONS, TopologyEntry
from starquill.quant.affine import AffineWeight, stack
from starquill.quant.quantize import quantize
from starquill.quant.schemes import Scheme, parse_scheme

# Embedding and head are used at every token and are few: they keep more bits than the rest.
_MORE_BITS = {2: 4, 3: 6, 4: 6, 5: 8, 6: 8, 8: 8}
RECIPES = {"mixed-2-6": (2, 6), "mixed-3-6": (3, 6), "mixed-4-6": (4, 6)}
_NO_EXPERT = "not an expert"


@dataclass(frozen=True)
class IsqPlan:
    """The scheme of every matrix to be quantized, and why others stay as they are.

    `unmet` names those that could not have what was asked for, quantized or not, and why. `unseen`
    are experts whose `importances` are missing, because calibration sent too few tokens to them.
    `made` gives those that are quantized already, and `note` says how.
    """

    schemes: Mapping[str, Scheme]
    skipped: Mapping[str, str] = field(default_factory=dict)
    unmet: Mapping[str, str] = field(default_factory=dict)
    importances: Mapping[str, Tensor] = field(default_factory=dict)
    products: Mapping[str, Tensor] = field(default_factory=dict)
    outer: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    unseen: Mapping[str, Sequence[int]] = field(default_factory=dict)
    made: Callable[[str], AffineWeight | None] | None = None
    note: str = ""

    def summary(self, infos: Mapping[str, TensorInfo]) -> str:
        """One line for people: schemes with their counts, mean bits, what was left alone."""
        counts = Counter(str(scheme) for scheme in self.schemes.values())
        sizes = {name: math.prod(infos[name].shape) for name in self.schemes}
        bits = sum(s.bits_per_weight * sizes[name] for name, s in self.schemes.items())
        text = ", ".join(f"{count} x {scheme}" for scheme, count in counts.most_common())
        text += f"; {bits / max(sum(sizes.values()), 1):.2f} bits a weight"
        if "router" in self.parts.values():
            # Of a mixture it matters what was quantized: experts bear few bits, routers none.
            kinds = Counter(self.parts[name] for name in self.schemes)
            text += f"; {', '.join(f'{kind} {n}' for kind, n in sorted(kinds.items()))}"
        outer = {n: s for n, s in self.schemes.items() if n.startswith(self.outer)}
        if outer:
            text += f"; of these {', '.join(f'{n} {s}' for n, s in outer.items())}"
        if self.skipped:
            text += f"; left as they are: {listing(self._left(), 4)}"
        smaller = [f"{n} ({why})" for n, why in self.unmet.items() if n in self.schemes]
        if smaller:
            text += f"; in smaller groups: {listing(smaller, 3)}"
        if self.unseen:
            few = listing(self.unseen_experts(), 3)
            text += f"; too few tokens to calibrate {few}: quantized without"
        return text + (f"; {self.note}" if self.note else "")

    def unseen_experts(self) -> list[str]:
        """Those that calibration could not tell anything of, by mixture."""
        mixtures = {n.partition(".experts.")[0]: few for n, few in self.unseen.items()}
        return [f"{path}.experts {', '.join(map(str, few))}" for path, few in mixtures.items()]

    def _left(self) -> list[str]:
        """The trunk of a mixture by its parts, all else by name."""
        trunk = Counter(self.parts[name] for name, why in self.skipped.items() if why == _NO_EXPERT)
        named = [f"{name} ({why})" for name, why in self.skipped.items() if why != _NO_EXPERT]
        return [f"{part} {count}" for part, count in sorted(trunk.items())] + named

    def check_met(self) -> None:
        """Raise BadRequestError naming every matrix that could not have what was asked for."""
        if self.unmet:
            total = len(self.schemes) + len(self.skipped)
            reasons = [f"{name} ({why})" for name, why in self.unmet.items()]
            raise BadRequestError(
                f"{len(self.unmet)} of {total} matrices cannot have their scheme: "
                f"{listing(reasons)}; choose another for them (--quant-override), or leave out "
                "--quant-strict"
            )


@dataclass(frozen=True)
class Override:
    """A scheme, or None for "leave dense", for some weights. `matches` gets name and layer.

    `whole_layers` says that layers are named and nothing in them.
    """

    target: str
    matches: Callable[[str, int | None], bool]
    scheme: Scheme | None
    whole_layers: bool = False


@dataclass(frozen=True)
class Organization:
    """Which parts of a model `quant` is for: all, or with `moqe` the routed experts alone.

    `trunk` is then the scheme of the rest; None leaves it as it is.
    """

    name: str = "default"
    trunk: str | None = None

    def __post_init__(self) -> None:
        if self.name not in ORGANIZATIONS:
            raise BadRequestError(
                f"organization is {self.name!r} (expected {' or '.join(ORGANIZATIONS)})"
            )
        if self.trunk is not None and not self.experts_only:
            raise BadRequestError(
                f"a scheme of the trunk ({self.trunk}) needs the organization moqe"
            )

    @property
    def experts_only(self) -> bool:
        return self.name == "moqe"


def _scheme_or_dense(text: str) -> Scheme | None:
    return None if text == "dense" else parse_scheme(text)


def parse_override(text: str) -> Override:
    """`REGEX=SCHEME`, or `REGEX=dense`."""
    pattern, separator, scheme = text.rpartition("=")
    if not separator or not pattern:
        raise BadRequestError(f"--quant-override is {text!r} (expected REGEX=SCHEME)")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadRequestError(
            f"--quant-override {text!r}: bad regular expression: {error}"
        ) from None

    def matches(name: str, _: int | None) -> bool:
        return compiled.search(name) is not None

    return Override(pattern, matches, _scheme_or_dense(scheme))


def topology_overrides(entries: Sequence[TopologyEntry]) -> list[Override]:
    """What a topology file says about quantization, in its order."""
    return [
        Override(e.target, e.matches, _scheme_or_dense(e.quant), whole_layers=e.layers is not None)
        for e in entries
    ]


def plan_isq(
    spec: ArchSpec,
    config: ModelConfig,
    infos: Mapping[str, TensorInfo],
    quant: str,
    overrides: Sequence[Override] = (),
    *,
    organization: Organization = Organization(),
) -> IsqPlan:
    """Choose a scheme for every matrix of `infos` (named as the model names them).

    `quant` is a scheme or a recipe. Later overrides win; one that finds nothing is an error.
    Tensors that are quantized on disk are refused: their integers would be rounded twice.
    """
    if stored := sorted(name for name, info in infos.items() if info.is_quantized):
        raise UnsupportedError(
            f"the checkpoint is quantized already ({listing(stored, 2)}): load it as it is, or "
            "quantize the original"
        )
    schemes: dict[str, Scheme] = {}
    skipped: dict[str, str] = {}
    unmet: dict[str, str] = {}
    matrices = [name for name, info in infos.items() if is_matrix(name, info.shape)]
    parts = {name: spec.part(name) for name in matrices}
    if organization.experts_only and "experts" not in parts.values():
        raise BadRequestError(
            f"{spec.model_type}: the model has no experts, which moqe quantizes; leave out "
            "--organization to quantize all of it"
        )
    chooser = _Chooser(spec, config, quant, overrides, organization)
    for name in matrices:
        wanted, why = chooser.choose(name, parts[name])
        if wanted is None:
            skipped[name] = why
            continue
        width = infos[name].shape[-1]
        fitting = wanted.fitting(width)
        if fitting is None:
            skipped[name] = unmet[name] = f"no group divides its width of {width}"
            continue
        schemes[name] = fitting
        if fitting != wanted:
            unmet[name] = f"{fitting} for {wanted}, which does not divide its width of {width}"
    for override in overrides:
        if not any(override.matches(name, _layer(spec, name)) for name in matrices):
            raise BadRequestError(f"quantization of {override.target!r} finds no weight")
    return IsqPlan(schemes, skipped, unmet, outer=(spec.embedding, spec.head), parts=parts)


@dataclass(frozen=True)
class _Chooser:
    """What was asked for, applied to one matrix after the other."""

    spec: ArchSpec
    config: ModelConfig
    quant: str
    overrides: Sequence[Override]
    organization: Organization

    def choose(self, name: str, part: str) -> tuple[Scheme | None, str]:
        """The scheme that a matrix should have, or None and why it stays as it is."""
        layer = _layer(self.spec, name)
        wanted, why = self._unasked(name, part)
        for override in self.overrides:
            if not override.matches(name, layer):
                continue
            if part == "router" and not _names(self.spec, override, name):
                continue
            if self.organization.experts_only and override.whole_layers and part != "experts":
                continue
            wanted, why = override.scheme, "asked for"
        return wanted, why

    def _unasked(self, name: str, part: str) -> tuple[Scheme | None, str]:
        if part == "router":
            return None, "a router"
        if not self.organization.experts_only or part == "experts":
            return _default(self.spec, self.config, name, self.quant), ""
        trunk = self.organization.trunk
        if trunk is None:
            return None, _NO_EXPERT
        return _default(self.spec, self.config, name, trunk), ""


def _names(spec: ArchSpec, override: Override, router: str) -> bool:
    """Whether it is the router that `override` is about, and not all that lies around it."""
    assert spec.experts is not None
    beside = router.replace(spec.experts.router, ".mlp.-.")
    return not override.matches(beside, _layer(spec, router))


def _default(spec: ArchSpec, config: ModelConfig, name: str, quant: str) -> Scheme | None:
    outer = name.startswith((spec.embedding, spec.head))
    if quant in RECIPES:
        low, high = RECIPES[quant]
        return parse_scheme(str(high if outer or _is_sensitive(spec, config, name) else low))
    try:
        scheme = parse_scheme(quant)
    except BadRequestError as error:
        raise BadRequestError(f"{error}, or a recipe: {', '.join(RECIPES)}") from None
    more = _MORE_BITS[scheme.bits]
    return Scheme(more, 64, scheme.method) if outer and more != scheme.bits else scheme


def _layer(spec: ArchSpec, name: str) -> int | None:
    """The number of the layer that a weight is in; None outside of all."""
    match = re.match(re.escape(spec.layer_prefix) + r"(\d+)\.", name)
    return int(match[1]) if match else None


def _is_sensitive(spec: ArchSpec, config: ModelConfig, name: str) -> bool:
    """mlx-lm's rule: v_proj and the MLP's output, in the first and last eighth and every third."""
    number = _layer(spec, name)
    if number is None or not re.search(r"\.(v_proj|c_proj|down_proj)\.", name):
        return False
    eighth = config.num_hidden_layers // 8
    last = 7 * config.num_hidden_layers // 8
    return number < eighth or number >= last or (number - eighth) % 3 == 2


def apply_isq(plan: IsqPlan, name: str, value: Stored) -> Stored:
    """`value` as `plan` wants it. Raises NumericsError naming it."""
    scheme = plan.schemes.get(name)
    if scheme is None or not isinstance(value, Tensor):
        return value
    if plan.made is not None and (made := plan.made(name)) is not None:
        return made
    try:
        importance, products = plan.importances.get(name), plan.products.get(name)
        if importance is not None and importance.dim() > 1:
            return _each_expert(plan, name, value)
        return quantize(value, scheme, importance, products)
    except NumericsError as error:
        raise NumericsError(f"{name} cannot be quantized: {error}") from None


def _each_expert(plan: IsqPlan, name: str, stacked: Tensor) -> AffineWeight:
    """Every expert by what it saw; by nothing where that was too little."""
    unseen, products = plan.unseen.get(name, ()), plan.products.get(name)
    made = []
    for number, expert in enumerate(stacked):
        seen = number not in unseen
        importance = plan.importances[name][number] if seen else None
        own = products[number] if seen and products is not None else None
        made.append(quantize(expert, plan.schemes[name], importance, own))
    return stack(made)
