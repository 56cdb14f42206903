"""The texts that gates are trained on, and whose expert each is."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starquill.checkpoint.files import read_text
from starquill.errors import BadRequestError, listing

_PIECE, _PIECES = 2_000, 4  # characters of a file that are one row, and rows of one file


@dataclass(frozen=True)
class Row:
    """A text and the number of its expert, None if it has none. Rows of a file share `group`."""

    prompt: str
    expert: int | None
    group: str


def read_rows(data: Path, names: Sequence[str], *, labelled: bool) -> list[Row]:
    """Rows of `{"rows": [...]}`, of JSON lines, or of a folder of code for each expert.

    `names` are the experts', the base first; rows may also say their number. Without `labelled`
    labels are not looked at, and a folder may hold anything.
    """
    if not data.exists():
        raise BadRequestError(f"{data} is not there (expected .json, .jsonl or a folder)")
    if data.is_dir():
        rows = list(_folder_rows(data, names, labelled))
    else:
        rows = [_row(item, where, names, labelled) for where, item in _items(data)]
    if not rows:
        raise BadRequestError(f"{data} has no rows to train on")
    if labelled and (
        empty := [n for e, n in enumerate(names) if all(row.expert != e for row in rows)]
    ):
        raise BadRequestError(
            f"{data} has no rows for {listing(empty)}: each expert needs some, or nothing is "
            "learned about it"
        )
    return rows


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row as JSON has it, and where it is."""
    text = read_text(path)
    try:
        if path.suffix == ".jsonl":
            for number, line in enumerate(text.splitlines(), start=1):
                if line.strip():
                    yield f"{path} line {number}", _parsed(line, f"{path} line {number}")
            return
        whole = _parsed(text, str(path))
    except RecursionError:
        raise BadRequestError(f"{path} is nested too deeply to be rows") from None
    rows = whole.get("rows") if isinstance(whole, dict) else whole
    if not isinstance(rows, list):
        raise BadRequestError(
            f'{path} has no list of rows (expected {{"rows": [{{"prompt": "...", "expert": 0}}]}})'
        )
    yield from ((f"{path} row {number}", row) for number, row in enumerate(rows))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise BadRequestError(f"{where} is not valid JSON: {error.msg} at {place}") from None


def _row(item: Any, where: str, names: Sequence[str], labelled: bool) -> Row:
    prompt = item.get("prompt") if isinstance(item, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise BadRequestError(f"{where} has no prompt (expected a text that is not empty)")
    return Row(prompt, _expert(item.get("expert"), where, names) if labelled else None, where)


def _expert(label: object, where: str, names: Sequence[str]) -> int:
    if isinstance(label, str) and label in names:
        return names.index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        return label
    known = ", ".join(f"{number} or {name!r}" for number, name in enumerate(names))
    raise BadRequestError(f"{where}: expert is {label!r:.60} (expected {known})")


def _folder_rows(data: Path, names: Sequence[str], labelled: bool) -> Iterator[Row]:
    if not labelled:
        yield from _file_rows(data, None)
        return
    folders = sorted(p for p in data.iterdir() if p.is_dir() and not p.name.startswith("."))
    if unknown := [p.name for p in folders if p.name not in names]:
        raise BadRequestError(
            f"{data} has folders for {listing(unknown)}, and the experts are {', '.join(names)}"
        )
    for folder in folders:
        yield from _file_rows(folder, names.index(folder.name))


def _file_rows(folder: Path, expert: int | None) -> Iterator[Row]:
    """Pieces of every file, evenly spaced, so that more than their beginnings are seen."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(p.startswith(".") for p in path.relative_to(folder).parts):
            continue
        text = read_text(path)
        count = min(_PIECES, -(-len(text) // _PIECE))
        for number in range(count):
            start = number * (len(text) - _PIECE) // max(count - 1, 1) if count > 1 else 0
            if piece := text[start : start + _PIECE].strip():
                yield Row(piece, expert, str(path))


@dataclass(frozen=True)
class Split:
    """Numbers of rows: those to train on, and those that are held out."""

    training: tuple[int, ...]
    held_out: tuple[int, ...]


def split_rows(rows: Sequence[Row], share: float, seed: int) -> Split:
    """Hold out about `share` of each expert's groups; of one that has a single group, none."""
    of_expert: dict[int | None, dict[str, list[int]]] = {}
    for number, row in enumerate(rows):
        of_expert.setdefault(row.expert, {}).setdefault(row.group, []).append(number)
    held: set[int] = set()
    for expert, groups in sorted(of_expert.items(), key=lambda item: item[0] or 0):
        order = sorted(groups)
        random.Random(f"{seed} {expert}").shuffle(order)
        count = min(len(order) - 1, max(1, round(share * len(order)))) if share > 0 else 0
        held.update(number for group in order[:count] for number in groups[group])
    training = tuple(n for n in range(len(rows)) if n not in held)
    return Split(training, tuple(sorted(held)))
