"""Output for a terminal: colors and progress bars with rich, plain text without it.

All text is laid out in 80 columns before it arrives here. Colors are added only if the output is a terminal and rich is
installed; rich respects ``NO_COLOR``. Control characters in names and files are escaped: they never reach the terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_PREFIX = "baoc."
_STYLES = {
    f"{_PREFIX}header": "bold",
    f"{_PREFIX}rule": "dim",
    f"{_PREFIX}configuration": "cyan",
    f"{_PREFIX}better": "green",
    f"{_PREFIX}worse": "red",
    f"{_PREFIX}bad": "bold red",
    f"{_PREFIX}good": "bold green",
    f"{_PREFIX}bar": "yellow",
}
"""By the names of groups in the patterns of :func:`_patterns`."""
_NUMBER = r"\d+(?:\.\d+)?%"
_NOISE = r"0\.[01]\d*%"  # below 0.2%, the planner's tolerance: as good as equal, so without color
# C0 and C1 controls except the newline, line separators, bidirectional controls and lone surrogates
_CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escape control characters, except newlines.

    Example:
        >>> print(printable("head\x1b[2J"))
        head\x1b[2J
    """
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(text: str, stream: TextIO | None = None) -> None:
    """Print text, with colors for tables, configurations and changes.

    Args:
        text: The text. Control characters are escaped.
        stream: Where to print. The default is stdout.
    """
    stream, text = stream or sys.stdout, printable(text)
    console = _console(stream)
    if console is None:
        print(text, file=stream)
    else:
        console.print(_highlighted(text))


def show_styled(*parts: str | tuple[str, str]) -> None:
    """Print one line to stdout from texts and pairs of a text and a style of rich, such as "bold red"."""
    pairs = [(printable(part), "") if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts]
    console = _console(sys.stdout)
    if console is None:
        print("".join(text for text, _ in pairs))
        return
    from rich.text import Text

    console.print(Text.assemble(*pairs))


def complain(who: str, what: str) -> None:
    """Print an error to stderr."""
    who, what = printable(who), printable(what)
    console = _console(sys.stderr)
    if console is None:
        print(who, what, file=sys.stderr)
        return
    from rich.text import Text

    console.print(Text.assemble((who, "bold red"), " ", what))


class Progress:
    """Progress of a long task on stderr: a bar on a terminal with rich, a few lines otherwise.

    Args:
        what: Name of the task.
        unit: What is counted.
        lines: Number of lines to print without a bar. The default is one for each call.
        stream: Where to print. The default is stderr.
    """

    def __init__(self, what: str, unit: str = "step", lines: int | None = None, stream: TextIO | None = None) -> None:
        self._what, self._unit, self._lines = what, unit, lines
        self._stream = stream or sys.stderr
        console = _console(self._stream)
        self._bar = None if console is None else _Bar(console, what)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.bars.stop()

    def __call__(self, done: int, total: int, note: str) -> None:
        """Report progress.

        Args:
            done: Units that are done.
            total: All units.
            note: Text beside the numbers.
        """
        note = printable(note)
        if self._bar is not None:
            self._bar.bars.update(self._bar.task, completed=done, total=total, note=note)
        elif self._lines is None or done * self._lines // total > (done - 1) * self._lines // total:
            print(f"{self._what}: {self._unit} {done}/{total}, {note}", file=self._stream, flush=True)


class _Bar:
    def __init__(self, console: Console, what: str) -> None:
        from rich import progress

        self.bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[note]}", markup=False),
            progress.TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bars.add_task(what, total=None, note="")


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal that a task without a known length is running."""
    console = _console(sys.stderr)
    if console is not None:
        with console.status(what):
            yield
        return
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)
    yield


def _console(stream: TextIO) -> Console | None:
    """Return a rich console, or None for plain text.

    It keeps long lines as they are. Plain output does not import rich.
    """
    if not (stream.isatty() or os.environ.get("FORCE_COLOR")):
        return None
    try:
        from rich.console import Console
        from rich.theme import Theme
    except ModuleNotFoundError:
        return None

    class QuietPipe(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with an error code; `program.run` handles the exception

    return QuietPipe(file=stream, highlight=False, soft_wrap=True, theme=Theme(_STYLES))


def _highlighted(text: str) -> Text:
    """Return the text with styles for tables, configurations and changes."""
    from rich.text import Text

    found = Text(text)
    for pattern in _patterns():
        found.highlight_regex(pattern, style_prefix=_PREFIX)
    return found


@cache
def _patterns() -> tuple[str, ...]:
    """Return patterns of what has a style, which is the name of a group."""
    from baoc.core.mechanisms import MECHANISMS

    rule = "|".join(sorted(MECHANISMS, key=len, reverse=True))
    return (
        r"(?m)^(?P<header>\S.*)\n(?P<rule> *-{2,}(?: +-+)*)$",
        rf"(?P<configuration>\b(?:{rule})(?:-\d+\b|\[[^\]\n]*\]|(?= {{2}})))",
        rf"(?P<better>(?<!\S)-(?!{_NOISE}){_NUMBER})",
        rf"(?P<worse>(?<!\S)\+(?!{_NOISE}){_NUMBER})",
        r"(?P<good><- knee|(?<= {2})yes(?= {2})|\ball \d+ comparisons .* passed\b|\bproven optimal\b)",
        r"(?P<bad>\bOVER the budget\b|\bFAILED\b|(?<= {2})no(?= {2}))",
        r"(?P<bar>#{1,20}(?=\s|$))",
    )
