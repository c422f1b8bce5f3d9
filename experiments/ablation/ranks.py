"""How alike two rankings are, and how alike they could be at best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations

import numpy as np


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Correlation of the ranks; None where one of them says nothing.

    >>> spearman([1, 2, 3], [10, 20, 15]), spearman([1, 1, 1], [1, 2, 3])
    (0.5, None)
    """
    ours, theirs = _ranks(x), _ranks(y)
    if len(x) < 3 or not (np.ptp(ours) and np.ptp(theirs)):
        return None
    return float(np.corrcoef(ours, theirs)[0, 1])


def reliability(repeats: Sequence[Sequence[float]]) -> float | None:
    """How well the means over repeats would rank like the means over as many others: Spearman-Brown's formula.

    >>> round(reliability([[1, 2, 3, 4], [2, 1, 4, 3]]), 2)  # each ranks like the other by 0.6
    0.75
    """
    found = [spearman(one, other) for one, other in combinations(repeats, 2)]
    pairs = [each for each in found if each is not None]
    if not pairs:
        return None
    count, mean = len(repeats), statistics.fmean(pairs)
    return count * mean / (1 + (count - 1) * mean) if mean > 0 else 0.0


def ceiling(repeats: Sequence[Sequence[float]]) -> float | None:
    """The correlation that a perfect predictor would have with the means over repeats, noisy as they are."""
    found = reliability(repeats)
    return None if found is None else math.sqrt(found)


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """From 0 on; equals share the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[:, None] > array[None, :]).sum(1)
    equal = (array[:, None] == array[None, :]).sum(1)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = below + (equal - 1) / 2
    return ranks
