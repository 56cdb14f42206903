"""Text on its way to the user: plain, highlighted as it streams, or coloured by confidence."""

from __future__ import annotations

import math
import sys
from typing import Protocol

from pygments.lexer import Lexer
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.syntax import Syntax, SyntaxTheme

from starquill.cli.options import ShowOptions
from starquill.types import Delta

_LINES_BEFORE = 100
# Control characters would be obeyed by the terminal: show Unicode's pictures of them instead.
_VISIBLE = {c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"} | {127: 0x2421}
_VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class Printer(Protocol):
    """Shows a request's deltas as they come."""

    def write(self, delta: Delta) -> None: ...

    def finish(self) -> None: ...


class SilentPrinter:
    """Shows nothing: the whole is printed at the end."""

    def write(self, delta: Delta) -> None:
        pass

    def finish(self) -> None:
        pass


class PlainPrinter:
    """The text and nothing else; on a terminal a newline at the end and no raw controls."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal

    def write(self, delta: Delta) -> None:
        text = delta.text.translate(_VISIBLE) if self._terminal else delta.text
        sys.stdout.write(text)
        sys.stdout.flush()

    def finish(self) -> None:
        if self._terminal:
            sys.stdout.write("\n")
            sys.stdout.flush()


class HighlightPrinter:
    """Highlights while streaming: the last lexical token waits until it can change no more."""

    def __init__(self, lexer: Lexer, before: str) -> None:
        """`before` is the code that the text continues; the lexer needs it, it is not shown."""
        self._colors = _terminal_colors(Console())
        self._lexer = lexer
        # Enough for the lexer to know where it is, and little enough to lex at every token.
        self._code = "".join(before.splitlines(keepends=True)[-_LINES_BEFORE:])
        self._shown = len(self._code)
        self._theme: SyntaxTheme = Syntax.get_theme("ansi_dark")

    def write(self, delta: Delta) -> None:
        self._code += delta.text
        self._show(final=delta.finish_reason is not None)

    def _show(self, final: bool) -> None:
        pieces = list(self._lexer.get_tokens_unprocessed(self._code))
        for index, kind, value in pieces if final else pieces[:-1]:
            fresh = value[max(self._shown - index, 0) :]
            if index + len(value) > self._shown and fresh:
                _paint(fresh, self._theme.get_style_for_token(kind), self._colors)
                self._shown = index + len(value)
        sys.stdout.flush()

    def finish(self) -> None:
        self._show(final=True)
        print(flush=True)


class ConfidencePrinter:
    """Colours each token by its probability, from red (unlikely) over yellow to green."""

    def __init__(self) -> None:
        # Asked for by name, so colours go into a pipe too (`| less -R`).
        self._colors = _terminal_colors(Console(force_terminal=True))

    def write(self, delta: Delta) -> None:
        _paint(delta.text, confidence_style(delta), self._colors)
        sys.stdout.flush()

    def finish(self) -> None:
        print(flush=True)


def _terminal_colors(console: Console) -> ColorSystem | None:
    """The colours that a terminal has; None for none, as NO_COLOR asks."""
    systems = {
        "standard": ColorSystem.STANDARD,
        "256": ColorSystem.EIGHT_BIT,
        "truecolor": ColorSystem.TRUECOLOR,
    }
    return None if console.no_color else systems.get(console.color_system or "")


def _paint(text: str, style: Style, colors: ColorSystem | None) -> None:
    """Write `text` to standard output in a style, line by line so that no colour runs over."""
    for line in text.translate(_VISIBLE).splitlines(keepends=True):
        content = line.rstrip("\n")
        sys.stdout.write(style.render(content, color_system=colors) if content else "")
        sys.stdout.write(line[len(content) :])


def confidence_style(delta: Delta) -> Style:
    """The colour of a delta's token; no colour when its probability is unknown."""
    if delta.logprobs is None:
        return Style()
    probability = math.exp(min(delta.logprobs.chosen, 0.0))
    red = round(255 * min(1.0, 2 - 2 * probability))
    green = round(255 * min(1.0, 2 * probability))
    return Style(color=f"#{red:02x}{green:02x}40")


def choose_printer(show: ShowOptions, before: str) -> Printer:
    """Plain into a pipe; on a terminal highlighted, unless colours by confidence are asked for."""
    terminal = sys.stdout.isatty()
    if show.colorize:
        return ConfidencePrinter()
    if terminal and show.highlight:
        return HighlightPrinter(show.lexer(), before)
    return PlainPrinter(terminal)
