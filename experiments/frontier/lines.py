"""From runs to what is said of a method on a workload."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments import methods
from experiments.frontier.catalog import BUDGETS, ORDER, TUNING_SEEDS, Setting
from experiments.runs import Row
from experiments.runs.summary import REFERENCE
from experiments.runs.tables import EDGE

TWO = 2.0  # standard errors


@dataclass(frozen=True)
class Line:
    """A method on a workload."""

    method: str
    rows: Mapping[int, Row]  # by seed
    references: Mapping[int, Row]
    factor: str
    """Of the learning rate, as text."""

    @property
    def label(self) -> str:
        name = methods.get(self.method).label
        is_single = self.method == name and self.method != REFERENCE
        return f"`{name}`" if is_single else name

    @property
    def differences(self) -> dict[int, float]:
        return {
            seed: 100 * (row["test_loss"] / self.references[seed]["test_loss"] - 1)
            for seed, row in self.rows.items()
            if seed in self.references
        }

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences.values())

    @property
    def error(self) -> float | None:
        values = list(self.differences.values())
        return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None

    @property
    def expected(self) -> float | None:
        """The difference that its plans expected, if they did."""
        plans = [row["plan"] or {} for row in self.rows.values()]
        found = [plan["expected_loss"] for plan in plans if plan.get("expected_loss") is not None]
        return statistics.fmean(found) if found else None

    @property
    def bytes_per_parameter(self) -> float:
        return statistics.fmean(row["state_bytes"] / row["parameters"] for row in self.rows.values())

    @property
    def share(self) -> float:
        """The most that was held, of AdamW16's."""
        return max(float(row["largest_state_bytes"] / row["reference_bytes"]) for row in self.rows.values())

    def better_than(self, other: Line) -> float | None:
        """By how many points, where that is more than two standard errors of the differences seed by seed."""
        ours, theirs = self.differences, other.differences
        gains = [theirs[seed] - ours[seed] for seed in ours if seed in theirs]
        if len(gains) < 2:
            return None
        gain, error = statistics.fmean(gains), statistics.stdev(gains) / len(gains) ** 0.5
        return gain if gain > TWO * error and gain > 0 else None


def lines_of(setting: Setting, rows: Sequence[Row]) -> list[Line]:
    """AdamW32, then all others in the catalog's order."""
    mine = [row for row in rows if row["workload"] == setting.workload and row["steps"] == setting.steps]
    references = finals(mine, setting, REFERENCE)
    found = []
    run = {row["method"] for row in mine}
    for method in (REFERENCE, *(each for each in ORDER if each in run)):
        trained = {seed: row for seed, row in finals(mine, setting, method).items() if seed in references}
        if trained:
            tried = {row["lr_factor"] for row in mine if row["method"] == method and len(row["lr_grid"]) > 1}
            factor = best_factor(mine, setting, method if tried else REFERENCE)
            edge = EDGE if tried and factor in (min(tried), max(tried)) else ""
            found.append(Line(method, trained, references, f"x{factor:g}{edge}"))
    return found


def budgeted(lines: Sequence[Line]) -> dict[float, Line]:
    """BAOC's own, by budget."""
    found = {line.method: line for line in lines}
    return {share: found[f"baoc@{share:g}"] for share in BUDGETS if f"baoc@{share:g}" in found}


def best_factor(rows: Iterable[Row], setting: Setting, method: str) -> float:
    """Of those that were tried, by the mean validation loss of the seeds that tried them all."""
    tried: dict[int, dict[float, float]] = {}
    for row in rows:
        if _is_of(row, setting, method) and row["seed"] in TUNING_SEEDS:
            loss = row.get("validation_loss")
            tried.setdefault(row["seed"], {})[row["lr_factor"]] = math.inf if loss is None else loss
    most = max(map(len, tried.values()), default=0)
    whole = [losses for losses in tried.values() if len(losses) == most]
    if not whole:
        return 1.0
    means = {factor: statistics.fmean(losses.get(factor, math.inf) for losses in whole) for factor in whole[0]}
    return min(means, key=lambda factor: (means[factor], factor))


def finals(rows: Sequence[Row], setting: Setting, method: str) -> dict[int, Row]:
    """By seed: the runs at the learning rate that a method is judged at. Those that failed are left out."""
    is_peer = any(_is_of(row, setting, method) and len(row["lr_grid"]) > 1 for row in rows)
    factor = best_factor(rows, setting, method if is_peer else REFERENCE)
    mine = [row for row in rows if _is_of(row, setting, method) and row["lr_factor"] == factor]
    return {row["seed"]: row for row in mine if row["error"] is None and row["diverged_at"] is None}


def _is_of(row: Row, setting: Setting, method: str) -> bool:
    return (row["workload"], row["method"], row["steps"]) == (setting.workload, method, setting.steps)
