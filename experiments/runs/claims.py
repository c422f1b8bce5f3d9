"""What the paper says about its experiments, and whether our runs say the same."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from experiments.runs.summary import Line

Lines = Mapping[tuple[str, str], Line]
"""Of one workload, by method and variant."""

BAOC = "baoc-paper@0.5"
_LEVEL = 0.5  # percent or points: less than this is no difference, however small the spread


@dataclass(frozen=True)
class Seen:
    """What one workload shows."""

    text: str
    agrees: bool


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and how one workload is asked about it."""

    says: str
    look: Callable[[Lines], Seen | None]


@dataclass(frozen=True)
class Difference:
    """Of a field to another line's, seed by seed: in points for accuracies, else in percent. More is worse."""

    mean: float
    error: float

    @property
    def verdict(self) -> str:
        """``better``, ``level`` or ``worse``: beyond two standard errors, and beyond what matters."""
        if abs(self.mean) <= max(2 * self.error, _LEVEL):
            return "level"
        return "worse" if self.mean > 0 else "better"

    def text(self, unit: str, *, worse: str, better: str) -> str:
        """As a person says it.

        >>> Difference(-1.26, 0.4).text("%", worse="worse", better="better")
        '1.3 ± 0.4% better'
        """
        spread = f" ± {self.error:.1f}" if self.error else ""
        return f"{abs(self.mean):.1f}{spread}{unit} {worse if self.mean > 0 else better}"


def difference(line: Line, other: Line, value: str) -> Difference | None:
    """Return how much worse a line is than another; None if they share no seed.

    Scores of accuracy count with their sign turned, so that more is worse for every field.
    """
    pairs = [(ours, theirs) for ours, theirs in line.beside(other, value) if ours is not None and theirs is not None]
    if not pairs:
        return None
    if value == "test_metric" and line["metric"] == "accuracy":
        values = [100 * (theirs - ours) for ours, theirs in pairs]
    else:
        values = [100 * (ours / theirs - 1) for ours, theirs in pairs]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Difference(statistics.fmean(values), error)


def _compared(
    subject: tuple[str, str], other: tuple[str, str], expected: str, value: str = "test_metric"
) -> Callable[[Lines], Seen | None]:
    """Ask whether the subject is better than, level with or worse than another line; "not worse" is also an answer."""

    def look(lines: Lines) -> Seen | None:
        if subject not in lines or other not in lines:
            return None
        field = "train_loss" if value == "test_metric" and lines[subject]["metric"] == "loss" else value
        if any(lines[key].over_budget for key in (subject, other)):
            return Seen("no plan fits the budget", False)
        found = difference(lines[subject], lines[other], field)
        if found is None:
            return None
        agrees = found.verdict != "worse" if expected == "not worse" else found.verdict == expected
        unit = " points" if field == "test_metric" and lines[subject]["metric"] == "accuracy" else "%"
        worse, better = ("longer", "shorter") if value == "seconds" else ("worse", "better")
        told = found.text(unit, worse=worse, better=better)
        return Seen(f"level ({told})" if found.verdict == "level" else told, agrees)

    return look


def _claim(
    says: str,
    subject: str,
    other: str,
    expected: str,
    value: str = "test_metric",
) -> Claim:
    """``subject`` and ``other`` are a method, or a method and a variant after a comma."""
    return Claim(says, _compared(_key(subject), _key(other), expected, value))


def _key(text: str) -> tuple[str, str]:
    method, _, variant = text.partition(",")
    return method, variant


def _holds_budget(lines: Lines) -> Seen | None:
    line = lines.get((BAOC, ""))
    if line is None or not line.trained:
        return None
    most = max(row["state_bytes"] / row["reference_bytes"] for row in line.trained)
    return Seen(f"{100 * most:.1f}% of AdamW16's state", most <= 0.5)


def _is_not_monotone(lines: Lines) -> Seen | None:
    budgets = sorted(
        (float(method.partition("@")[2]), line)
        for (method, variant), line in lines.items()
        if method.startswith("baoc-paper@") and not variant and line.trained
    )
    if len(budgets) < 3:
        return None
    steps = [difference(larger, smaller, "test_metric") for (_, smaller), (_, larger) in pairwise(budgets)]
    worse = sum(step is not None and step.mean > 0 for step in steps)
    return Seen(f"worse at {worse} of {len(steps)} steps up", worse > 0)


