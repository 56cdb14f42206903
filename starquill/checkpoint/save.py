"""Writing a model folder: MLX's affine layout for quantized weights, in shards, all or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from starquill.checkpoint.aligned import save_aligned
from starquill.checkpoint.source import INDEX
from starquill.errors import BadRequestError
from starquill.quant.affine import AffineWeight

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SHARD_BYTES = 1 << 30
# What belongs to a model beside config and weights, copied as it is.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "LICENSE",
    "README.md",
)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder that becomes `out` when all went well, and vanishes when not.

    What a process left that was killed at it goes when the same `out` is written again.
    Raises BadRequestError when `out` exists and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadRequestError(f"{out} exists already; name a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    _clear_left(out)
    scratch = Path(tempfile.mkdtemp(prefix=_unfinished(out), dir=out.parent))
    held = _hold(scratch)
    try:
        yield scratch
        for path in scratch.iterdir():
            _sync(path)
        scratch.chmod(0o755)
        if out.exists():
            out.rmdir()
        scratch.rename(out)
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    finally:
        if held is not None:
            os.close(held)


def _unfinished(out: Path) -> str:
    return f".{out.name}.unfinished-"


def _clear_left(out: Path) -> None:
    for left in out.parent.iterdir():
        if left.name.startswith(_unfinished(out)) and left.is_dir() and not left.is_symlink():
            held = _hold(left)
            if held is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(held)


def _hold(folder: Path) -> int | None:
    """A lock that goes with its process; None where another has it, or there are none."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ShardWriter:
    """Collects tensors and writes a shard whenever enough have come: memory stays bounded."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self._packings: dict[str, tuple[int, int]] = {}
        self.total_bytes = 0

    def add(self, name: str, value: Tensor | AffineWeight) -> None:
        """Add one tensor under Hugging Face's name; a quantized one becomes MLX's triplet."""
        if isinstance(value, Tensor):
            self._put(name, value)
        else:
            module = name.removesuffix(".weight")
            self._packings[module] = (value.bits, value.group)
            # Rows that end within a word are not MLX's layout; they stay bytes.
            whole = value.packed.shape[-1] % 4 == 0
            self._put(name, value.packed.view(torch.uint32) if whole else value.packed)
            self._put(f"{module}.scales", value.scales)
            self._put(f"{module}.biases", value.biases)
        if sum(t.nbytes for t in self._pending.values()) >= self._shard_bytes:
            self._flush()

    def _put(self, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor.contiguous()
        self.total_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self._folder / f"shard-{len(self._shards)}.safetensors"
        save_aligned(self._pending, path, {"format": "mlx"})
        path.chmod(0o644)
        self._shards.append((path, list(self._pending)))
        self._pending = {}

    def finish(self, raw_config: Mapping[str, Any]) -> None:
        """Write the last shard, the index and `config.json`."""
        if self._pending:
            self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._folder / (final if count > 1 else "model.safetensors"))
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            _write_json(self._folder / INDEX, index)
        kept = {k: v for k, v in raw_config.items() if not k.startswith("quantization")}
        if self._packings:
            # mlx-lm reads the first key, transformers the second.
            kept |= dict.fromkeys(("quantization", "quantization_config"), self._settings())
        _write_json(self._folder / "config.json", kept)

    def _settings(self) -> dict[str, Any]:
        """MLX's settings: the commonest packing, and by module those that differ."""
        (bits, group), _ = Counter(self._packings.values()).most_common(1)[0]
        overrides = {
            module: {"bits": b, "group_size": g}
            for module, (b, g) in sorted(self._packings.items())
            if (b, g) != (bits, group)
        }
        return {"group_size": group, "bits": bits, "mode": "affine", **overrides}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, generation config and licence, where there are any."""
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
