"""`Checkpoint`: everything that a model's files say, opened and checked, weights not yet read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starquill.checkpoint.files import read_json, read_json_if_there
from starquill.checkpoint.hub import ModelFiles
from starquill.checkpoint.mapped import MappedFiles
from starquill.checkpoint.mlx import MlxSource
from starquill.checkpoint.prequantized import PrequantizedSource
from starquill.checkpoint.source import DenseSource, WeightSource, open_headers, open_source
from starquill.checkpoint.stacked import StackedSource
from starquill.checkpoint.tokenizer import Tokenizer, load_tokenizer
from starquill.checkpoint.vocabulary import end_tokens
from starquill.errors import CheckpointError, StarquillError, UnsupportedError
from starquill.models import ARCHITECTURES, architecture
from starquill.models.spec import ArchSpec, ModelConfig


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model on disk."""

    folder: Path
    spec: ArchSpec
    raw_config: Mapping[str, Any]
    config: ModelConfig
    source: WeightSource
    tokenizer: Tokenizer | None
    end_ids: frozenset[int]
    warnings: tuple[str, ...]
    is_folder: bool = True


def open_checkpoint(files: ModelFiles, *, headers_only: bool = False) -> Checkpoint:
    """Open a folder of safetensors (dense or quantized) or a single GGUF file.

    With `headers_only` the weights of a hub model are not downloaded, and cannot be read.
    """
    if files.weights is not None and files.weights.suffix == ".gguf":
        return _open_gguf(files.weights)
    raw = read_json(files.folder / "config.json")
    spec = architecture(raw)
    config = spec.read_config(raw)
    tokenizer = load_tokenizer(files.folder)
    source = _open_tensors(open_headers(files) if headers_only else open_source(files), raw)
    if spec.experts is not None:
        source = StackedSource(source, spec, spec.experts.count(config))
    generation = read_json_if_there(files.folder / "generation_config.json")
    ends, warnings = end_tokens((raw, generation), tokenizer, config.vocab_size)
    warnings = [*source.warnings, *warnings]
    return Checkpoint(files.folder, spec, raw, config, source, tokenizer, ends, tuple(warnings))


def open_mapped(files: ModelFiles, checkpoint: Checkpoint) -> tuple[WeightSource, MappedFiles]:
    """The tensors of an opened checkpoint as views of its files, for what stays on disk."""
    if not checkpoint.is_folder:
        raise UnsupportedError(
            f"{files.weights} cannot be run from disk; write it as a folder with `starquill "
            "quantize` and load that"
        )
    mapped = MappedFiles(open_source(files))
    source = _open_tensors(mapped, checkpoint.raw_config)
    spec = checkpoint.spec
    if spec.experts is not None:
        source = StackedSource(source, spec, spec.experts.count(checkpoint.config))
    return source, mapped


def _open_tensors(source: DenseSource, raw: Mapping[str, Any]) -> WeightSource:
    settings = raw.get("quantization") or raw.get("quantization_config")
    if settings is None:
        return source
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"config.json: quantization is {settings!r:.60} (expected an object)")
    if "quant_method" in settings:
        return PrequantizedSource(source, settings)
    return MlxSource(source, settings)


def _open_gguf(path: Path) -> Checkpoint:
    # The reader is imported here: most runs never need it.
    from starquill.checkpoint.gguf import GgufSource, open_gguf
    from starquill.checkpoint.gguf_tokenizer import tokenizer_definition

    reader = open_gguf(path)
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{path} has a damaged field: {error}") from None
    spec, names = _gguf_architecture(path, fields.get("general.architecture"))
    try:
        made = names.config(
            fields, {t.name: tuple(map(int, t.shape[::-1])) for t in reader.tensors}
        )
        config = spec.read_config(made.raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    source = GgufSource(reader, names)
    try:
        definition, tokenizer_config, notes = tokenizer_definition(fields)
        tokenizer = Tokenizer(definition, tokenizer_config)
    except StarquillError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} has a damaged tokenizer: {error}") from None
    ends, end_notes = end_tokens(
        ({"eos_token_id": fields.get("tokenizer.ggml.eos_token_id")},), tokenizer, config.vocab_size
    )
    warnings = (*made.warnings, *notes, *end_notes)
    return Checkpoint(path.parent, spec, made.raw, config, source, tokenizer, ends, warnings, False)


def _gguf_architecture(path: Path, name: object) -> tuple[ArchSpec, Any]:
    for spec in ARCHITECTURES.values():
        if spec.gguf is not None and spec.gguf.architecture == name:
            return spec, spec.gguf
    known = ", ".join(s.gguf.architecture for s in ARCHITECTURES.values() if s.gguf)
    raise UnsupportedError(f"{path} holds a {name!r} model (implemented from GGUF: {known})")
