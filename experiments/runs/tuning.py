"""Which learning rate a method is judged at: the best of its own on the validation split, with one seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.runs.cell import Row

TUNING_SEED = 0


@dataclass(frozen=True)
class Choice:
    """The chosen factor on the workload's lr."""

    lr_factor: float
    at_edge: bool
    """It is the smallest or the largest of the grid: a wider one might do better."""


def choose(rows: Iterable[Row], grid: Sequence[float]) -> Choice:
    """The factor of the best mean validation score; of equals, the smaller. Runs that failed are the worst.

    >>> scores = {0.5: 7.0, 1.0: 6.5, 2.0: None}
    >>> rows = [
    ...     {"lr_factor": factor, "validation_metric": score, "higher_is_better": False} for factor, score in scores.items()
    ... ]
    >>> choose(rows, list(scores))
    Choice(lr_factor=1.0, at_edge=False)
    """  # noqa: E501
    scores: dict[float, list[float]] = {}
    for row in rows:
        scores.setdefault(row["lr_factor"], []).append(badness(row))
    best = min(scores, key=lambda factor: (statistics.fmean(scores[factor]), factor))
    return Choice(best, at_edge=len(grid) > 1 and best in (min(grid), max(grid)))


def badness(row: Row) -> float:
    """The validation score with its sign turned, where need be, so that less is better."""
    score = row.get("validation_metric")
    if score is None:
        return math.inf
    return -score if row["higher_is_better"] else score
