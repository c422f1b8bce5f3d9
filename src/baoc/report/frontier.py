"""What a memory budget buys: risk and time over all budgets, and where more memory stops to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baoc.core.configuration import parse
from baoc.core.text import human_bytes, table
from baoc.planning.planner import Planner
from baoc.planning.risk import MEASURED
from baoc.report.explain import total_risk

MOST_MEMORY = 2  # of AdamW16: what AdamW32 takes
_SMALLEST_SHARE = 1000
_BAR = 20


@dataclass(frozen=True)
class Point:
    """The plan of least risk for one memory budget."""

    memory_budget: int
    state_bytes: int
    share: float  # of AdamW16's state
    risk: float
    time: float


@dataclass(frozen=True)
class Frontier:
    """Points from the smallest budget to the largest."""

    points: tuple[Point, ...]
    time_budget: float
    reference_bytes: int
    is_loss: bool = False  # risk is the expected change of the loss, in percent

    def risk_text(self, point: Point) -> str:
        return f"{point.risk:+.2f}%" if self.is_loss else f"{point.risk:.3f}"

    @property
    def knee(self) -> int | None:
        """Which point is the knee; None if the curve has none."""
        return knee([point.state_bytes for point in self.points], [point.risk for point in self.points])


def frontier(planner: Planner, points: int, time: float | None = None) -> Frontier:
    """Plans from the smallest budget that can be met to twice AdamW16's state, each larger by the same factor."""
    time = planner.time_budget(time)
    budgets = spread(planner.least_bytes(time), MOST_MEMORY * planner.reference_bytes, points)
    found = [
        Point(
            memory_budget=plan.settings["memory_budget"],
            state_bytes=plan.state_bytes,
            share=plan.state_bytes / max(1, planner.reference_bytes),
            risk=total_risk(plan),
            time=plan.settings["time"],
        )
        for plan in planner.frontier(budgets, time)
    ]
    return Frontier(tuple(found), time, planner.reference_bytes, planner.settings.chosen_risk == MEASURED)


def spread(least: int, most: int, points: int) -> list[str]:
    """Budgets from the least to the most, each larger than the one before by the same factor, as a person writes them.

    >>> spread(1000, 16000, 6)
    ['1000B', '2000B', '4000B', '8000B', '16000B']
    """
    most = max(least, most)
    first = min(most, max(least, most // _SMALLEST_SHARE))  # the cheapest plan may hold nothing
    growth = (most / max(1, first)) ** (1 / max(1, points - 2))
    sizes = sorted({least, most, *(min(most, round(first * growth**i)) for i in range(points - 1))})
    return [f"{size}B" for size in sizes]


def smallest_budget(planner: Planner, time: float | None = None) -> int:
    """That of the cheapest plan, but for norms and biases: fp32 state of those costs next to nothing."""
    vectors = [shape for block in planner.blocks for shape in block.values() if len(shape) < 2]
    return planner.least_bytes(time) + sum(parse("adamw-32").state_bytes(shape) for shape in vectors)


def knee(memory: Sequence[float], risk: Sequence[float]) -> int | None:
    """The point furthest below the line between the ends of the curve, both axes scaled to 0..1.

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
    """One row per budget, with a bar for how much its risk is above the least."""
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
    if result.knee is not None:  # the mark needs no title
        lines[0] = lines[0].removesuffix("knee").rstrip()
        lines[1] = " ".join(lines[1].split(" ")[:-1]).rstrip()
    return "\n".join(lines)
