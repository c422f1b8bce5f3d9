"""What finished runs say: AdamW32's best learning rate, and whether a budget is worse than AdamW32."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from experiments.runs import Row
from experiments.zoo.task import Task
from experiments.zoo.training import FLOOR, REFERENCE, Run

PERCENT, RATIO = 2.0, 1.5
"""A budget is worse if its loss is by more than so many percent, or so many times where losses span decades, and by
more than two standard errors."""
GRID = (-2, -1, 0, 1, 2)
"""Rungs of the learning rates that AdamW32 tries first."""

Scores = Mapping[int, float]
"""By seed; infinite if the run diverged."""
Verdict = Literal["win", "tie", "loss", "no plan"]


class Results:
    """Finished runs by their keys."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {row["key"]: row for row in rows}

    def rows_of(self, task: Task, method: str, rung: int, seeds: int) -> list[Row]:
        found = (self._rows.get(Run(task.name, method, seed, rung).key) for seed in range(seeds))
        return [row for row in found if row is not None]

    def scores(self, task: Task, method: str, rung: int, seeds: int) -> dict[int, float]:
        rows = [row for row in self.rows_of(task, method, rung, seeds) if not row["error"]]
        return {row["seed"]: math.inf if row["score"] is None else row["score"] for row in rows}

    def best_rung(self, task: Task, grid: Sequence[int] = range(-9, 10)) -> int | None:
        """Return the learning rate that is best for AdamW32 with the first seed; None if there is none yet."""
        tried = {rung: self.scores(task, REFERENCE, rung, seeds=1).get(0, math.inf) for rung in grid}
        best = min(tried, key=tried.__getitem__, default=None)
        return None if best is None or math.isinf(tried[best]) else best

    def wider(self, task: Task, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Return a grid with one rung more beyond the best, if that is at an edge."""
        best = self.best_rung(task, grid)
        low = (min(grid) - 1,) if best == min(grid) else ()
        high = (max(grid) + 1,) if best == max(grid) else ()
        return (*low, *grid, *high)

    def comparison(self, task: Task, method: str, seeds: int, factor: int = 0) -> Comparison | None:
        """Compare a method with AdamW32 at the same learning rate; None if there are no runs.

        Args:
            task: of the zoo.
            method: as in the keys of runs.
            seeds: how many.
            factor: rungs from AdamW32's best learning rate.
        """
        best = self.best_rung(task)
        if best is None:
            return None
        if any(row["error"] for row in self.rows_of(task, method, best + factor, seeds)):
            return Comparison("no plan", math.nan, math.nan)
        ours, theirs = (self.scores(task, name, best + factor, seeds) for name in (method, REFERENCE))
        return compared(ours, theirs, decades=task.decades)


@dataclass(frozen=True)
class Comparison:
    """A budget beside AdamW32, seed by seed."""

    verdict: Verdict
    difference: float
    """In percent of AdamW32's loss, or the ratio of the losses where they span decades; infinite: diverged."""
    error: float
    """Its standard error, of the logarithm for a ratio; not a number for a single seed."""


def compared(ours: Scores, theirs: Scores, *, decades: bool) -> Comparison | None:
    """Compare scores seed by seed; None if there is no seed to compare.

    >>> compared({0: 1.5, 1: 1.7}, {0: 1.0, 1: 1.0}, decades=False)
    Comparison(verdict='loss', difference=60.0, error=10.0)
    >>> compared({0: 1.4e-6}, {0: 1e-6}, decades=True).verdict, compared({0: 1e-8}, {0: 1e-6}, decades=True).verdict
    ('tie', 'win')
    """
    seeds = [seed for seed in ours if math.isfinite(theirs.get(seed, math.inf))]
    if not seeds:
        return None
    if not all(math.isfinite(ours[seed]) for seed in seeds):
        return Comparison("loss", math.inf, math.nan)
    if decades:
        values = [math.log(max(ours[seed], FLOOR) / max(theirs[seed], FLOOR)) for seed in seeds]
    else:
        values = [100 * (ours[seed] / theirs[seed] - 1) for seed in seeds]
    average = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    margin = max(math.log(RATIO) if decades else PERCENT, 2 * error if len(values) > 1 else 0.0)
    verdict: Verdict = "loss" if average > margin else "win" if average < -margin else "tie"
    return Comparison(verdict, math.exp(average) if decades else average, error)
