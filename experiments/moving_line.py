"""How far something is, on one line: rewritten in place on a terminal, written now and then elsewhere."""

from __future__ import annotations

import math
import os
import shutil
from typing import TextIO


class MovingLine:
    """The progress of one run at a time.

    Args:
        lead: what the line begins with.
        lines: how many lines a run gets where nothing can be rewritten, such as in a file.
    """

    def __init__(self, stream: TextIO, lead: str = "", lines: int = 4) -> None:
        self._stream, self._lead, self._lines = stream, lead, lines
        self._moves, self._width = stream.isatty(), 0

    def step(self, step: int, steps: int, loss: float) -> None:
        """Say that this many steps of the run are done."""
        text = f"{step}/{steps}, loss {loss:.4g}" if math.isfinite(loss) else f"{step}/{steps}, loss not finite"
        if self._moves:
            self._rewrite(f"{self._lead}[{bar(step, steps)}] {text}")
        elif step * self._lines // steps > (step - 1) * self._lines // steps:
            self.note(f"{self._lead}step {text}")

    def note(self, text: str) -> None:
        """Write a line that stays."""
        self.leave()
        print(text, file=self._stream, flush=True)

    def leave(self) -> None:
        """Let the moving line stay as it is; what comes next begins below it."""
        if self._width:
            print(file=self._stream, flush=True)
            self._width = 0

    def _rewrite(self, line: str) -> None:
        room = columns(self._stream) - 1  # a full line would wrap, and then move down instead of staying
        line = line[:room]
        print(f"\r{line.ljust(min(self._width, room))}", end="", file=self._stream, flush=True)
        self._width = len(line)


def bar(done: int, total: int, width: int = 30) -> str:
    """A bar of ``width`` characters.

    >>> bar(1, 4, width=8)
    '##......'
    """
    full = width * done // total
    return "#" * full + "." * (width - full)


def columns(stream: TextIO) -> int:
    """How wide the terminal behind a stream is."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # not a terminal of the system's
        width = 0
    return width or shutil.get_terminal_size().columns
