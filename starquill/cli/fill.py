"""`starquill fill`: write what is missing in the middle of a file."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from starquill.checkpoint.files import read_text, write_atomically
from starquill.cli.generate import read_prompt
from starquill.cli.options import (
    AdapterOptions,
    ModelOptions,
    QuantizeOptions,
    SamplingOptions,
    ShowOptions,
    XLoraOptions,
    expand_options,
)
from starquill.errors import BadRequestError
from starquill.types import ContextFile, Hole

MARKER = "<fill>"


@dataclass(frozen=True)
class Place:
    """The text on both sides of the hole, and the file it is in, if it is in one.

    `marker` is what stands in the hole now.
    """

    prefix: str
    suffix: str
    file: Path | None = None
    marker: str = ""


@dataclass(frozen=True)
class PlaceOptions:
    """The ways to say where the hole is."""

    at: Annotated[
        str | None,
        typer.Option(
            metavar="LINE[:COL]",
            help="The hole's line and column, from 1; without COL the end of the line.",
        ),
    ] = None
    prefix_file: Annotated[Path | None, typer.Option(help="The code before the hole.")] = None
    suffix_file: Annotated[Path | None, typer.Option(help="The code after the hole.")] = None
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", "-p", help=f"Code with a {MARKER} marker; - reads standard input."
        ),
    ] = None


@expand_options
def fill(
    file: Annotated[
        Path | None,
        typer.Argument(help=f"The file to fill, at --at or at its {MARKER} marker."),
    ] = None,
    context: Annotated[
        list[Path] | None,
        typer.Option(help="Another file the model should see; may be repeated."),
    ] = None,
    repo_name: Annotated[
        str | None, typer.Option(help="Repository name to show with --context.")
    ] = None,
    fim_order: Annotated[
        Literal["psm", "spm"],
        typer.Option(help="Show the model prefix, suffix (psm) or suffix, prefix (spm)."),
    ] = "psm",
    in_place: Annotated[
        bool, typer.Option("--in-place", "-i", help="Write the middle into the file.")
    ] = False,
    where: PlaceOptions = PlaceOptions(),
    model: ModelOptions = ModelOptions(),
    quantize: QuantizeOptions = QuantizeOptions(),
    xlora: XLoraOptions = XLoraOptions(),
    adapters: AdapterOptions = AdapterOptions(),
    sampling: SamplingOptions = SamplingOptions(),
    show: ShowOptions = ShowOptions(),
) -> int:
    """Write the missing middle of a file or prompt."""
    params = sampling.params()
    show.check()
    xlora.check(show)
    place = find_place(file, where)
    if in_place and place.file is None:
        raise BadRequestError("--in-place needs FILE: there is no file to write into")
    files = [(path, read_text(path)) for path in context or ()]
    acting = adapters.chosen()
    from starquill.cli.run import load_adapters, load_model, run
    from starquill.engine.fim import fill_request

    loaded = load_model(model, quantize, xlora)
    hole = _hole(place, files, repo_name)
    request, trimmed = fill_request(loaded, hole, params, order=fim_order)
    request = replace(request, adapter=load_adapters(loaded, acting))
    if trimmed:
        print(f"warning: left out to fit the context: {trimmed}", file=sys.stderr)
    if place.file is not None:
        show = show.for_file(place.file.name)
    outcome = run(loaded, request, show, before=place.prefix, reader_may_leave=in_place)
    if in_place and outcome.exit_code:
        print(f"warning: interrupted; {place.file} is unchanged", file=sys.stderr)
    elif in_place:
        _write_in_place(place, outcome.text)
        if outcome.finish_reason == "length":
            print(
                f"warning: {place.file} may be incomplete: --max-tokens was reached",
                file=sys.stderr,
            )
    return outcome.exit_code


def _write_in_place(place: Place, text: str) -> None:
    """Put the middle into the file, unless someone has edited it in the meantime."""
    assert place.file is not None
    if read_text(place.file) != place.prefix + place.marker + place.suffix:
        raise BadRequestError(
            f"{place.file} was changed while the middle was written; it is left as it is"
        )
    middle = _with_line_endings_of(place.prefix + place.suffix, text)
    write_atomically(place.file, (place.prefix + middle + place.suffix).encode())


def _with_line_endings_of(file_text: str, middle: str) -> str:
    """Models write LF; a file whose lines all end in CR LF shall stay so."""
    if "\r\n" in file_text and not re.search(r"(?<!\r)\n", file_text):
        return re.sub(r"\r?\n", "\r\n", middle)
    return middle


def find_place(file: Path | None, where: PlaceOptions) -> Place:
    """Read the hole from whichever of the three ways was used; more than one is an error."""
    files = where.prefix_file is not None or where.suffix_file is not None
    if (file is not None) + files + (where.prompt is not None) != 1:
        raise BadRequestError(
            f"expected one of: FILE (with --at or a {MARKER} marker), --prefix-file and "
            f"--suffix-file, or --prompt with a {MARKER} marker"
        )
    if file is not None:
        text = read_text(file)
        if where.at is None:
            return Place(*_marked(text, file), file, MARKER)
        return Place(*_at(text, where.at, file), file)
    if where.at is not None:
        raise BadRequestError("--at needs FILE")
    if files:
        before = "" if where.prefix_file is None else read_text(where.prefix_file)
        after = "" if where.suffix_file is None else read_text(where.suffix_file)
        return Place(before, after)
    return Place(*_marked(read_prompt(where.prompt), None))


def _marked(text: str, file: Path | None) -> tuple[str, str]:
    parts = text.split(MARKER)
    if len(parts) != 2:
        hint = "; give --at LINE[:COL]" if file is not None else ""
        raise BadRequestError(
            f"{file or 'the prompt'} has {len(parts) - 1} {MARKER} markers (expected one{hint})"
        )
    return parts[0], parts[1]


def _at(text: str, at: str, file: Path) -> tuple[str, str]:
    """Split `text` at `LINE[:COL]`, both counted from 1; without a column at the line's end."""
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", at)
    if not match:
        raise BadRequestError(f"--at is {at!r} (expected LINE or LINE:COL, as 12 or 12:5)")
    line, column = int(match[1]), match[2]
    lines = text.split("\n")
    if not 1 <= line <= len(lines):
        raise BadRequestError(f"--at names line {line}, but {file} has lines 1 to {len(lines)}")
    content = lines[line - 1].removesuffix("\r")
    offset = len(content) if column is None else int(column) - 1
    if not 0 <= offset <= len(content):
        raise BadRequestError(
            f"--at names column {column}, but line {line} of {file} has columns 1 to "
            f"{len(content) + 1}"
        )
    start = sum(len(earlier) + 1 for earlier in lines[: line - 1]) + offset
    return text[:start], text[start:]


def _hole(place: Place, context: list[tuple[Path, str]], repo_name: str | None) -> Hole:
    root = _repository_root(place.file or Path.cwd() / "main.py")
    files = tuple(ContextFile(_relative(path, root), code) for path, code in context)
    path = "main.py" if place.file is None else _relative(place.file, root)
    return Hole(place.prefix, place.suffix, files, path, repo_name or root.name)


def _repository_root(file: Path) -> Path:
    """The nearest folder above that is a git checkout, else the file's own folder."""
    folder = file.resolve().parent
    return next((f for f in (folder, *folder.parents) if (f / ".git").exists()), folder)


def _relative(path: Path, root: Path) -> str:
    resolved = path.resolve()
    return resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else path.name
