"""How far an experiment is, and how long it will take: a moving bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import TextIO

from experiments.moving_line import MovingLine
from experiments.runs.cell import Cell
from experiments.runs.series import Series


class Board:
    """Knows what is left, and from the runs so far how long a step of each workload takes."""

    def __init__(self, series: Iterable[Series], stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._line, self._clock = MovingLine(stream, "  "), clock
        self._left: Counter[str] = Counter()  # steps, by workload
        self.total = 0
        for one in series:
            self.total += one.size
            self._left[one.workload] += one.size * one.steps
        self.position = 0
        self._seen: set[Cell] = set()
        self._paces: dict[str, list[float]] = defaultdict(list)  # seconds per step, by workload
        self._started = 0.0

    def begin(self, cell: Cell, label: str) -> None:
        self.position += 1
        self._seen.add(cell)
        self._started = self._clock()
        name = f"{cell.workload}, {label}, seed {cell.seed}, lr x{cell.lr_factor:g}"
        self.note(f"cell {self.position} of {self.total}{self._estimate()}: {name}")

    def step(self, step: int, steps: int, loss: float) -> None:
        self._line.step(step, steps, loss)

    def end(self, cell: Cell) -> None:
        self._paces[cell.workload].append((self._clock() - self._started) / cell.steps)
        self._left[cell.workload] -= cell.steps
        self._line.leave()

    def finished(self, cell: Cell) -> None:
        """It was trained before. One that is needed for two purposes counts once."""
        if cell not in self._seen:
            self._seen.add(cell)
            self.skip(cell.workload, cell.steps)

    def skip(self, workload: str, steps: int, runs: int = 1) -> None:
        """These need not be trained, or cannot be."""
        self.position += runs
        self._left[workload] -= runs * steps

    def note(self, text: str) -> None:
        self._line.note(text)

    def _estimate(self) -> str:
        known = [pace for paces in self._paces.values() for pace in paces]
        if not known:
            return ""
        paces = {name: self._paces.get(name) or known for name in self._left}
        seconds = sum(steps * sum(paces[name]) / len(paces[name]) for name, steps in self._left.items())
        return f", about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """As a person says it.

    >>> duration(42), duration(2100), duration(12_600)
    ('42 s', '35 min', '3.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
