"""`WeightSource`: named tensors on disk, read one at a time. Safetensors, single or sharded."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from starquill.checkpoint.files import read_json
from starquill.checkpoint.hub import PICKLE_REFUSED, ModelFiles
from starquill.errors import CheckpointError, UnsupportedError, listing

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U32": 4, "I16": 2}


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor. `dtype` is safetensors' name: BF16, F32..."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def parameters(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.parameters * _BYTES.get(self.dtype, 1)


class WeightSource(Protocol):
    """Tensors by name. `infos` costs no reading of weights; `read` reads one tensor."""

    @property
    def infos(self) -> dict[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor: ...


class SafetensorsSource:
    """One or many safetensors files, each tensor belonging to exactly one of them."""

    def __init__(self, place: dict[str, Path]) -> None:
        """`place` says which file each tensor is read from; headers are checked at once."""
        self._place = place
        self._files: dict[Path, Any] = {path: open_file(path) for path in set(place.values())}
        self.infos: dict[str, TensorInfo] = {}
        held = {path: set(file.keys()) for path, file in self._files.items()}
        absent = defaultdict(list)
        for name, path in place.items():
            if name not in held[path]:
                absent[path].append(name)
                continue
            header = self._files[path].get_slice(name)
            self.infos[name] = TensorInfo(header.get_dtype(), tuple(header.get_shape()))
        for path, names in absent.items():
            raise CheckpointError(
                f"{path} lacks tensors that {INDEX} places there: {listing(sorted(names))}; "
                "the index and the shards are from different downloads"
            )

    def read(self, name: str) -> Tensor:
        path = self._place[name]
        try:
            tensor: Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from None
        return tensor


def open_file(path: Path) -> Any:
    """Open one file; its header is validated against the file's size by the library."""
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty (0 bytes); download it again")
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete ({path.stat().st_size:,} bytes): {error}; "
            "download it again"
        ) from None


def open_source(files: ModelFiles) -> SafetensorsSource:
    """Find and open the weight files of a model.

    With an index, the index alone decides; files it does not name are ignored. Without one,
    every `model*.safetensors` is read and a tensor found twice is an error.
    """
    folder = files.folder
    if files.weights is not None:
        return SafetensorsSource(_tensors_in([files.weights]))
    if (folder / INDEX).exists():
        return SafetensorsSource(_indexed(folder))
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        candidates = sorted(folder.glob("*.safetensors"))
        paths = [p for p in candidates if not p.name.startswith("adapter")]
    if not paths:
        raise _no_weights(folder)
    _check_shards_complete(folder, (path.name for path in paths))
    return SafetensorsSource(_tensors_in(paths))


def _no_weights(folder: Path) -> CheckpointError | UnsupportedError:
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if pickles:
        return UnsupportedError(PICKLE_REFUSED.format(pickles[0]))
    return CheckpointError(f"{folder} has no .safetensors file")


def _tensors_in(paths: list[Path]) -> dict[str, Path]:
    places = [(name, path) for path in paths for name in tuple(open_file(path).keys())]
    twice = [name for name, count in Counter(name for name, _ in places).items() if count > 1]
    if twice:
        raise CheckpointError(
            f"{paths[0].parent} holds tensors in more than one file and no {INDEX} to tell which "
            f"counts: {listing(sorted(twice))}; remove the stray file"
        )
    return dict(places)


def _check_shards_complete(folder: Path, names: Iterable[str]) -> None:
    series = defaultdict(set)
    for name in names:
        if match := _SHARD.fullmatch(name):
            series[match[1], int(match[3])].add(int(match[2]))
    missing = [
        f"{stem}-{number:05d}-of-{total:05d}.safetensors"
        for (stem, total), found in series.items()
        for number in range(1, total + 1)
        if number not in found
    ]
    if missing:
        raise CheckpointError(f"{folder} lacks shards: {listing(missing)}; download it again")


def _indexed(folder: Path) -> dict[str, Path]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map (expected tensor -> file name)")
    wrong = [str(file) for file in weight_map.values() if not _is_plain_name(file)]
    if wrong:
        raise CheckpointError(
            f"{folder / INDEX} names files outside its folder: {listing(sorted(set(wrong)))}"
        )
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks shards that {INDEX} names: {listing(missing)}; download it again"
        )
    return {name: folder / file for name, file in weight_map.items()}


def _is_plain_name(file: object) -> bool:
    """A name in the folder itself: no separators, no `..`, no drive."""
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        return False
    return PurePosixPath(file).name == file and "\\" not in file and ":" not in file
