"""The demo while it runs: a table that is redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from baoc.core.text import human_bytes
from experiments.demo.training import OnStep
from experiments.moving_line import MovingLine, bar, columns

_HIDE, _SHOW, _SAVE, _RESTORE, _CLEAR_REST = "\x1b[?25l", "\x1b[?25h", "\x1b7", "\x1b8", "\x1b[K"
_CYAN, _GREEN, _DIM, _PLAIN = "\x1b[36m", "\x1b[32m", "\x1b[2m", "\x1b[0m"
_BAR = 8, 30  # characters, at least and at most

Part = tuple[str, str]  # text, and the escape code of its colour or ""


@dataclass
class Row:
    """Where one method is, over all its seeds."""

    name: str
    done: int = 0  # steps
    seconds: float = 0.0
    state: str = ""
    share: str = ""
    loss: str = ""


class Display:
    """One row per method. Use it as a context: it hides the cursor, and gives it back however the runs end."""

    def __init__(
        self,
        methods: Iterable[str],
        *,
        steps: int,
        seeds: int,
        reference: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows = {name: Row(name) for name in methods}
        self._steps, self._seeds, self._reference = steps, seeds, reference
        self._stream, self._clock, self._then = stream, clock, 0.0
        self._moves = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colour = self._moves and not os.environ.get("NO_COLOR")
        self._marks = "━─" if (stream.encoding or "").lower().startswith("utf") else "#."
        self._line = MovingLine(stream)

    def __enter__(self) -> Display:
        if self._moves:
            height = len(self._rows) + 2
            self._stream.write("\n" * height + f"\x1b[{height}A{_HIDE}{_SAVE}")  # scroll now: the place must stay
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.leave()
        if self._moves:
            self._draw()  # on Ctrl-C a terminal forgets what it had not shown yet, and the cursor is anywhere
            self._stream.write(_SHOW)
            self._stream.flush()

    def begin(self, method: str, seed: int) -> OnStep:
        """What to call after every step of this run."""
        self._then = self._clock()
        if self._moves:
            return partial(self._step, self._rows[method], self._rows[method].done)
        self._line.leave()
        self._line = MovingLine(self._stream, f"{method}, seed {seed + 1} of {self._seeds}: ", lines=3)
        return lambda step, loss, held: self._line.step(step, self._steps, loss)

    def _step(self, row: Row, before: int, step: int, loss: float, held: int) -> None:
        now = self._clock()
        row.seconds += now - self._then
        self._then = now
        row.done = before + step
        row.state, row.share, row.loss = human_bytes(held), f"{held / self._reference:.0%}", f"{loss:.3f}"
        self._draw()

    def _draw(self) -> None:
        """Write over what was drawn before, in one piece so that it does not flicker."""
        room = columns(self._stream) - 1  # a full line would wrap
        lines = "".join(f"{self._paint(line, room)}{_CLEAR_REST}\n" for line in self._lines(room))
        self._stream.write(_RESTORE + lines)
        self._stream.flush()

    def _lines(self, room: int) -> Iterator[list[Part]]:
        rows, total = list(self._rows.values()), self._steps * self._seeds
        names = max(len(row.name) for row in rows)
        head = f"{'optimizer':{names}}  {'state':>9}  of AdamW16  "
        width = min(_BAR[1], max(_BAR[0], room - len(head) - len("  0.000  0:00, 0:00 left")))
        yield [(f"{head}{'progress':{width}}  loss   time", _DIM)]
        for row in rows:
            done = bar(row.done, total, width, self._marks)
            full = done.count(self._marks[0])
            yield [
                (f"{row.name:{names}}  {row.state:>9}  {row.share:>10}  ", "" if row.done else _DIM),
                (done[:full], _GREEN if row.done == total else _CYAN),
                (done[full:], _DIM),
                (f"  {row.loss:5}  {_clock_text(row.seconds, row.done, total)}", ""),
            ]
        seconds, steps = sum(row.seconds for row in rows), sum(row.done for row in rows)
        yield [(f"all together: {_clock_text(seconds, steps, total * len(rows))}" if steps else "", _DIM)]

    def _paint(self, parts: Iterable[Part], room: int) -> str:
        """As much as there is room for, in colour where that is wanted."""
        painted = []
        for text, code in parts:
            shown = text[: max(0, room)]
            room -= len(text)
            painted.append(f"{code}{shown}{_PLAIN}" if self._has_colour and code and shown else shown)
        return "".join(painted)


def _clock_text(seconds: float, done: int, total: int) -> str:
    """Time spent, and from it time left.

    >>> _clock_text(30.0, 1, 4), _clock_text(75.0, 4, 4)
    ('0:30, 1:30 left', '1:15')
    """
    if not done:
        return ""
    left = seconds / done * (total - done)
    return _minutes(seconds) + (f", {_minutes(left)} left" if done < total else "")


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"
