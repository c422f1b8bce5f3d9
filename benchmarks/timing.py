"""Times that can be compared: every action in every round, in a new order each time."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Spread = dict[str, float]
"""The median of several values and the quartiles around it: ``median``, ``low``, ``high``."""

FEWEST = 3
SETTLE = 0.01  # seconds: packages bring thread pools of their own, whose threads spin for a while after work


CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
"""What is measured: time that passes, or time of processors in this process, which other processes hardly change."""


def timed(action: Callable[[], object], clock: str = "wall") -> float:
    now = CLOCKS[clock]
    began = now()
    action()
    return now() - began


def interleaved(
    actions: Mapping[str, Callable[[], object]], repeats: int, seconds_each: float = math.inf, clock: str = "wall"
) -> dict[str, list[float]]:
    """Seconds of every action, round by round: a slow moment of the machine hits all of them alike.

    An action that has used up ``seconds_each`` sits out the rounds after its third, so the n-th values of two actions
    are always of the same round.
    """
    samples: dict[str, list[float]] = {name: [] for name in actions}
    shuffle = random.Random(0).shuffle
    for _ in range(repeats):
        due = [name for name, taken in samples.items() if len(taken) < FEWEST or sum(taken) < seconds_each]
        shuffle(due)
        for name in due:
            time.sleep(SETTLE)
            samples[name].append(timed(actions[name], clock))
    return samples


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles.

    >>> spread([4.0, 1.0, 2.0, 3.0, 5.0])
    {'median': 3.0, 'low': 2.0, 'high': 4.0}
    """
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (*values,) * 3
    return {"median": median, "low": low, "high": high}


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> Spread:
    """The ratios within each round in which both were measured.

    >>> paired_ratio([2.0, 6.0], [1.0, 2.0, 9.0])
    {'median': 2.5, 'low': 2.25, 'high': 2.75}
    """
    return spread([value / unit for value, unit in zip(values, reference)])