def _changes_little(prefix: str, most: float) -> Callable[[Lines], Seen | None]:
    def look(lines: Lines) -> Seen | None:
        default = lines.get((BAOC, ""))
        mine = [line for (method, variant), line in lines.items() if method == BAOC and variant.startswith(prefix)]
        if default is None or not mine:
            return None
        found = [step.mean for line in mine if (step := difference(line, default, "test_metric")) is not None]
        if not found:
            return None
        unit = "points" if default["metric"] == "accuracy" else "%"
        limit = 1.0 if default["metric"] == "accuracy" else most
        largest = max(found, key=abs)
        told = Difference(largest, 0.0).text(f" {unit}", worse="worse", better="better")
        return Seen(f"up to {told}", abs(largest) <= limit)

    return look


def _keeps_plan(prefix: str) -> Callable[[Lines], Seen | None]:
    def look(lines: Lines) -> Seen | None:
        mine = [line for (method, variant), line in lines.items() if method == BAOC and variant.startswith(prefix)]
        total = sum(len(line.rows) for line in mine)
        if not total:
            return None
        same = sum(line.same_plans for line in mine)
        return Seen(f"same plan in {same} of {total} runs", 2 * same > total)

    return look


CLAIMS: Mapping[str, Sequence[Claim]] = {
    "exp1": (
        Claim("BAOC holds at most half of AdamW16's state", _holds_budget),
        _claim("its test score is competitive with AdamW16's", BAOC, "adamw16", "not worse"),
        _claim("its test score is AdamW8's or better", BAOC, "adamw8", "not worse"),
        _claim("its test score is better than Heu-1's", BAOC, "by-type@0.5", "better"),
        _claim("its test score is better than Heu-2's", BAOC, "by-size@0.5", "better"),
        _claim("less state does not cost wall-clock time (against AdamW16)", BAOC, "adamw16", "not worse", "seconds"),
    ),
    "exp2": (
        _claim("at rho = 1 it is level with AdamW16", "baoc-paper@1", "adamw16", "level"),
        _claim("at rho = 0.5 it is AdamW8 or better", BAOC, "adamw8", "not worse"),
        _claim("rho = 0.3 is worse than 0.5", "baoc-paper@0.3", BAOC, "worse"),
        Claim("the metric need not be monotone in rho", _is_not_monotone),
    ),
    "exp3": (
        _claim("after a longer schedule BAOC is ahead of Muon", BAOC, "muon", "better"),
        _claim("it is ahead of COSMOS", BAOC, "cosmos", "better"),
        _claim("it is ahead of AdamW16", BAOC, "adamw16", "better"),
        _claim("it is ahead of Adam-mini (on 3 of 4 in the paper)", BAOC, "adam-mini", "better"),
        Claim("it holds half of AdamW16's state", _holds_budget),
        _claim("it takes less time than AdamW16", BAOC, "adamw16", "better", "seconds"),
    ),
    "diagnostics": (
        Claim("most sampling ratios give the same plan", _keeps_plan("s=")),
        Claim("most values of gamma give the same plan", _keeps_plan("gamma=")),
        _claim("gamma = 0.9 is a little worse", f"{BAOC},gamma=0.9", BAOC, "worse"),
        _claim("without SGD it is better (UNet)", f"{BAOC},no-SGD", BAOC, "better"),
        _claim("with a preference for AdamW it is better (UNet)", f"{BAOC},pref", BAOC, "better"),
    ),
    "anchors": (
        Claim("anchors moved by up to 20% change the score by less than 5% (1 point)", _changes_little("anchors", 5.0)),
    ),
    "partition": (_claim("coarse blocks are worse", f"{BAOC},coarse", BAOC, "worse"),),
    "online": (
        _claim("planning again without inherited state is worse (ViT)", f"{BAOC},online", BAOC, "worse"),
        _claim("inheriting is not worse than restarting", f"{BAOC},online+inherit", f"{BAOC},online", "not worse"),
        _claim("with inherited state it is not worse than one plan", f"{BAOC},online+inherit", BAOC, "not worse"),
    ),
}
"""By experiment."""
