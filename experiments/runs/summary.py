"""From runs to what is said about a method on a workload: means and spreads over seeds at its best learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.runs.cell import Row
from experiments.runs.tuning import choose

REFERENCE = "adamw32"
"""What everything but the paper's experiments is compared with, seed by seed."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation."""

    mean: float
    std: float | None  # None: there is one seed only

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None if there are no values.

        >>> Spread.of([1.0, 2.0, 3.0])
        Spread(mean=2.0, std=1.0)
        """
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Line:
    """A method, or a variant of it, on a workload."""

    rows: tuple[Row, ...]  # one per seed
    at_edge: bool = False
    """Its learning rate is at the edge of the grid."""
    is_tuned: bool = True
    """All learning rates have been tried."""
    baseline: Line | None = field(default=None, repr=False)
    """The same method without the variant."""
    reference: Line | None = field(default=None, repr=False)
    """What it is compared with, on the same workload."""

    def __getitem__(self, name: str) -> Any:
        """What all seeds share: ``workload``, ``method``, ``variant``, ``label``, ``metric``, ``lr`` ..."""
        return self.rows[0][name]

    @property
    def trained(self) -> tuple[Row, ...]:
        """The runs with scores."""
        return tuple(row for row in self.rows if row["error"] is None and row["diverged_at"] is None)

    @property
    def diverged(self) -> int:
        return sum(row["error"] is None and row["diverged_at"] is not None for row in self.rows)

    @property
    def failure(self) -> str | None:
        return next((row["error"] for row in self.rows if row["error"]), None)

    def spread(self, value: str | Callable[[Row], float | None]) -> Spread | None:
        """Of a field, or of what a function takes from a row."""
        take = value if callable(value) else lambda row: row.get(value)
        return Spread.of([number for row in self.trained if (number := take(row)) is not None])

    @property
    def against_reference(self) -> Spread | None:
        """The test score against the reference's of the same seed: in points for accuracies, else in percent.

        Runs of one seed begin with the same weights and see the same batches, so these differences spread less than
        the scores do.
        """
        pairs = self.pairs("test_metric")
        if self["metric"] == "accuracy":
            return Spread.of([100 * (score - other) for score, other in pairs])
        return Spread.of([100 * (score / other - 1) for score, other in pairs])

    def pairs(self, value: str) -> list[tuple[float, float]]:
        """A field beside the reference's of the same seed; none for the reference itself."""
        if self.reference is None or self["method"] == self.reference["method"]:
            return []
        return self.beside(self.reference, value)

    def beside(self, other: Line, value: str) -> list[tuple[float, float]]:
        """A field beside another line's of the same seed."""
        theirs = {row["seed"]: row[value] for row in other.trained}
        return [(row[value], theirs[row["seed"]]) for row in self.trained if row["seed"] in theirs]

    @property
    def same_plans(self) -> int:
        """How many seeds of a variant have the default's plan, and so the default's numbers."""
        return sum(bool(row.get("same_plan")) for row in self.rows)

    @property
    def over_budget(self) -> int:
        """How many seeds hold more than the share in their method's name: no plan fitted after the warm-up."""
        _, _, share = str(self["method"]).partition("@")
        try:
            budget = float(share)
        except ValueError:  # "auto", or no budget
            return 0
        return sum(row["state_bytes"] > budget * row["reference_bytes"] for row in self.trained)

    @property
    def moved(self) -> Spread | None:
        """The percentage of parameters that must change their configuration to get from the baseline's plan to this."""
        if self.baseline is None:
            return None
        plans = {row["seed"]: row["plan"]["shares"] for row in self.baseline.trained if row["plan"]}
        pairs = [(row["plan"]["shares"], plans[row["seed"]]) for row in self.trained if row["seed"] in plans]
        return Spread.of([100 * _distance(ours, theirs) for ours, theirs in pairs])


def summarise(rows: Iterable[Row], reference_method: str = REFERENCE) -> dict[str, list[Line]]:
    """The lines of each workload, both in the order in which they were run first."""
    by_method: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_method.setdefault((row["workload"], row["method"]), []).append(row)
    found: dict[str, list[Line]] = {}
    for (workload, _), mine in by_method.items():
        found.setdefault(workload, []).extend(_lines(mine))
    for workload, lines in found.items():
        reference = next((line for line in lines if line["method"] == reference_method), None)
        found[workload] = [replace(line, reference=reference) for line in lines]
    return found


def _lines(rows: Sequence[Row]) -> list[Line]:
    tried = [row for row in rows if row["phase"] == "tune"]
    grid = rows[0]["lr_grid"]
    best = choose(tried or rows, grid)
    is_tuned = not tried or {row["lr_factor"] for row in tried} == {*grid} or any(row["error"] for row in tried)
    variants: dict[str, list[Row]] = {}
    for row in rows:
        if row["lr_factor"] == best.lr_factor:
            variants.setdefault(row["variant"], []).append(row)
    lines: list[Line] = []
    for variant, mine in variants.items():
        ordered = tuple(sorted(mine, key=lambda row: row["seed"]))
        baseline = lines[0] if variant and lines else None
        failed = any(row["error"] for row in ordered)
        lines.append(Line(ordered, best.at_edge and is_tuned and not failed, is_tuned, baseline))
    return lines


def _distance(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Half of what two ways to share one out differ.

    >>> _distance({"adamw-8": 0.75, "sgd": 0.25}, {"adamw-8": 1.0})
    0.25
    """
    return sum(abs(ours.get(name, 0.0) - theirs.get(name, 0.0)) for name in {**ours, **theirs}) / 2
