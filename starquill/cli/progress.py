"""What is shown while a model is read: an estimate before, a bar during, a summary after."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

if TYPE_CHECKING:
    from starquill.quantizing import LoadProgress

# What is read in less than about a second needs no bar.
_BAR_FROM = 500_000_000


@contextmanager
def reading_bar(label: str) -> Iterator[Callable[[LoadProgress], None]]:
    """Shows the progress that it is given: bytes, rate and time left, on a terminal.

    A plan to quantize is told before the first byte is read, wherever standard error goes.
    """
    console = Console(stderr=True)
    bar = Progress(
        *Progress.get_default_columns()[:2],
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(label, total=None, visible=False)

    def show(progress: LoadProgress) -> None:
        if progress.done == 0 and progress.summary:
            print(f"{label}: {progress.summary}; {progress.sizes()}", file=sys.stderr, flush=True)
        visible = progress.total >= _BAR_FROM
        bar.update(task, completed=progress.done, total=progress.total, visible=visible)

    with bar:
        yield show
