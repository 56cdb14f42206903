"""Weights that stay on disk: mapped files of which only what a step is about to read is in memory.

`ReadAhead` has a thread that reads the next part while the one before computes, and lets go of
what was used when its room is full. `ExpertCache` fetches the experts that were chosen.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from starquill.errors import CheckpointError

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# Not in Python's mmap, whose madvise holds the interpreter's lock besides.
_RANDOM, _WILLNEED, _DONTNEED = 1, 3, 4
_POPULATE_READ = 22 if sys.platform == "linux" else None
_AHEAD = 2  # parts that are read before they are needed, where there is room
_LOOKED_UP = 16 << 20  # bytes of an embedding that may gather before they are let go
_ROW_PAGES = 6  # a row's integers, scales and biases, each perhaps over a page's edge
_PIECE = 16 << 20  # bytes that are announced at a time
_REQUEST = 1 << 20  # bytes; the system cuts off what is announced beyond its own limit


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    except (OSError, TypeError, AttributeError):  # Windows
        return None
    return libc


_LIBC = _libc()


@dataclass(frozen=True, eq=False)
class Extent:
    """Whole pages of a file that is mapped for reading alone; `data` uint8 views them."""

    path: str
    data: np.ndarray
    file: int
    start: int  # in the file

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def pieces(self) -> Iterator[Extent]:
        """In the file's order, each of no more than some megabytes."""
        for at in range(0, self.nbytes, _PIECE):
            data = self.data[at : at + _PIECE]
            yield Extent(self.path, data, self.file, self.start + at)

    def announce(self) -> None:
        """Let the system begin to read; returns at once."""
        for at in range(0, self.nbytes, _REQUEST):
            self._advise(_WILLNEED, at, min(_REQUEST, self.nbytes - at))

    def read(self) -> None:
        """Have all of it in memory. Raises CheckpointError where the disk fails."""
        if _POPULATE_READ is not None and self._advise(_POPULATE_READ):
            return
        try:
            # In chunks, for a system that has no call for it: what cannot be read is told here,
            # where touching a page would end the process.
            for at in range(0, self.nbytes, 8 << 20):
                if hasattr(os, "pread"):
                    count = min(8 << 20, self.nbytes - at)
                    if len(os.pread(self.file, count, self.start + at)) < count:
                        raise CheckpointError(f"{self.path} became shorter while in use")
                self.data[at : at + (8 << 20) : PAGE].sum()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None

    def drop(self, *, cached: bool) -> None:
        """Let go of the memory; with `cached` the system's own copy stays while it has room."""
        self._advise(_DONTNEED)
        if not cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.file, self.start, self.nbytes, os.POSIX_FADV_DONTNEED)

    def at_random(self) -> None:
        """It is read here and there: nothing is to be read around it."""
        self._advise(_RANDOM)

    def _advise(self, advice: int, at: int = 0, count: int | None = None) -> bool:
        if _LIBC is None or not self.nbytes:
            return False
        count = self.nbytes if count is None else count
        return _LIBC.madvise(self.data.ctypes.data + at, count, advice) == 0


def reads_far_ahead(file: int) -> bool:
    """Whether the system keeps the disk busy by itself when an open file is read in its order.

    Linux tells how far it reads ahead; announcing besides costs more there than it brings, since
    what is announced comes in single pages and not in large ones.
    """
    try:
        device = os.fstat(file).st_dev
        name = f"{os.major(device)}:{os.minor(device)}"
        return int(Path(f"/sys/class/bdi/{name}/read_ahead_kb").read_text()) << 10 >= 2 * _REQUEST
    except (OSError, ValueError, AttributeError):
        return False


def size_of(extents: Iterable[Extent]) -> int:
    return sum(extent.nbytes for extent in extents)


