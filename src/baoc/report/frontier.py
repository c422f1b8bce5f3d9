"""What a memory budget buys: risk and time over all budgets, and where more memory stops to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baoc.core.plan import PlanError
from baoc.core.text import human_bytes, table
from baoc.planning.planner import Planner
from baoc.report.explain import total_risk
from baoc.solve import Infeasible, smallest_memory

MOST_MEMORY = 2  # of AdamW16: what AdamW32 takes
_BAR = 30


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

    @property
    def knee(self) -> int | None:
        """Which point is the knee; None if the curve has none."""
        return knee([point.state_bytes for point in self.points], [point.risk for point in self.points])


def frontier(planner: Planner, points: int, time: float) -> Frontier:
    """Plans for evenly spaced budgets, from the smallest that can be met to twice AdamW16's state."""
    try:
        least = smallest_memory(replace(planner.problem(0, time), memory_budget=None))
    except Infeasible as error:
        fastest = "" if error.smallest_time is None else f" The fastest needs {error.smallest_time:.3g}."
        raise PlanError(
            f"no plan is within {time:g} of AdamW16's update time, whatever its memory.{fastest}"
        ) from error
    most = max(least, MOST_MEMORY * planner.reference_bytes)
    budgets = sorted({least + round(i * (most - least) / (points - 1)) for i in range(points)})
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
    return Frontier(tuple(found), time, planner.reference_bytes)


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
    """One row per budget, with a bar for its risk."""
    highest = max((point.risk for point in result.points), default=0.0)
    header = ["budget", "state", "of AdamW16", "time", "risk", "", "knee"]
    rows = [
        [
            human_bytes(point.memory_budget),
            human_bytes(point.state_bytes),
            f"{point.share:.1%}",
            f"{point.time:.2f}",
            f"{point.risk:.3f}",
            "#" * round(_BAR * max(0.0, point.risk) / highest) if highest > 0 else "",
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
