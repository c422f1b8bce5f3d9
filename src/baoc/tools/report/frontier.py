"""Risk and time of plans over all memory budgets, the knee of the curve, and a plot.

Only :func:`plot` imports matplotlib.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baoc.core.plan import Plan
from baoc.core.spec import Hyper
from baoc.core.text import human_bytes, predicted_interval, short_prediction, table
from baoc.planners.effect_classes import PLURAL
from baoc.planners.effect_problem import EffectProblem
from baoc.planners.model_facts import ModelFacts
from baoc.planners.paper.problem import PaperProblem
from baoc.tools.report.explain import ReportError, total_risk

MOST_MEMORY = 2  # times the state of AdamW16: the state of AdamW32
_SMALLEST_SHARE = 1000
_BAR = 6
_ROLES = {plural: role for role, plural in PLURAL.items()}
POINTS = 20
"""Budgets of a frontier, in `baoc frontier` and in a report."""
FORMATS = (".png", ".svg", ".pdf")
"""Supported file types of plots."""


@dataclass(frozen=True)
class Point:
    """The plan of least risk for one memory budget."""

    memory_budget: int
    state_bytes: int
    share: float  # of the state of AdamW16
    risk: float
    time: float
    interval: tuple[float, float] | None = None
    """Lowest and highest predicted change of the loss (90%)."""


@dataclass(frozen=True)
class Frontier:
    """Points from the smallest budget to the largest. With ``is_loss``, risk is the expected loss change in percent."""

    points: tuple[Point, ...]
    time_budget: float
    reference_bytes: int
    is_loss: bool = False

    def risk_text(self, point: Point) -> str:
        """Format the risk of a point."""
        if not self.is_loss:
            return f"{point.risk:.3f}"
        return short_prediction(point.risk, point.interval)

    @property
    def knee(self) -> int | None:
        """Index of the knee, or None if the curve has none."""
        return knee([point.state_bytes for point in self.points], [point.risk for point in self.points])


def model_of(plan: Plan, hyper: Hyper) -> ModelFacts:
    """Return what a plan says about its model, to plan for other budgets.

    Args:
        plan: A plan of the default planner, or one made by hand.
        hyper: Hyperparameters of the training.

    Returns:
        The model. Roles are those that the names of blocks state, and else read off the names of parameters.

    Raises:
        ReportError: If the settings of the plan are damaged.
    """
    shapes = {name: shape for block in plan.blocks for name, shape in block.parameters.items()}
    default = ModelFacts(shapes).plain()
    kinds = {name: block.name.partition("/")[0] for name, block in plan.by_parameter}
    roles = {name: _ROLES[kind].value for name, kind in kinds.items() if kind in _ROLES}
    try:
        facts = {name: plan.settings.get(name, value) for name, value in default.items()} | {"roles": roles}
        return replace(ModelFacts.from_plain(facts, shapes), hyper=hyper, splits=plan.splits)
    except ValueError as error:
        raise ReportError(f"the settings of the plan are damaged: {error}.") from None


def frontier(problem: EffectProblem | PaperProblem, points: int = POINTS) -> Frontier:
    """Plan for budgets from the smallest feasible one to twice the state of AdamW16.

    Args:
        problem: The problem of the model.
        points: Number of budgets. Each is larger than the previous one by the same factor.

    Returns:
        The frontier.
    """
    reference = problem.reference_bytes
    found = [
        Point(
            memory_budget=plan.settings["memory_budget"],
            state_bytes=plan.state_bytes,
            share=plan.state_bytes / max(1, reference),
            risk=total_risk(plan),
            time=plan.settings["time"],
            interval=predicted_interval(plan.settings),
        )
        for plan in problem.frontier(spread(problem.least_bytes(), MOST_MEMORY * reference, points))
    ]
    return Frontier(tuple(found), problem.planner.time, reference, isinstance(problem, EffectProblem))


def spread(least: int, most: int, points: int) -> list[int]:
    """Return geometrically spaced budgets.

    Args:
        least: The first budget, in bytes. If it is very small, the second one is a thousandth of the last.
        most: The last budget.
        points: Number of budgets. There are fewer if they would be equal.

    Returns:
        Budgets in bytes, ascending.

    Example:
        >>> spread(1000, 16000, 5), spread(0, 16000, 5)
        ([1000, 2000, 4000, 8000, 16000], [0, 16, 160, 1600, 16000])
    """
    most = max(least, most)
    first = min(most, max(least, most // _SMALLEST_SHARE))  # the smallest plan may have no state
    steps = points - 1 if first == least else points - 2
    growth = (most / max(1, first)) ** (1 / max(1, steps))
    return sorted({least, most, *(min(most, round(first * growth**i)) for i in range(steps + 1))})


def knee(memory: Sequence[float], risk: Sequence[float]) -> int | None:
    """Find the point furthest below the line between the ends of the curve, with both axes scaled to 0..1.

    Args:
        memory: Memory of each point, ascending.
        risk: Risk of each point.

    Returns:
        The index of the point, or None if no point is below the line.

    Example:
        >>> knee([0, 1, 2, 3, 4], [10, 3, 2, 1, 0])
        1
        >>> knee([0, 1, 2], [2, 1, 0]) is None
        True
    """
    if len(memory) < 3 or memory[-1] <= memory[0] or risk[0] <= risk[-1]:
        return None
    width, height = memory[-1] - memory[0], risk[0] - risk[-1]
    below = [1 - (m - memory[0]) / width - (r - risk[-1]) / height for m, r in zip(memory, risk)]
    best = max(range(len(below)), key=below.__getitem__)
    return best if below[best] > 1e-9 else None


def frontier_table(result: Frontier) -> str:
    """Format the frontier for a terminal.

    Args:
        result: The frontier.

    Returns:
        A table with one row per budget, and a bar that shows the risk above the minimum.
    """
    risks = [point.risk for point in result.points]
    lowest, span = min(risks, default=0.0), max(risks, default=0.0) - min(risks, default=0.0)
    header = ["budget", "state", "of AdamW16", "time", "loss" if result.is_loss else "risk", "", "knee"]
    rows = [
        [
            human_bytes(point.memory_budget),
            human_bytes(point.state_bytes),
            f"{point.share:.1%}",
            f"{point.time:.2f}",
            result.risk_text(point),
            "#" * round(_BAR * (point.risk - lowest) / span) if span > 0 else "",
            "<- knee" if index == result.knee else "",
        ]
        for index, point in enumerate(result.points)
    ]
    if result.knee is None:
        header, rows = header[:-1], [row[:-1] for row in rows]
    lines = table(header, rows, right=header[:5]).splitlines()
    if result.knee is not None:  # the column of the mark has no title
        lines[0] = lines[0].removesuffix("knee").rstrip()
        lines[1] = " ".join(lines[1].split(" ")[:-1]).rstrip()
    return "\n".join(lines)


def check_plot(path: str | os.PathLike[str]) -> None:
    """Check that a plot can be written, before any work is done for it.

    Args:
        path: The file to write.

    Raises:
        ReportError: If the file type is not supported or matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ReportError(f"cannot plot to {os.fspath(path)!r}: its name must end in {', '.join(FORMATS)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ReportError("a plot needs matplotlib. Run: pip install 'baoc[plot]'") from None


def plot(result: Frontier, path: str | os.PathLike[str], title: str = "") -> None:
    """Plot risk and time against memory.

    Args:
        result: The frontier.
        path: The file to write. Its suffix sets the file type.
        title: Title of the plot.

    Raises:
        ReportError: If the file type is not supported or matplotlib is not installed.
    """
    check_plot(path)
    figure = _figure(result, title)
    figure.savefig(path, dpi=150)


def _figure(result: Frontier, title: str) -> Any:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    shares = [100 * point.share for point in result.points]
    above.plot(shares, [point.risk for point in result.points], marker="o", markersize=4)
    below.plot(shares, [point.time for point in result.points], marker="o", markersize=4, color="tab:green")
    if result.knee is not None:
        point = result.points[result.knee]
        above.plot([100 * point.share], [point.risk], marker="o", markersize=9, color="tab:red", linestyle="none")
        above.annotate(
            f"knee: {point.share:.0%}",
            (100 * point.share, point.risk),
            textcoords="offset points",
            xytext=(10, 8),
            color="tab:red",
        )
    if math.isfinite(result.time_budget):
        below.axhline(result.time_budget, linestyle="--", linewidth=1, color="gray", label="budget")
        below.legend(loc="best", fontsize="small")
    above.set_ylabel("expected loss (%)" if result.is_loss else "risk")
    below.set_ylabel("time\n(AdamW16 = 1)")
    below.set_xlabel("optimizer state (% of AdamW16's)")
    below.set_xscale("symlog", linthresh=1.0)
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    if title:
        above.set_title(title)
    return figure