class ReadAhead:
    """The parts of a model that are on disk, in the order in which a step uses them.

    At most `room` bytes of them are in memory, but for a part that is larger and what it follows.
    Where all have room they stay. `cached` says that the system may keep what is let go, to be had
    again without the disk.
    """

    def __init__(
        self, parts: Mapping[Hashable, Sequence[Extent]], room: float, *, cached: bool = True
    ) -> None:
        """A part that is only looked up (`look_up`) must be named in `parts` last."""
        self.parts = {name: tuple(extents) for name, extents in parts.items() if extents}
        files = {extent.file for extents in self.parts.values() for extent in extents}
        self._announces = not all(reads_far_ahead(file) for file in files)
        self.room, self.cached = room, cached
        self.read_bytes = 0
        self.peak = 0
        self._order: list[Hashable] = list(self.parts)
        self._looked_up: dict[Hashable, int] = {}
        self._state = _State(self)
        self._thread: threading.Thread | None = None

    def only_looked_up(self, name: Hashable) -> None:
        """`name` is an embedding that is no head: single rows of it are read, none ahead."""
        if name in self.parts:
            self._order.remove(name)
            self._looked_up[name] = 0
            for extent in self.parts[name]:
                extent.at_random()

    @property
    def resident(self) -> dict[Hashable, int]:
        """The parts that are in memory, with their bytes."""
        with self._state.changed:
            return dict(self._state.resident)

    def use(self, name: Hashable) -> None:
        """Wait until `name` is in memory; what follows it is read from now on.

        Those that are not on disk may be named too.
        """
        if name not in self.parts or name in self._looked_up:
            return
        self._start()
        state = self._state
        with state.changed:
            state.current = self._order.index(name)
            state.changed.notify_all()
            while name not in state.resident and state.failure is None:
                state.changed.wait()
            if state.failure is not None:
                failure, state.failure = state.failure, None
                raise failure

    def look_up(self, name: Hashable, rows: int) -> None:
        """`rows` rows of an embedding are about to be read."""
        if name not in self._looked_up:
            return
        self._looked_up[name] += rows * _ROW_PAGES * PAGE
        if self._looked_up[name] > min(_LOOKED_UP, self.room):
            self._looked_up[name] = 0
            for extent in self.parts[name]:
                extent.drop(cached=True)

    def close(self) -> None:
        """End the thread."""
        self._state.end()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_read_on, args=(self._state,), name="starquill-disk", daemon=True
            )
            weakref.finalize(self, self._state.end)
            self._thread.start()

    def in_order(self, name: Hashable) -> Iterator[tuple[Sequence[Extent], Extent]]:
        """What to read for `name`, and before each what to announce: always one piece more."""
        if not self._announces:
            yield from (((), extent) for extent in self.parts[name])
            return
        pieces = [piece for extent in self.parts[name] for piece in extent.pieces()]
        follower = self._order[(self._order.index(name) + 1) % len(self._order)]
        after = [] if follower in self.resident else list(self.parts[follower][0].pieces())
        ahead = [*pieces[1:], *after[:1]]
        for number, piece in enumerate(pieces):
            first = [piece] if number == 0 else []
            yield (*first, *ahead[number : number + 1]), piece

    def next_to_read(self, current: int) -> tuple[Hashable, list[Hashable]] | None:
        """What to read now and what to let go for it; called with the lock held.

        Of what is in memory that goes which is needed last: just what was used.
        """
        resident, count = self._state.resident, len(self._order)
        for ahead in range(min(_AHEAD + 1, count)):
            name = self._order[(current + ahead) % count]
            if name in resident:
                continue
            needed = sum(resident.values()) + size_of(self.parts[name]) - self.room
            leaving: list[Hashable] = []
            for later in range(count - 1, ahead, -1):
                other = self._order[(current + later) % count]
                if needed > 0 and other in resident:
                    leaving.append(other)
                    needed -= resident[other]
            if needed <= 0 or ahead == 0:
                return name, leaving
            return None
        return None


class _State:
    """What the two threads share. The reading one must not keep the `ReadAhead` alive."""

    def __init__(self, owner: ReadAhead) -> None:
        self.owner = weakref.ref(owner)
        self.changed = threading.Condition()
        self.resident: dict[Hashable, int] = {}
        self.current: int | None = None
        self.failure: CheckpointError | None = None
        self.ended = False

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()


def _read_on(state: _State) -> None:
    while True:
        with state.changed:
            while (work := _work(state)) is None and not state.ended:
                state.changed.wait()
            if state.ended or work is None:
                return
            owner, name, leaving = work
            for other in leaving:
                del state.resident[other]
        _exchange(state, owner, name, leaving)
        del owner, work


def _work(state: _State) -> tuple[ReadAhead, Hashable, list[Hashable]] | None:
    owner = state.owner()
    if owner is None or state.current is None or state.failure is not None:
        return None
    found = owner.next_to_read(state.current)
    return None if found is None else (owner, *found)


def _exchange(state: _State, owner: ReadAhead, name: Hashable, leaving: list[Hashable]) -> None:
    for other in leaving:
        # Whole: the system is quicker at that than at pieces.
        for extent in owner.parts[other]:
            extent.drop(cached=owner.cached)
    failure = None
    try:
        for announced, extent in owner.in_order(name):
            for ahead in announced:
                ahead.announce()
            extent.read()
    except CheckpointError as error:
        failure = error
    with state.changed:
        state.failure = failure
        if failure is None:
            size = state.resident[name] = size_of(owner.parts[name])
            owner.read_bytes += size
            owner.peak = max(owner.peak, sum(state.resident.values()))
        state.changed.notify_all()


class ExpertCache:
    """The experts of all layers on disk, fetched as they are chosen; the longest unused leave."""

    def __init__(self, room: float, *, cached: bool = True) -> None:
        self.room, self.cached = room, cached
        self.fetched = 0  # experts that were not in memory
        self.peak = 0
        self._resident: OrderedDict[Hashable, tuple[Sequence[Extent], int]] = OrderedDict()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        return self._bytes

    def fetch(self, wanted: Mapping[Hashable, Sequence[Extent]]) -> None:
        """Have all of `wanted` in memory; others make room, and of `wanted` none."""
        missing = {name: parts for name, parts in wanted.items() if name not in self._resident}
        for name in wanted:
            if name not in missing:
                self._resident.move_to_end(name)
        sizes = {name: size_of(extents) for name, extents in missing.items()}
        self._make_room(sum(sizes.values()), wanted)
        for extents in missing.values():
            for extent in extents:
                extent.announce()
        for name, extents in missing.items():
            for extent in extents:
                extent.read()
            self._resident[name] = (extents, sizes[name])
            self._bytes += sizes[name]
        self.fetched += len(missing)
        self.peak = max(self.peak, self._bytes)

    def _make_room(self, needed: int, wanted: Mapping[Hashable, Sequence[Extent]]) -> None:
        for name in [name for name in self._resident if name not in wanted]:
            if self._bytes + needed <= self.room:
                return
            extents, size = self._resident.pop(name)
            self._bytes -= size
            for extent in extents:
                extent.drop(cached=self.cached)


@dataclass(frozen=True, eq=False)
class LayerExperts:
    """The experts of one layer, each the pages that it needs, in the cache of all."""

    layer: int
    experts: Sequence[Sequence[Extent]]
    cache: ExpertCache

    def fetch(self, counts: Tensor) -> None:
        """Those of `counts` `[E]` that have rows are about to work, and are all in memory then."""
        chosen = [number for number, count in enumerate(counts.tolist()) if count]
        self.cache.fetch({(self.layer, number): self.experts[number] for number in chosen})
