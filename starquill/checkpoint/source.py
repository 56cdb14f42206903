"""`WeightSource`: named tensors on disk, read one at a time. Safetensors, single or sharded."""

from __future__ import annotations

import json
import math
import mmap
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from starquill.checkpoint.files import exists, read_json
from starquill.checkpoint.hub import PICKLE_REFUSED, ModelFiles, fetch_weights, remote_headers
from starquill.errors import CheckpointError, UnsupportedError, listing
from starquill.kernels.memory import HUGEPAGE, for_weights
from starquill.quant.affine import AffineWeight
from starquill.quant.weight import PermutedWeight

_MAPPED_FROM = 1 << 20  # bytes
_NORESERVE = 0x4000  # Linux's, which Python has since 3.13
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "U32": torch.uint32,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of one tensor.

    `dtype` is safetensors' name (BF16, F32...) or a scheme of `quant.affine` (q4-g64).
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def is_quantized(self) -> bool:
        return self.dtype.startswith("q")


_FileKey = tuple[Path, int, int, int]  # a path with its device, inode and size
Stored = Tensor | AffineWeight | PermutedWeight


class WeightSource(Protocol):
    """Tensors by name. `infos` costs no reading of weights; `read` reads one tensor."""

    @property
    def infos(self) -> dict[str, TensorInfo]: ...

    @property
    def warnings(self) -> Sequence[str]: ...

    def read(self, name: str) -> Stored: ...


class DenseSource(Protocol):
    """A source whose tensors are just as they are stored."""

    @property
    def infos(self) -> dict[str, TensorInfo]: ...

    @property
    def warnings(self) -> Sequence[str]: ...

    def read(self, name: str) -> Tensor: ...

    def map(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class _Location:
    """Where a tensor's bytes are in a file."""

    info: TensorInfo
    start: int


def _map_file(path: Path) -> mmap.mmap:
    """A whole file in memory, which goes when the last tensor in it does.

    Whole, because the system then has it in pages of 2 MiB, as far as it keeps files in such: a
    sixteenth of a step's time goes into looking up small ones.
    """
    with path.open("rb") as file:
        if sys.platform != "linux":
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mode = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | _NORESERVE, mode)
    with suppress(OSError):  # a kernel without them
        mapped.madvise(HUGEPAGE)
    return mapped


def _part(mapped: mmap.mmap, start: int, count: int) -> Tensor:
    """Bytes `[count]` uint8 of a file, which the system begins to read."""
    if hasattr(mmap, "MADV_WILLNEED"):
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, first, start + count - first)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=count)


class SafetensorsSource:
    """One or many safetensors files, each tensor belonging to exactly one of them.

    Tensors are read, unless `map` is asked for: what is read is what is resident, and a file
    larger than memory opens like any other.
    """

    def __init__(self, place: dict[str, Path], headers: dict[Path, dict[str, _Location]]) -> None:
        """`place` says which file each tensor is read from, `headers` what the files hold."""
        self._place = place
        self.warnings: tuple[str, ...] = ()
        absent = defaultdict(list)
        for name, path in place.items():
            if name not in headers[path]:
                absent[path].append(name)
        if absent:
            lacking = [f"{path} lacks {listing(sorted(names))}" for path, names in absent.items()]
            raise CheckpointError(
                f"{'; '.join(lacking)}, which {INDEX} places there; the index and the shards are "
                "from different downloads"
            )
        self._locations = {name: headers[path][name] for name, path in place.items()}
        self.infos = {name: location.info for name, location in self._locations.items()}
        self._mapped: WeakValueDictionary[_FileKey, mmap.mmap] = WeakValueDictionary()

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        count, path = self._size(name), self._place[name]
        data = for_weights([count], torch.uint8)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(self._locations[name].start)
                done = _read_into(file, memoryview(data.numpy().data))
        except OSError as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error.strerror}") from None
        if done != count:
            raise CheckpointError(f"{path} became shorter while it was read")
        return self.shaped(name, data)

    def map(self, name: str) -> Tensor:
        """One tensor, mapped from its file: for what is kept just as it is stored.

        Writing to it changes memory alone. The system reads ahead.
        """
        count, path = self._size(name), self._place[name]
        if count < _MAPPED_FROM:
            return self.read(name)
        start = self._locations[name].start
        try:
            found = path.stat()
            key = (path, found.st_dev, found.st_ino, found.st_size)  # not what it has been before
            file = self._mapped.get(key) or _map_file(path)
        except (OSError, ValueError) as error:  # ValueError: it is empty
            raise CheckpointError(f"{path}: {name} cannot be mapped: {error}") from None
        self._mapped[key] = file
        if start + count > len(file):
            raise CheckpointError(f"{path} became shorter while it was read")
        return self.shaped(name, _part(file, start, count))

    def _size(self, name: str) -> int:
        info = self._locations[name].info
        if info.dtype not in DTYPES:
            path = self._place[name]
            raise UnsupportedError(f"{path}: {name} is {info.dtype}, which is not read")
        return info.nbytes

    def where(self, name: str) -> tuple[Path, int]:
        """The file that has a tensor, and where in it its bytes begin."""
        self._size(name)
        return self._place[name], self._locations[name].start

    def shaped(self, name: str, data: Tensor) -> Tensor:
        """Its bytes `[n]` uint8 as what they stand for."""
        info = self._locations[name].info
        return data.view(DTYPES[info.dtype]).reshape(info.shape)


