"""The output of a batch, which is its memory as well: a line is done when its answer is there.

An answer is one line that carries its input's number and hash, appended in one write. A process
may be killed between any two instructions: what it leaves behind is whole lines and at most one
half-written at the end, which is cut off when the batch goes on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starquill.batch.lines import Line, read_lines
from starquill.errors import BadRequestError

SYNC_LINES, SYNC_SECONDS = 64, 1.0
Json = dict[str, Any]


class Journal:
    """Appends answers; `open_journal` makes one. `failed` counts the errors among them."""

    def __init__(self, descriptor: int, settings: str, done: dict[int, str], failed: int) -> None:
        self.done = done
        self.failed = failed
        self._descriptor = descriptor
        self._settings = settings
        self._unsynced, self._synced = 0, time.monotonic()

    def write(self, line: Line, answer: Json) -> None:
        """Append the answer to `line`; never a second one."""
        assert line.index not in self.done, "a line is answered once"
        whole = {**answer, "input": line.hash, "run": self._settings}
        data = _encoded(whole)
        while data:
            data = data[os.write(self._descriptor, data) :]
        self.done[line.index] = line.hash
        self.failed += "error" in answer
        self._unsynced += 1
        if self._unsynced >= SYNC_LINES or time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Whatever happens to the machine, what was written until now stays."""
        os.fsync(self._descriptor)
        self._unsynced, self._synced = 0, time.monotonic()


def _encoded(answer: Json) -> bytes:
    try:
        return json.dumps(answer, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # an id may have half a surrogate pair
        return json.dumps(answer).encode() + b"\n"


@contextmanager
def open_journal(source: Path, target: Path, settings: str, *, ordered: bool) -> Iterator[Journal]:
    """The journal `target` of a batch over `source`, begun or taken up again.

    Raises BadRequestError where it is not this batch's, or another process writes it.
    """
    if target.exists() and target.samefile(source):
        raise BadRequestError(f"{target} is the input itself; name another file for the answers")
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        _lock(descriptor, target)
        done, failed, end = _read(target, settings)
        _check_input(source, target, done, ordered=ordered)
        os.ftruncate(descriptor, end)
        journal = Journal(descriptor, settings, done, failed)
        try:
            yield journal
        finally:
            journal.sync()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, target: Path) -> None:
    """Keep a second process from writing too; the system unlocks when this one ends, however."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadRequestError(
            f"another process writes {target}; wait for its end or name another file"
        ) from None


def _read(target: Path, settings: str) -> tuple[dict[int, str], int, int]:
    """What is done by index, how much of it failed, and where the last whole line ends."""
    done: dict[int, str] = {}
    failed = end = 0
    with target.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                break
            index, written, run, error = _entry(raw, number, target)
            if run != settings:
                raise BadRequestError(
                    f"{target} was begun with another model or other options; use the same again, "
                    "or name another file"
                )
            if index in done:
                raise BadRequestError(f"{target} answers line {index + 1} twice; remove one")
            done[index] = written
            failed += error
            end += len(raw)
    return done, failed, end


def _entry(raw: bytes, number: int, target: Path) -> tuple[int, str, str, bool]:
    try:
        entry = json.loads(raw)
        index, written, run = entry["index"], entry["input"], entry["run"]
        if type(index) is int and index >= 0 and isinstance(written, str):
            return index, written, run, "error" in entry
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise BadRequestError(
        f"line {number} of {target} is not a batch's answer; name another file, or remove that one"
    )


def _check_input(source: Path, target: Path, done: dict[int, str], *, ordered: bool) -> None:
    """Refuse an input that is not the one that was answered. Lines may have been added at its end.

    With `ordered`, what is done must be its beginning.
    """
    found, missing = 0, None
    order = iter(done)
    for line in read_lines(source):
        if line.index not in done:
            missing = line.index if missing is None else missing
            continue
        if done[line.index] != line.hash:
            raise BadRequestError(
                f"line {line.index + 1} of {source} has changed since {target} answered it; "
                "name another file, or remove that one"
            )
        if ordered and (missing is not None or next(order) != line.index):
            raise BadRequestError(f"{target} was begun without --ordered; leave it out again")
        found += 1
    if found < len(done):
        raise BadRequestError(
            f"{target} has answers to {len(done) - found} lines that {source} no longer has; "
            "name another file, or remove that one"
        )
