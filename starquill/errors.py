"""The errors that starquill raises on purpose.

Each carries one line for the user: what was found, what was expected, what to do. The command
line prints that line and exits with 2, as it does for the system's errors (a full disk, no
memory); anything else that escapes is our own fault and exits with 1.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_LISTED = 20


class StarquillError(Exception):
    """Parent of every error that the user can do something about. Its message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class CheckpointError(StarquillError):
    """A model's files are missing, damaged or contradict each other."""


class UnsupportedError(StarquillError):
    """The files are sound, but ask for something that starquill does not implement."""


class AdapterError(StarquillError):
    """An adapter's files are damaged, contradict each other, or do not fit the model."""


class CapacityError(StarquillError):
    """Something is larger than the room there is: the context, memory, a queue."""


class BusyError(CapacityError):
    """As many requests wait as may; try again later."""


class BadRequestError(StarquillError):
    """A request or option has a value that cannot be used."""


class StageLostError(StarquillError):
    """The process that has some of a model's layers has ended."""


class NumericsError(StarquillError):
    """The model produced values that are not finite numbers."""


def printable(text: str) -> str:
    """`text` in one line, with characters that would act on a terminal written as escapes.

    Messages quote names from files, which may hold anything.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def listing(items: Sequence[str], most: int = MOST_LISTED) -> str:
    """Join `items` for an error line, naming at most `most` and counting the rest."""
    shown = ", ".join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
