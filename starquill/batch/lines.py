"""The input of a batch: lines by their number and the hash of what they say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Line:
    """A line that is not blank; `index` counts all from 0."""

    index: int
    text: bytes

    @property
    def hash(self) -> str:
        return digest(self.text)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, as they are needed; those that are blank are left out."""
    with path.open("rb") as file:
        for index, raw in enumerate(file):
            text = raw.removeprefix(_BOM) if index == 0 else raw
            if text := text.strip():
                yield Line(index, text)


def digest(text: bytes) -> str:
    """Enough of a hash to tell that a line was changed."""
    return hashlib.sha256(text).hexdigest()[:16]


def settings_hash(settings: object) -> str:
    """A hash of all that answers depend on beside their lines."""
    return digest(json.dumps(settings, sort_keys=True, default=str).encode())
