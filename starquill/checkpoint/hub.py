"""Where a model's files are: the embedded one, a folder, a file, or a repository on the hub."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, replace
from pathlib import Path

from starquill.checkpoint.files import exists
from starquill.errors import BadRequestError, CheckpointError, UnsupportedError

EMBEDDED_MODEL = "default"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Faults of this machine, not of the network.
_LOCAL_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
_SMALL_FILES, _WEIGHTS = ("*.json", "*.jinja"), ("*.json", "*.jinja", "*.safetensors")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapters.safetensors")
# An X-LoRA's adapters are in folders of their own, which may lie deeper: `*` goes over slashes.
_XLORA_FILES = (
    "xlora_config.json",
    "xlora_classifier.safetensors",
    "*ordering*.json",
    *ADAPTER_FILES[:2],
    *(f"*/{name}" for name in ADAPTER_FILES[:2]),
)


@dataclass(frozen=True)
class ModelFiles:
    """A folder with config and tokenizer, and the one weight file if the user named it.

    `repository` is set for a hub model, whose weights may not be in the folder yet.
    """

    folder: Path
    weights: Path | None = None
    repository: str | None = None
    revision: str | None = None


def embedded_model() -> Path:
    """The folder of the small model that ships inside the package."""
    return Path(__file__).parent.parent / "assets" / "tiny"


def locate(model: str | Path, revision: str | None = None) -> ModelFiles:
    """Find `model`: `default`, an existing folder or file, or a hub id.

    Of a hub model only the small files are downloaded: see `fetch_weights`.
    """
    hub_id = _as_hub_id(model)
    if revision is not None and hub_id is None:
        raise BadRequestError(f"--revision is for hub models, and {str(model)!r} is none")
    if hub_id is not None:
        return ModelFiles(
            _download(hub_id, revision, _SMALL_FILES), repository=hub_id, revision=revision
        )
    if model == EMBEDDED_MODEL:
        return ModelFiles(embedded_model())
    path = _expanded(model)
    if exists(path) and path.is_dir():
        return ModelFiles(path)
    if exists(path) and path.is_file():
        return _single_file(path)
    raise CheckpointError(
        f"no model at {str(model)!r}: expected {EMBEDDED_MODEL!r}, a folder, a .safetensors or "
        ".gguf file, or a hub id such as bigcode/starcoder2-3b"
    )


def locate_adapter(adapter: str | Path) -> Path:
    """The folder of an adapter; that of a hub id is downloaded."""
    hub_id = _as_hub_id(adapter)
    return _expanded(adapter) if hub_id is None else _download(hub_id, None, ADAPTER_FILES)


def locate_xlora(xlora: str | Path) -> Path:
    """The folder of an X-LoRA, or a file in it; that of a hub id is downloaded with its folders."""
    hub_id = _as_hub_id(xlora)
    return _expanded(xlora) if hub_id is None else _download(hub_id, None, _XLORA_FILES, ())


def _expanded(model: str | Path) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~ of a user that does not exist
        return Path(model)


def _as_hub_id(model: str | Path) -> str | None:
    """`model` if it looks like `owner/name` and nothing here has that path."""
    if not isinstance(model, str) or exists(_expanded(model)):
        return None
    return model if _HUB_ID.fullmatch(model) else None


def _single_file(path: Path) -> ModelFiles:
    if path.suffix in (".safetensors", ".gguf"):
        return ModelFiles(path.parent, path)
    if path.suffix in (".bin", ".pt", ".pth"):
        raise UnsupportedError(PICKLE_REFUSED.format(path))
    raise UnsupportedError(f"{path}: expected a .safetensors or .gguf file, or a model's folder")


PICKLE_REFUSED = (
    "{}: PyTorch pickle files can run code when opened and are refused; use a .safetensors copy "
    "(transformers: model.save_pretrained writes one)"
)


def fetch_weights(files: ModelFiles) -> ModelFiles:
    """Download the weights of a hub model; nothing to do for others."""
    if files.repository is None:
        return files
    folder = _download(files.repository, files.revision, _WEIGHTS)
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedError(
            f"{files.repository} has no .safetensors files; PyTorch pickle files can run code "
            "when opened and are refused"
        )
    return replace(files, folder=folder)


def remote_headers(repository: str, revision: str | None) -> dict[str, tuple[str, list[int]]]:
    """dtype and shape of every tensor of a hub model, from its files' headers alone."""
    from huggingface_hub import get_safetensors_metadata

    try:
        metadata = get_safetensors_metadata(repository, revision=revision)
    except Exception as error:
        raise _explained(error, repository, revision) from None
    return {
        name: (str(tensor.dtype), list(tensor.shape))
        for file in metadata.files_metadata.values()
        for name, tensor in file.tensors.items()
    }


def _download(
    repository: str,
    revision: str | None,
    patterns: tuple[str, ...],
    ignored: tuple[str, ...] = ("*/*",),
) -> Path:
    # Imported here: huggingface_hub takes a while to import and most runs never need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
            )
        )
    except Exception as error:  # the library and what it downloads with have many kinds
        raise _explained(error, repository, revision) from None


def _explained(error: Exception, repository: str, revision: str | None) -> Exception:
    """What a failed download means for the user."""
    from huggingface_hub import errors

    said = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            f"{repository} is gated: accept its terms on the hub and log in with `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(f"{repository} has no revision {revision!r}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            f"no folder {repository!r} here and no such model on the hub (or it is private: "
            "log in with `hf auth login`)"
        )
    if isinstance(error, errors.NotASafetensorsRepoError):
        return UnsupportedError(f"{repository} has no .safetensors files: {said}")
    if isinstance(error, errors.HFValidationError):
        return BadRequestError(f"{repository!r} is no hub id: {said}")
    if isinstance(error, OSError) and error.errno in _LOCAL_FAULTS:
        return error
    return CheckpointError(
        f"no folder {repository!r} here, and the hub cannot be reached ({said}); check the "
        "network, or give the folder of a downloaded copy"
    )
