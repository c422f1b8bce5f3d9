"""From runs to differences: the test loss with one thing swapped against AdamW32's of the same seed, in percent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from baoc import parse
from experiments.ablation.catalog import CONFIGURATIONS, Setting, base_of, swap
from experiments.methods.by_role import REST
from experiments.runs import Row
from experiments.runs.summary import REFERENCE


@dataclass(frozen=True)
class Effect:
    """Of one swap in one setting."""

    differences: dict[int, float]  # percent, by seed
    bytes_per_parameter: float
    """Of what was swapped, after it."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences.values())

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        values = list(self.differences.values())
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None

    @property
    def text(self) -> str:
        """Mean, error and number of seeds.

        >>> Effect({0: 1.0, 1: 2.0, 2: 3.0}, 1.0).text, Effect({0: -1.5}, 1.0).text
        ('+2.00 ± 0.58 (3)', '-1.50 (1)')
        """
        error = "" if self.error is None else f" ± {self.error:.2f}"
        return f"{self.mean:+.2f}{error} ({len(self.differences)})"


class Effects:
    """All that can be read off the runs."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[str, int, str], dict[int, Row]] = {}  # by workload, steps and method; then by seed
        for row in rows:
            if row["error"] is None and row["diverged_at"] is None:
                self._rows.setdefault((row["workload"], row["steps"], row["method"]), {})[row["seed"]] = row

    def reference(self, setting: Setting) -> list[float]:
        """AdamW32's test losses."""
        return [row["test_loss"] for row in self._of(setting, REFERENCE).values()]

    def of(self, setting: Setting, place: str, configuration: str) -> Effect | None:
        """The effect of a swap of a role or of a block; None if no seed has it."""
        rows, bases = self._of(setting, swap(setting, place, configuration)), self._of(setting, base_of(setting, place))
        pairs = {seed: (row, bases[seed]) for seed, row in rows.items() if seed in bases}
        if not pairs:
            return None
        differences = {seed: 100 * (row["test_loss"] / base["test_loss"] - 1) for seed, (row, base) in pairs.items()}
        row, base = next(iter(pairs.values()))
        # what was swapped had AdamW32 before, and nothing else has changed
        swapped = (_of_adamw32(base) - _of_adamw32(row)) * row["parameters"]
        saved = (base["state_bytes"] - row["state_bytes"]) / swapped if swapped else 0.0
        return Effect(differences, abs(8 - saved))  # no -0.00

    def by_role(self, setting: Setting) -> dict[str, dict[str, Effect]]:
        """By role and configuration."""
        found = {role: {name: self.of(setting, role, name) for name in CONFIGURATIONS[role]} for role in setting.roles}
        return {role: {name: each for name, each in of.items() if each is not None} for role, of in found.items()}

    def _of(self, setting: Setting, method: str) -> dict[int, Row]:
        return self._rows.get((setting.workload, setting.steps, method), {})


def _of_adamw32(row: Row) -> float:
    """Which share of the parameters has it."""
    shares = row["plan"]["shares"] if row["plan"] else {REST: 1.0}
    return sum(share for name, share in shares.items() if parse(name) == parse(REST))
