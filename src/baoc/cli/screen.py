"""What a person sees: text in colours and moving bars on a terminal, the same text as it is elsewhere.

Everything is laid out as plain text, in 80 columns, by whoever knows what it says; colours are put on it here, by rich,
which leaves them out where output is no terminal or ``NO_COLOR`` is set.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from baoc.core.mechanisms import MECHANISMS

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
"""By the names of groups in the patterns."""
_MECHANISM = "|".join(sorted(MECHANISMS, key=len, reverse=True))
_NUMBER = r"\d+(?:\.\d+)?%"
_PATTERNS = (
    r"(?m)^(?P<header>\S.*)\n(?P<rule> *-{2,}(?: +-+)*)$",
    rf"(?P<configuration>\b(?:{_MECHANISM})(?:-\d+\b|\[[^\]\n]*\]|(?= {{2}})))",
    rf"(?P<better>(?<!\S)-(?!0\.0+%){_NUMBER})",
    rf"(?P<worse>(?<!\S)\+(?!0\.0+%){_NUMBER})",
    r"(?P<good><- knee|(?<= {2})yes(?= {2})|\ball \d+ comparisons .* passed\b|\bproven the least\b)",
    r"(?P<bad>\bOVER the budget\b|\bFAILED\b|(?<= {2})no(?= {2}))",
    r"(?P<bar>#{1,20}(?=\s|$))",
)


def console(stream: TextIO) -> Console:
    """Of a stream, as wide as it likes: lines are as long as they were made."""
    from rich.console import Console
    from rich.theme import Theme

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would end the process with an error; a reader that has seen enough is none

    return Ours(file=stream, highlight=False, soft_wrap=True, theme=Theme(_STYLES))


def show(text: str) -> None:
    """Print to stdout."""
    console(sys.stdout).print(coloured(text))


def complain(who: str, what: str) -> None:
    """Say on stderr what is wrong."""
    from rich.text import Text

    console(sys.stderr).print(Text.assemble((who, "bold red"), " ", what))


def coloured(text: str) -> Text:
    """The same text; tables, configurations and what is better or worse have a colour.

    >>> coloured("muon-8  -1.28%").spans
    [Span(0, 6, 'baoc.configuration'), Span(8, 14, 'baoc.better')]
    """
    from rich.text import Text

    found = Text(text)
    for pattern in _PATTERNS:
        found.highlight_regex(pattern, style_prefix=_PREFIX)
    return found


class Progress:
    """How far long work is, on stderr: a bar on a terminal, a few lines elsewhere.

    Args:
        what: is done.
        unit: that is counted.
        lines: how many of them are written where nothing moves; all, if left out.
    """

    def __init__(self, what: str, unit: str = "step", lines: int | None = None, stream: TextIO | None = None) -> None:
        from rich import progress

        self._what, self._unit, self._lines = what, unit, lines
        self._console = console(stream or sys.stderr)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[note]}"),
            progress.TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bars.add_task(what, total=None, note="")

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, done: int, total: int, note: str) -> None:
        """So much of it is done."""
        if self._console.is_terminal:
            self._bars.update(self._task, completed=done, total=total, note=note)
        elif self._lines is None or done * self._lines // total > (done - 1) * self._lines // total:
            self._console.print(f"{self._what}: {self._unit} {done}/{total}, {note}", markup=False)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say on a terminal that something goes on that cannot be counted."""
    err = console(sys.stderr)
    if not err.is_terminal:
        yield
        return
    with err.status(what):
        yield
