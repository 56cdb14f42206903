"""Options that several verbs share, each group a dataclass, and how they reach typer."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from pygments.lexer import Lexer
from pygments.lexers import find_lexer_class_for_filename, get_lexer_by_name
from pygments.util import ClassNotFound

from starquill.checkpoint.files import exists
from starquill.engine.params import check_params
from starquill.errors import BadRequestError
from starquill.types import SamplingParams

if TYPE_CHECKING:
    from starquill.quantizing import QuantOptions


def expand_options(function: Callable[..., int]) -> Callable[..., int]:
    """Offer the fields of a verb's dataclass parameters as options of their own.

    typer reads options from a signature; this lets verbs share groups of them without writing
    each option again.
    """
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, Any] = {}
    flat: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if not is_dataclass(parameter.annotation):
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = parameter.annotation
        hints = get_type_hints(parameter.annotation, include_extras=True)
        flat += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(parameter.annotation)
        ]

    @functools.wraps(function)
    def verb(**values: Any) -> int:
        grouped = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return function(**values, **grouped)

    verb.__signature__ = inspect.Signature(flat, return_annotation=int)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return verb


def _option(help: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, **settings)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how to load it."""

    model: Annotated[
        str, _option("A folder, a .safetensors file, a hub id, or `default`.", "--model", "-m")
    ] = "default"
    revision: Annotated[str | None, _option("Branch, tag or commit of a hub model.")] = None
    dtype: Annotated[
        str, _option("auto (float32, weights as stored), float32, bfloat16 or float16.")
    ] = "auto"
    allow_padded_vocab: Annotated[
        bool,
        _option("Accept more vocabulary rows than the tokenizer has.", "--allow-padded-vocab"),
    ] = False
    exact: Annotated[
        bool, _option("Multiply quantized weights with unrounded activations.", "--exact")
    ] = False
    device_map: Annotated[
        str | None,
        _option(
            "auto, a device, or layers: cuda:0=0-15,cpu=16-29,disk=30-39. Wins over --topology.",
            metavar="MAP",
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        _option("What devices may give: cuda:0=10GiB,cpu=16GiB,disk=inf.", metavar="SIZES"),
    ] = None
    max_seq_len: Annotated[int | None, _option("Tokens in a sequence, to have room for.")] = None
    max_batch_size: Annotated[int | None, _option("Sequences at once, to have room for.")] = None


@dataclass(frozen=True)
class QuantizeOptions:
    """How to quantize while loading."""

    quant: Annotated[
        str | None,
        _option("Quantize: 2, 3, 4, 5, 6, 8, q4-g64, 3-hqq, mixed-2-6...", metavar="SCHEME"),
    ] = None
    quant_override: Annotated[
        list[str] | None,
        _option(
            "Another scheme (or dense) for weights whose name matches; may be repeated.",
            "--quant-override",
            metavar="REGEX=SCHEME",
        ),
    ] = None
    topology: Annotated[Path | None, _option("A YAML file of schemes and devices by layer.")] = None
    calibrate: Annotated[
        Path | None,
        _option(
            "Weight errors by your code (32k tokens of a file or folder) or llama.cpp's imatrix.",
            metavar="FILE|DIR",
        ),
    ] = None
    calibrate_suffix: Annotated[str, _option("Which files of a folder calibrate.")] = ".py"
    quant_strict: Annotated[
        bool, _option("Fail if a width does not fit its scheme.", "--quant-strict")
    ] = False
    organization: Annotated[
        str | None,
        _option("moqe quantizes the experts of a mixture alone; default: all.", metavar="NAME"),
    ] = None
    trunk_quant: Annotated[
        str | None,
        _option("With moqe, the scheme of all that is not an expert.", metavar="SCHEME"),
    ] = None
    distill: Annotated[
        Path | None,
        _option("Then train scales and biases on your code, layer by layer.", metavar="FILE|DIR"),
    ] = None
    steps: Annotated[int | None, _option("How long each layer is trained; 100.")] = None

    def chosen(self) -> QuantOptions | None:
        """As `quantizing.QuantOptions`; None for no quantization."""
        from starquill.quantizing import QuantOptions

        if self.steps is not None and self.distill is None:
            raise BadRequestError("--steps needs --distill")
        if self.quant is not None:
            made = QuantOptions(
                self.quant,
                tuple(self.quant_override or ()),
                self.topology,
                self.calibrate,
                suffix=self.calibrate_suffix,
                strict=self.quant_strict,
                organization=self.organization,
                trunk=self.trunk_quant,
                distill=self.distill,
            )
            return made if self.steps is None else replace(made, steps=self.steps)
        if self.organization or self.trunk_quant or self.distill:
            raise BadRequestError("--organization, --trunk-quant and --distill need --quant")
        if self.quant_override or self.calibrate or self.quant_strict:
            raise BadRequestError("--quant-override, --calibrate and --quant-strict need --quant")
        return None


@dataclass(frozen=True)
class XLoraOptions:
    """Adapters that a classifier weighs for every token."""

    xlora: Annotated[str | None, _option("An X-LoRA's folder or hub id.", metavar="FOLDER|ID")] = (
        None
    )
    xlora_freeze: Annotated[
        int | None,
        _option("Keep the adapters' weights after N written tokens: faster.", metavar="N"),
    ] = None

    def check(self, show: ShowOptions | None = None) -> None:
        """Refuse what makes no sense, before a model is loaded."""
        if self.xlora_freeze is not None and self.xlora_freeze < 0:
            raise BadRequestError(f"--xlora-freeze is {self.xlora_freeze} (expected 0 or more)")
        alone = self.xlora_freeze is not None or (show is not None and show.show_scalings)
        if self.xlora is None and alone:
            raise BadRequestError("--xlora-freeze and --show-scalings need --xlora")


@dataclass(frozen=True)
class AdapterOptions:
    """Adapters, each with its weight."""

    adapter: Annotated[
        list[str] | None,
        _option(
            "A LoRA adapter's folder or hub id, and how strongly it acts (1 if not told); may be "
            "repeated.",
            "--adapter",
            metavar="PATH[=WEIGHT]",
        ),
    ] = None

    def chosen(self) -> dict[str, float]:
        """By path; BadRequestError for one that makes no sense."""
        found: dict[str, float] = {}
        for text in self.adapter or ():
            path, weight = adapter_and_weight(text)
            if path in found:
                raise BadRequestError(f"--adapter {path} is given twice; give it one weight")
            found[path] = weight
        return found


def adapter_and_weight(text: str) -> tuple[str, float]:
    """`PATH=WEIGHT` or `PATH`, which may have a = of its own."""
    path, equals, said = text.rpartition("=")
    if not equals or exists(Path(text)):
        path, said = text, "1"
    try:
        weight = float(said)
    except ValueError:
        path, weight = text, 1.0
    if not path or not math.isfinite(weight):
        raise BadRequestError(f"--adapter is {text!r} (expected PATH or PATH=WEIGHT, as lora=0.5)")
    return path, weight


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; the defaults are greedy."""

    max_tokens: Annotated[int, _option("Write at most this many tokens.", "--max-tokens", "-n")] = (
        128
    )
    temp: Annotated[float, _option("Temperature; 0 takes the likeliest token.")] = 0.0
    top_p: Annotated[float, _option("Keep the likeliest tokens up to this probability.")] = 1.0
    top_k: Annotated[int, _option("Keep this many likeliest tokens; 0 keeps all.")] = 0
    min_p: Annotated[float, _option("Drop tokens below this share of the likeliest.")] = 0.0
    seed: Annotated[int | None, _option("Seed, for the same text every time.")] = None
    stop: Annotated[
        list[str] | None, _option("End before this text; may be repeated.", "--stop", metavar="STR")
    ] = None
    repetition_penalty: Annotated[float, _option("Make seen tokens less likely; 1 is off.")] = 1.0
    presence_penalty: Annotated[float, _option("Subtracted once from tokens written.")] = 0.0
    frequency_penalty: Annotated[float, _option("Subtracted per time a token was written.")] = 0.0
    logit_bias: Annotated[
        list[str] | None,
        _option("Add BIAS to token ID; may be repeated.", "--logit-bias", metavar="ID=BIAS"),
    ] = None
    logprobs: Annotated[
        int | None, _option("Report log probabilities, with this many alternatives.")
    ] = None

    def params(self) -> SamplingParams:
        """The same as `SamplingParams`, checked as far as it can be without a model."""
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temp,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=dict(_bias(text) for text in self.logit_bias or ()),
            logprobs=self.logprobs,
        )
        check_params(params)
        return params


@dataclass(frozen=True)
class GrammarOptions:
    """What may be written; at most one of them."""

    json_schema: Annotated[
        Path | None,
        _option("Write JSON that FILE's schema allows.", "--json-schema", metavar="FILE"),
    ] = None
    regex: Annotated[
        str | None, _option("Write text that REGEX matches as a whole.", metavar="REGEX")
    ] = None
    grammar: Annotated[
        Path | None, _option("Write what FILE's rules (Lark or GBNF) derive.", metavar="FILE")
    ] = None

    def chosen(self) -> str | None:
        """As an engine's grammar; None for none."""
        from starquill.engine.grammar import json_schema_grammar, lark_grammar, regex_grammar

        given = [self.json_schema, self.regex, self.grammar]
        if sum(value is not None for value in given) > 1:
            raise BadRequestError("give only one of --json-schema, --regex and --grammar")
        if self.json_schema is not None:
            return json_schema_grammar(_text_of(self.json_schema))
        if self.grammar is not None:
            return lark_grammar(_text_of(self.grammar))
        return None if self.regex is None else regex_grammar(self.regex)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(f"{path} is not UTF-8 (byte {error.start}); convert it") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise BadRequestError(
            f"--logit-bias is {text!r} (expected ID=BIAS, as in 42=-100)"
        ) from None


@dataclass(frozen=True)
class ShowOptions:
    """What is shown, and how."""

    highlight: Annotated[
        bool, _option("Highlight syntax on a terminal.", "--highlight/--no-highlight")
    ] = True
    colorize: Annotated[bool, _option("Colour each token by its probability.", "--colorize")] = (
        False
    )
    language: Annotated[
        str | None, _option("Language to highlight; told by a file's name, else python.")
    ] = None
    stats: Annotated[bool, _option("Print speed and memory at the end.", "--stats")] = False
    json: Annotated[bool, _option("Print one JSON object instead of text.", "--json")] = False
    show_scalings: Annotated[
        bool, _option("Print which adapters of --xlora wrote each token.", "--show-scalings")
    ] = False

    def for_file(self, name: str) -> ShowOptions:
        """With the language that a file's name tells, unless one was chosen."""
        found = find_lexer_class_for_filename(name) if self.language is None else None
        return self if found is None else replace(self, language=found.aliases[0])

    def check(self) -> None:
        """Refuse what cannot be shown, before anything is computed."""
        self.lexer()

    def lexer(self) -> Lexer:
        """The lexer for `language`; BadRequestError for one that Pygments does not know."""
        try:
            # It must see the text as it is, so that positions keep their meaning.
            return get_lexer_by_name(self.language or "python", ensurenl=False)
        except ClassNotFound:
            raise BadRequestError(
                f"--language is {self.language!r} (expected a name that Pygments knows, as python)"
            ) from None