def _read_into(file: FileIO, buffer: memoryview) -> int:
    """Bytes read; fewer than the buffer holds only at the file's end."""
    done = 0
    while done < len(buffer):
        # Linux reads at most 2 GiB at once.
        got = file.readinto(buffer[done:])
        if not got:
            break
        done += got
    return done


def read_header(path: Path) -> dict[str, _Location]:
    """Every tensor of one file. The library checks the header against the file's size."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if size == 0:
        raise CheckpointError(f"{path} is empty (0 bytes); download it again")
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete ({size:,} bytes): {error}; download it again"
        ) from None
    entries.pop("__metadata__", None)
    return {
        name: _Location(
            TensorInfo(entry["dtype"], tuple(entry["shape"]), end - begin), 8 + length + begin
        )
        for name, entry in entries.items()
        for begin, end in [entry["data_offsets"]]
    }


class HeaderSource:
    """Tensors that are known by their headers and cannot be read."""

    def __init__(self, infos: dict[str, TensorInfo]) -> None:
        self.infos = infos
        self.warnings: tuple[str, ...] = ()

    def read(self, name: str) -> Tensor:
        raise AssertionError(f"{name} is known by its header alone")

    map = read


def open_headers(files: ModelFiles) -> SafetensorsSource | HeaderSource:
    """What the headers say; those of a hub model are fetched alone if its weights are not here."""
    if files.repository is None or any(files.folder.glob("*.safetensors")):
        return open_source(files)
    headers = remote_headers(files.repository, files.revision)
    return HeaderSource(
        {
            name: TensorInfo(dtype, tuple(shape), math.prod(shape) * _itemsize(dtype))
            for name, (dtype, shape) in headers.items()
        }
    )


def _itemsize(dtype: str) -> int:
    return DTYPES[dtype].itemsize if dtype in DTYPES else 1


def open_source(files: ModelFiles) -> SafetensorsSource:
    """Find and open the weight files of a model.

    With an index, the index alone decides; files it does not name are ignored. Without one,
    every `model*.safetensors` is read and a tensor found twice is an error.
    """
    files = fetch_weights(files)
    folder = files.folder
    if files.weights is not None:
        return _all_of([files.weights])
    if (folder / INDEX).exists():
        return _indexed(folder)
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        candidates = sorted(folder.glob("*.safetensors"))
        paths = [p for p in candidates if not p.name.startswith("adapter")]
    if not paths:
        raise _no_weights(folder)
    _check_shards_complete(folder, (path.name for path in paths))
    return _all_of(paths)


def _no_weights(folder: Path) -> CheckpointError | UnsupportedError:
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    if pickles:
        return UnsupportedError(PICKLE_REFUSED.format(pickles[0]))
    return CheckpointError(f"{folder} has no .safetensors file")


def _all_of(paths: list[Path]) -> SafetensorsSource:
    headers = {path: read_header(path) for path in paths}
    places = [(name, path) for path, header in headers.items() for name in header]
    twice = [name for name, count in Counter(name for name, _ in places).items() if count > 1]
    if twice:
        raise CheckpointError(
            f"{paths[0].parent} holds tensors in more than one file and no {INDEX} to tell which "
            f"counts: {listing(sorted(twice))}; remove the stray file"
        )
    return SafetensorsSource(dict(places), headers)


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


def _indexed(folder: Path) -> SafetensorsSource:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map (expected tensor -> file name)")
    wrong = [str(file) for file in weight_map.values() if not _is_plain_name(file)]
    if wrong:
        raise CheckpointError(
            f"{folder / INDEX} names files outside its folder, or no .safetensors files: "
            f"{listing(sorted(set(wrong)))}"
        )
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not exists(folder / name)]
    if missing:
        raise CheckpointError(
            f"{folder} lacks shards that {INDEX} names: {listing(missing)}; download it again"
        )
    place = {name: folder / file for name, file in weight_map.items()}
    return SafetensorsSource(place, {folder / file: read_header(folder / file) for file in files})


def _is_plain_name(file: object) -> bool:
    """A name in the folder itself: no separators, no `..`, no drive."""
    if not isinstance(file, str) or not file.endswith(".safetensors"):
        return False
    return PurePosixPath(file).name == file and "\\" not in file and ":" not in file
