"""The demo while it runs: a table that is redrawn in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from baoc.core.text import human_bytes
from experiments.demo.training import OnStep
from experiments.moving_line import MovingLine

_BAR = 12  # characters: a row of the longest name has 80


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
        console = Console(file=stream, highlight=False)
        self._moves = console.is_terminal and not console.is_dumb_terminal
        self._board = Live(get_renderable=self._table, console=console)
        self._line = MovingLine(stream)

    def __enter__(self) -> Display:
        if self._moves:
            self._board.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._moves:
            self._board.stop()
        self._line.leave()

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

    def _table(self) -> Table:
        rows, total = list(self._rows.values()), self._steps * self._seeds
        seconds, steps = sum(row.seconds for row in rows), sum(row.done for row in rows)
        together = f"all together: {_clock_text(seconds, steps, total * len(rows))}" if steps else ""
        table = Table(box=None, pad_edge=False, header_style="dim", caption=together, caption_justify="left")
        table.add_column("optimizer", no_wrap=True)
        for name in ("state", "of AdamW16"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in ("progress", "loss", "time"):
            table.add_column(name, no_wrap=True)
        for row in rows:
            bar = ProgressBar(total, row.done, width=_BAR)
            taken = _clock_text(row.seconds, row.done, total)
            table.add_row(row.name, row.state, row.share, bar, row.loss, taken, style=None if row.done else "dim")
        return table


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
