"""The `starquill` command: its verbs, and how every error becomes one line and an exit code."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from starquill import StarquillError, __version__
from starquill.cli import anymoe, evaluate
from starquill.cli.batch import batch
from starquill.cli.bench import bench
from starquill.cli.fill import fill
from starquill.cli.generate import generate
from starquill.cli.inspect import inspect
from starquill.cli.merge import merge
from starquill.cli.plan import plan
from starquill.cli.quantize import quantize
from starquill.cli.serve import serve
from starquill.errors import printable

USER_ERROR, OUR_ERROR = 2, 1
OUT_OF_MEMORY = "out of memory; use a smaller model, --dtype bfloat16, or fewer other programs"

app = typer.Typer(
    name="starquill",
    help="Complete code with StarCoder2 on your own machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(fill)
app.command()(inspect)
app.command()(plan)
app.command()(quantize)
app.command()(merge)
app.command()(bench)
app.command()(serve)
app.command()(batch)
app.add_typer(evaluate.app, name="eval")
app.add_typer(anymoe.app, name="anymoe")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"starquill {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback for faults in starquill itself.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 2 for the user's mistakes, 1 for ours, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if sys.stdout is None:
        return _fail("standard output is closed", USER_ERROR)
    if sys.stderr is None:
        sys.stderr = io.StringIO()  # print(file=None) would write to standard output
    _write_utf8()
    logging.basicConfig(format="warning: %(message)s", level=logging.WARNING)
    try:
        code = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        return int(code or 0)
    except typer.Abort:
        return 130
    except SystemExit:
        return 0  # typer's answer to a reader that has left: `| head`
    except BrokenPipeError:
        # The same while writing; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        message, code = _explained(error)
        if debug and code == OUR_ERROR:
            traceback.print_exc()
        return _fail(message, code)


def _explained(error: Exception) -> tuple[str, int]:
    """The line to print for an error, and the exit code."""
    match error:
        case typer.TyperException():
            return error.format_message(), error.exit_code
        case StarquillError():
            return str(error), USER_ERROR
        case MemoryError():
            return OUT_OF_MEMORY, USER_ERROR
        case RuntimeError() if "allocate memory" in str(error):  # torch's way of saying it
            return OUT_OF_MEMORY, USER_ERROR
        case OSError():
            place = f"{error.filename}: " if error.filename else ""
            return f"{place}{error.strerror or error}", USER_ERROR
    kind = type(error).__name__
    return f"a fault in starquill ({kind}: {error}); --debug shows where", OUR_ERROR


def _write_utf8() -> None:
    """Code is UTF-8, whatever the locale: into a pipe exactly, on a terminal as it can be."""
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if stream.isatty():
            stream.reconfigure(errors="replace")
        else:
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


def _fail(message: str, code: int) -> int:
    if message:  # without one typer has shown the help, which is all there is to say
        print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
