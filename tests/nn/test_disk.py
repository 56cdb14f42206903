"""What is read ahead and what is let go, on real mapped files."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starquill.errors import CheckpointError
from starquill.nn import disk
from starquill.nn.disk import PAGE, ExpertCache, Extent, ReadAhead

PART = 4 * PAGE


def extents(folder: Path, count: int) -> list[Extent]:
    """So many parts of a file, each of four pages."""
    path = folder / "parts"
    path.write_bytes(bytes(range(count)) * PART)
    file = path.open("rb")
    data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    found = [
        Extent(str(path), data[n * PART : (n + 1) * PART], file.fileno(), n * PART)
        for n in range(count)
    ]
    weakref.finalize(data, file.close)
    return found


def ahead_of(folder: Path, count: int, room: float) -> ReadAhead:
    return ReadAhead({n: [e] for n, e in enumerate(extents(folder, count))}, room)


def settle(ahead: ReadAhead, done: Callable[[dict[object, int]], bool]) -> None:
    """Wait for the reading thread until `done` of what is resident."""
    with ahead._state.changed:
        assert ahead._state.changed.wait_for(lambda: done(ahead._state.resident), timeout=60)


def test_the_next_part_is_read_while_one_is_used(tmp_path: Path) -> None:
    ahead = ahead_of(tmp_path, 5, 2 * PART)
    for step in range(12):
        here = step % 5
        ahead.use(here)
        settle(ahead, lambda resident, here=here: set(resident) == {here, (here + 1) % 5})  # type: ignore[misc]
    assert ahead.peak == 2 * PART
    assert ahead.read_bytes == 13 * PART
    ahead.close()


def test_with_room_for_all_nothing_is_read_twice(tmp_path: Path) -> None:
    ahead = ahead_of(tmp_path, 5, 5 * PART)
    for step in range(20):
        ahead.use(step % 5)
    assert ahead.read_bytes == 5 * PART
    assert set(ahead.resident) == set(range(5))
    ahead.close()


def test_room_beyond_what_is_read_ahead_saves_reading(tmp_path: Path) -> None:
    """Who goes in a circle needs last what was used just now: that goes, not what is oldest."""
    ahead = ahead_of(tmp_path, 8, 6 * PART)
    for step in range(8 * 10):
        ahead.use(step % 8)
    assert ahead.peak <= 6 * PART
    assert ahead.read_bytes < 0.7 * 80 * PART
    ahead.close()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    room=st.integers(1, 20),
    steps=st.lists(st.integers(0, 5), max_size=25),
)
def test_any_order_ends_and_keeps_to_its_room(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], room: int, steps: list[int]
) -> None:
    pages = iter(extents(tmp_path_factory.mktemp("pages"), 2 * sum(sizes)))
    ahead = ReadAhead(
        {n: [next(pages) for _ in range(size)] for n, size in enumerate(sizes)}, room * PART
    )
    for step in steps:
        ahead.use(step % len(sizes))
        assert step % len(sizes) in ahead.parts
    assert ahead.peak <= PART * max(room, max(sizes))
    ahead.close()


def test_a_disk_that_fails_is_told_and_may_recover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = ahead_of(tmp_path, 3, 2 * PART)
    sound = Extent.read

    def broken(extent: Extent) -> None:
        raise CheckpointError(f"{extent.path} cannot be read: Input/output error")

    monkeypatch.setattr(Extent, "read", broken)
    with pytest.raises(CheckpointError, match="parts cannot be read: Input/output error"):
        ahead.use(0)
    monkeypatch.setattr(Extent, "read", sound)
    ahead.use(0)
    ahead.close()


def test_the_thread_ends_with_its_model(tmp_path: Path) -> None:
    ahead = ahead_of(tmp_path, 3, 2 * PART)
    ahead.use(0)
    thread = ahead._thread
    assert thread is not None
    del ahead
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert threading.current_thread().is_alive()


def test_without_advice_of_the_system_it_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("starquill.nn.disk._LIBC", None)
    ahead = ahead_of(tmp_path, 4, 2 * PART)
    for part in range(4):
        ahead.use(part)
    assert ahead.read_bytes >= 4 * PART
    ahead.close()


@pytest.mark.parametrize("advice", [True, False])
def test_a_file_that_became_shorter_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: bool
) -> None:
    """Touching what is gone would end the process."""
    if not advice:
        monkeypatch.setattr("starquill.nn.disk._LIBC", None)
    found = extents(tmp_path, 3)
    os.truncate(tmp_path / "parts", PART)
    with pytest.raises(CheckpointError, match="parts became shorter while in use"):
        found[2].read()
    found[0].read()


@pytest.mark.parametrize("announces", [True, False])
def test_all_of_a_part_is_read_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announces: bool
) -> None:
    """Whether or not the system needs to be told what comes next; if so, before it is read."""
    monkeypatch.setattr(disk, "reads_far_ahead", lambda _: not announces)
    monkeypatch.setattr(disk, "_PIECE", PAGE)
    seen: list[tuple[str, int, int]] = []
    for name in ("announce", "read"):
        monkeypatch.setattr(
            Extent, name, lambda e, name=name: seen.append((name, e.start, e.nbytes))
        )
    ahead = ahead_of(tmp_path, 4, 2 * PART)
    ahead.use(0)
    settle(ahead, lambda resident: set(resident) == {0, 1})
    ahead.close()
    reads = [(start, size) for what, start, size in seen if what == "read"]
    size = PAGE if announces else PART
    assert reads == [(start, size) for start in range(0, 2 * PART, size)]
    told = [start for what, start, _ in seen if what == "announce"]
    assert set(told) == (set(range(0, 2 * PART + 1, PAGE)) if announces else set())
    for start in told[:-1]:
        assert seen.index(("announce", start, PAGE)) < seen.index(("read", start, PAGE))


def test_what_is_dropped_comes_back_as_it_was(tmp_path: Path) -> None:
    for extent in extents(tmp_path, 4):
        before = extent.data.copy()
        extent.drop(cached=False)
        assert np.array_equal(extent.data, before)
        assert not extent.data.flags.writeable


def test_of_experts_the_longest_unused_leave(tmp_path: Path) -> None:
    parts = {n: [e] for n, e in enumerate(extents(tmp_path, 6))}
    cache = ExpertCache(3 * PART)

    def fetch(*numbers: int) -> int:
        before = cache.fetched
        cache.fetch({n: parts[n] for n in numbers})
        assert cache.nbytes <= max(3, len(numbers)) * PART
        return cache.fetched - before

    assert fetch(0, 1) == 2
    assert fetch(0) == 0
    assert fetch(2) == 1
    assert fetch(3) == 1  # 1 leaves
    assert fetch(0, 2, 3) == 0
    assert fetch(1) == 1
    assert fetch(0, 1, 2, 3, 4) == 2  # what is wanted at once stays, whatever the room
    assert cache.peak == 5 * PART
