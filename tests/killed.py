"""Run as a script: one command again and again, killed at its n-th file operation each time.

`killed.py OUT ARGUMENTS` counts the operations of an undisturbed run, then kills runs at moments
spread over them, and in the middle of writing weights. `{out}` in the arguments is OUT: all write
there, so that a run finds what another left. What was left is kept beside it, for a look.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import starquill.merging
import starquill.quantizing  # noqa: F401  # once, and not in each process
from starquill.checkpoint import save
from starquill.cli.app import main

MOMENTS = 7
EVENTS = ("open", "os.rename", "os.rmdir", "os.chmod", "os.mkdir", "os.remove", "shutil.copyfile")


def count(seen: Callable[[], None], inside: Path) -> None:
    """Call `seen` before everything that is done to files in or beside the folder `inside`."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and any(str(inside) in str(each) for each in arguments[:2]):
            seen()

    sys.addaudithook(hook)


def in_child(work: Callable[[], int]) -> int:
    """The status of `work` in a process of its own; -9 if it was killed."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def undisturbed(arguments: list[str], inside: Path) -> int:
    """How many operations there are."""
    read, write = os.pipe()

    def work() -> int:
        seen = []
        count(lambda: seen.append(1), inside)
        status = main(arguments)
        os.write(write, str(len(seen)).encode())
        return status

    assert in_child(work) == 0
    return int(os.read(read, 20))


def killed_at(arguments: list[str], inside: Path, moment: int) -> int:
    def work() -> int:
        left = [moment]

        def seen() -> None:
            left[0] -= 1
            if left[0] == 0:
                die()

        count(seen, inside)
        return main(arguments)

    return in_child(work)


def killed_in_weights(arguments: list[str], share: float) -> int:
    """When so much of a weight file is written."""
    whole = save.save_aligned

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        whole(tensors, path, metadata)
        os.truncate(path, int(path.stat().st_size * share))
        die()

    def work() -> int:
        save.save_aligned = half
        return main(arguments)

    return in_child(work)


if __name__ == "__main__":
    out = Path(sys.argv[1])
    command = [part.replace("{out}", str(out)) for part in sys.argv[2:]]
    first = [part.replace("{out}", str(out.with_name("whole"))) for part in sys.argv[2:]]
    total = undisturbed(first, out.parent)
    moments = sorted({1 + (total - 1) * n // (MOMENTS - 1) for n in range(MOMENTS)})
    # Flushed, or a child would print it again.
    for share in (0.0, 0.3, 0.99):
        # The second and third find what the one before left.
        assert killed_in_weights(command, share) == -signal.SIGKILL
    print(json.dumps({"left": sorted(path.name for path in out.parent.glob(".*"))}), flush=True)
    for moment in moments:
        status = killed_at(command, out.parent, moment)
        left = [*out.parent.glob(".*"), *([out] if out.exists() else [])]
        print(
            json.dumps({"moment": moment, "status": status, "left": [p.name for p in left]}),
            flush=True,
        )
        for path in left:
            path.rename(out.parent / f"kept-{moment}-{path.name.strip('.')}")
    print(json.dumps({"status": in_child(lambda: main(command))}))
