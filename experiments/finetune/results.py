"""What finished runs say: best learning rates, and differences to 8-bit AdamW seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.finetune.tasks import FineTuning
from experiments.runs import Row

GRID = (-1, 0, 1)
"""Rungs of the learning rates that are tried first."""
Verdict = Literal["better", "level", "worse", "one seed"]


class Results:
    """Finished runs by task, method, learning rate and seed."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {(row["task"], row["method"], row["rung"], row["seed"], row["steps"]): row for row in rows}

    def of(self, task: FineTuning, method: str, rung: int) -> list[Row]:
        """Return the runs of a method at a learning rate, by seed."""
        keys = ((task.name, method, rung, seed, task.steps) for seed in range(task.seeds))
        return [self._rows[key] for key in keys if key in self._rows]

    def best_rung(self, task: FineTuning, method: str) -> int | None:
        """Return the learning rate with the best validation loss of the first seed; None if there is none yet."""
        tried = {
            rung: row["validation"]["loss"]
            for (name, what, rung, seed, steps), row in self._rows.items()
            if (name, what, seed, steps) == (task.name, method, 0, task.steps) and row["validation"]
        }
        return min(tried, key=tried.__getitem__, default=None)

    def wider(self, task: FineTuning, method: str, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return a grid with one rung more beyond the best, if that is at an edge."""
        best = self.best_rung(task, method)
        low = (min(grid) - 1,) if best == min(grid) else ()
        high = (max(grid) + 1,) if best == max(grid) else ()
        return (*low, *grid, *high)


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences of test losses, in percent, and its standard error."""

    percent: float
    error: float
    """Not a number for a single seed."""
    count: int

    @property
    def verdict(self) -> Verdict:
        """Whether it is beyond two standard errors.

        >>> Difference(0.5, 0.2, 3).verdict, Difference(0.3, 0.2, 3).verdict, Difference(math.inf, math.nan, 2).verdict
        ('worse', 'level', 'worse')
        """
        if math.isinf(self.percent):
            return "worse"
        if self.count < 2:
            return "one seed"
        return "level" if abs(self.percent) <= 2 * self.error else "worse" if self.percent > 0 else "better"


def difference(ours: Sequence[Row], theirs: Sequence[Row]) -> Difference | None:
    """Compare test losses seed by seed; a run that diverged is infinitely worse. None if there is nothing to compare.

    >>> rows = [{"seed": seed, "test": {"loss": 1.0 + seed}} for seed in (0, 1)]
    >>> difference(rows, rows), difference([{"seed": 0, "test": {"loss": 1.1}}], rows).verdict
    (Difference(percent=0.0, error=0.0, count=2), 'one seed')
    """
    known = {row["seed"]: row["test"]["loss"] for row in theirs if row["test"]}
    paired = [row for row in ours if row["seed"] in known]
    if not paired:
        return None
    if not all(row["test"] for row in paired):
        return Difference(math.inf, math.nan, len(paired))
    values = [100 * (row["test"]["loss"] / known[row["seed"]] - 1) for row in paired]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Difference(statistics.fmean(values), error, len(values))
