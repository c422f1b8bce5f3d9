"""How fast `baoc.solve` is, and HiGHS on the paper's MILP beside it, on the same instances and in the same run.

    python -m benchmarks.solve [--quick] [--json]

Instances are made like real ones: block sizes from 1e4 to 1e8 parameters, bytes per parameter as optimizers have them,
risks that grow as memory falls, times around the reference's, and half of AdamW16's memory. Time is slack in one half
of them and binds in the other. Instances of the class problem have tensors that are interchangeable: what the default
planner solves. Repeats of all cases are interleaved; a time is their median, with the smallest and the largest. HiGHS
runs on one thread, as `baoc.solve` does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from baoc.solve import (
    ClassProblem,
    ClassSolution,
    Problem,
    Solution,
    class_frontier,
    frontier,
    smallest_class_memory,
    smallest_memory,
    solve,
    solve_classes,
)

BYTES = (8, 4, 2.03, 4.01, 2.01, 1.03, 4, 2, 1.02, 0.01, 0)
CLASSES = ((4, 11), (8, 11), (24, 21))
SIZES = ((12, 21), (100, 21), (1_000, 21), (5_000, 21), (20_000, 21), (20_000, 48))
EXACT_UP_TO = 1_000  # blocks; above, a proven gap of 1e-6 is asked for, of HiGHS too
SLACK, BINDING = 1.3, 0.8
POINTS, CLASS_POINTS = 200, 40

Result = dict[str, list[dict[str, object]]]


def instance(blocks: int, configurations: int, time_budget: float = SLACK, seed: int = 0) -> Problem:
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(np.log(1e4), np.log(1e8), blocks)).astype(np.int64)
    per_parameter = np.resize(BYTES, configurations)
    memory = np.ceil(sizes[:, None] * per_parameter).astype(np.int64)
    cheapness = 1 - per_parameter / 8
    risk = 3 * cheapness * random.random(memory.shape) + 0.3 * random.random(memory.shape)
    times = random.uniform(0.5, 1.6, memory.shape)
    return Problem(np.clip(risk, 0, 3), memory, times, int(4 * sizes.sum()) // 2, time_budget)


def class_instance(classes: int, configurations: int, time_budget: float = SLACK, seed: int = 0) -> ClassProblem:
    """Return an instance in which 1 to 64 tensors of each class are interchangeable."""
    blocks = instance(classes, configurations, time_budget, seed)
    counts = np.random.default_rng(seed).integers(1, 65, classes)
    reference = counts @ blocks.memory[:, BYTES.index(4)]
    total = int(counts.sum())
    return ClassProblem(counts, blocks.cost, blocks.memory, blocks.time, int(reference) // 2, time_budget * total)


@dataclass(frozen=True)
class Judgement:
    """What HiGHS says of a problem."""

    seconds: float
    objective: float
    relative_gap: float
    optimal: bool  # to the gap asked for


def highs(
    problem: Problem | ClassProblem, *, relative_gap: float = 0.0, time_limit: float = 60.0, relaxed: bool = False
) -> Judgement:
    """Give the MILP as it stands, or its linear relaxation, to HiGHS.

    In the class problem a variable says how many tensors of a class have a configuration, and the time budget is for
    the sum; in the paper's problem it is 0 or 1, and the time budget is for the mean.
    """
    import highspy

    blocks, configurations = problem.cost.shape
    entries = problem.cost.size
    scale = max(1, int(problem.memory.max()))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = entries, blocks + 2
    allowed = np.isfinite(problem.cost).ravel()
    model.col_cost_ = np.where(allowed, problem.cost.ravel(), 0)
    is_of_classes = isinstance(problem, ClassProblem)
    counts = np.asarray(problem.counts if isinstance(problem, ClassProblem) else np.ones(blocks), dtype=float)
    model.col_lower_, model.col_upper_ = np.zeros(entries), allowed * np.repeat(counts, configurations)
    budgets = [
        np.inf if problem.memory_budget is None else problem.memory_budget / scale,
        np.inf if problem.time_budget is None else problem.time_budget * (1 if is_of_classes else blocks),
    ]
    model.row_lower_ = np.concatenate([counts, [-np.inf, -np.inf]])
    model.row_upper_ = np.concatenate([counts, budgets])
    rows = np.stack([np.repeat(np.arange(blocks), configurations), *np.full((2, entries), [[blocks], [blocks + 1]])])
    values = np.stack([np.ones(entries), problem.memory.ravel() / scale, problem.time.ravel()])
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = 3 * np.arange(entries + 1)
    model.a_matrix_.index_, model.a_matrix_.value_ = rows.T.ravel(), values.T.ravel()
    if not relaxed:
        model.integrality_ = [highspy.HighsVarType.kInteger] * entries
    solver = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": 1,
        "mip_rel_gap": relative_gap,
        "mip_abs_gap": 0.0,
        "time_limit": time_limit,
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    began = time.perf_counter()
    solver.passModel(model)
    solver.run()
    seconds = time.perf_counter() - began
    info = solver.getInfo()
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Judgement(seconds, info.objective_function_value, 0.0 if relaxed else info.mip_gap, optimal)


@dataclass
class Case:
    blocks: int
    configurations: int
    time_budget: float
    problem: Problem = field(init=False)
    relative_gap: float = field(init=False)
    seconds: list[float] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    solution: Solution | None = None

    def __post_init__(self) -> None:
        self.problem = instance(self.blocks, self.configurations, self.time_budget)
        self.relative_gap = 0.0 if self.blocks <= EXACT_UP_TO else 1e-6

    def run(self, time_limit: float) -> None:
        began = time.perf_counter()
        self.solution = solve(self.problem, relative_gap=self.relative_gap)
        self.seconds.append(time.perf_counter() - began)
        if not self.judgements or self.judgements[0].seconds < 2:  # no need to see the same time limit again
            self.judgements.append(highs(self.problem, relative_gap=self.relative_gap, time_limit=time_limit))

    def row(self) -> dict[str, object]:
        assert self.solution is not None
        judged = self.judgements[0]
        found = np.isfinite(judged.objective) and judged.relative_gap < 1  # else it has no assignment worth the name
        difference = (self.solution.objective - judged.objective) / abs(judged.objective) if found else None
        return {
            "blocks": self.blocks,
            "configurations": self.configurations,
            "time": "binds" if self.solution.time_price else "slack",
            "seconds": statistics.median(self.seconds),
            "seconds_range": [min(self.seconds), max(self.seconds)],
            "relative_gap": self.solution.relative_gap,
            "passes": self.solution.passes,
            "core_blocks": self.solution.core,
            "states": self.solution.states,
            "highs_seconds": statistics.median(judgement.seconds for judgement in self.judgements),
            "highs_relative_gap": judged.relative_gap if np.isfinite(judged.relative_gap) else None,
            "highs_finished": judged.optimal,
            "objective_less_highs": difference,
            "agree": abs(difference) <= max(2 * self.relative_gap, 1e-8) if judged.optimal and found else None,
        }


@dataclass
class ClassCase:
    """One instance of the class problem, solved several times."""

    classes: int
    configurations: int
    time_budget: float
    problem: ClassProblem = field(init=False)
    seconds: list[float] = field(default_factory=list)
    frontier_seconds: list[float] = field(default_factory=list)
    solution: ClassSolution | None = None
    judged: Judgement | None = None

    def __post_init__(self) -> None:
        self.problem = class_instance(self.classes, self.configurations, self.time_budget)
        counts = np.asarray(self.problem.counts)
        smallest = smallest_class_memory(self.problem)
        largest = int(counts @ np.asarray(self.problem.memory).max(axis=1))
        self.budgets = np.linspace(smallest, largest, CLASS_POINTS).astype(int).tolist()

    def run(self, time_limit: float) -> None:
        began = time.perf_counter()
        self.solution = solve_classes(self.problem)
        self.seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        class_frontier(self.problem, self.budgets)
        self.frontier_seconds.append(time.perf_counter() - began)
        self.judged = self.judged or highs(self.problem, time_limit=time_limit)

    def row(self) -> dict[str, object]:
        assert self.solution is not None and self.judged is not None
        mine, theirs = self.solution.objective, self.judged.objective
        return {
            "classes": self.classes,
            "tensors": int(np.sum(self.problem.counts)),
            "configurations": self.configurations,
            "time": "slack" if self.time_budget == SLACK else "binds",
            "seconds": statistics.median(self.seconds),
            "gap": mine - self.solution.bound,
            "frontier_points": len(self.budgets),
            "frontier_seconds": statistics.median(self.frontier_seconds),
            "highs_seconds": self.judged.seconds,
            "agree": abs(mine - theirs) <= 1e-6 * max(1.0, abs(theirs)) if self.judged.optimal else None,
        }


def run_frontier(time_budget: float, repeats: int) -> dict[str, object]:
    problem = instance(100, 21, time_budget)
    smallest = smallest_memory(problem)
    largest = int(problem.memory.max(axis=1).sum())
    budgets = np.linspace(smallest, largest, POINTS).astype(int).tolist()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        solutions = frontier(problem, budgets)
        seconds.append(time.perf_counter() - began)
    return {
        "blocks": 100,
        "configurations": 21,
        "time": "binds" if any(solution.time_price for solution in solutions) else "slack",
        "points": POINTS,
        "seconds": statistics.median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "optimal": sum(solution.optimal for solution in solutions),
    }


def run(quick: bool = False) -> Result:
    """Solve every instance, here and with HiGHS, and compute the frontiers."""
    repeats, time_limit = (3, 10.0) if quick else (7, 60.0)
    cases = [Case(*size, time_budget) for size in SIZES for time_budget in (SLACK, BINDING)]
    of_classes = [ClassCase(*size, time_budget) for size in CLASSES for time_budget in (SLACK, BINDING)]
    everything: list[Case | ClassCase] = [*cases, *of_classes]
    for _ in range(repeats):
        for case in everything:
            case.run(time_limit)
    return {
        "solve": [each.row() for each in cases],
        "classes": [each.row() for each in of_classes],
        "frontier": [run_frontier(time_budget, repeats) for time_budget in (SLACK, BINDING)],
    }


def table(result: Result) -> str:
    """The result as plain text."""
    lines = [
        f"{'blocks':>7} {'conf.':>5} {'time':>6} {'seconds (range)':>24} {'gap':>8} {'passes':>6} {'core':>5} "
        f"{'states':>8} | {'HiGHS s':>8} {'gap':>8}  {'objective against HiGHS'}"
    ]
    for row in result["solve"]:
        low, high = row["seconds_range"]  # type: ignore[misc]
        seconds = f"{row['seconds']:.4f} ({low:.4f}-{high:.4f})"
        verdict = {True: "agrees", False: "DIFFERS", None: "not proven by HiGHS"}[row["agree"]]  # type: ignore[index]
        highs_gap = "none" if row["highs_relative_gap"] is None else f"{row['highs_relative_gap']:.1e}"
        if row["objective_less_highs"] is not None:
            verdict += f", {row['objective_less_highs']:+.1e}"
        lines.append(
            f"{row['blocks']:>7} {row['configurations']:>5} {row['time']:>6} {seconds:>24} {row['relative_gap']:>8.1e} "
            f"{row['passes']:>6} {row['core_blocks']:>5} {row['states']:>8} | {row['highs_seconds']:>8.2f} "
            f"{highs_gap:>8}  {verdict}"
        )
    lines.append("")
    for row in result["classes"]:
        verdict = {True: "agrees", False: "DIFFERS", None: "not proven by HiGHS"}[row["agree"]]  # type: ignore[index]
        lines.append(
            f"{row['classes']} classes of {row['tensors']} tensors x {row['configurations']}, time {row['time']}: "
            f"{row['seconds']:.4f} s, gap {row['gap']:.1e}; frontier of {row['frontier_points']} budgets "
            f"{row['frontier_seconds']:.3f} s | HiGHS {row['highs_seconds']:.2f} s, {verdict}"
        )
    lines.append("")
    for row in result["frontier"]:
        low, high = row["seconds_range"]  # type: ignore[misc]
        lines.append(
            f"frontier of {row['points']} budgets, {row['blocks']} x {row['configurations']}, time {row['time']}: "
            f"{row['seconds']:.3f} s ({low:.3f}-{high:.3f}), {row['optimal']} proven optimal"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="3 repeats, and 10 s for HiGHS instead of 60")
    arguments = parser.parse_args()
    result = run(arguments.quick)
    print(json.dumps(result, indent=2) if arguments.json else table(result))


if __name__ == "__main__":
    main()
