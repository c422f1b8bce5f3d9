"""The class problem: tensors of the same role and shape are interchangeable, so only their numbers are chosen.

`solve` would treat every tensor as a block of its own and search through all their exchanges. Here a class with n
tensors is one row. The dual of `Dual` is the same with rows multiplied by their counts, because at given prices all
tensors of a class have the same cheapest configuration. `class_core` then finds how many tensors deviate from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from baoc.solve.class_core import ClassCore, ClassInstance
from baoc.solve.core import Effort
from baoc.solve.dual import Dual
from baoc.solve.problem import (
    COST,
    COST_STEPS,
    MEMORY,
    TIME,
    Bounded,
    Floats,
    Infeasible,
    Integers,
    validate,
    whole_numbers,
)

MOST_STATES = 3 * 2**18  # less than a second
LEAST_STATES = 2**19  # for the least memory or time that is feasible
FRONTIER_STATES = 2**20  # for all budgets together
FRONTIER_SHARE = 8  # a budget gets at most an eighth of what is left, so that hard ones leave enough for others
NEAR = 6  # passes nearest to the dual's maximum, which bound and steer
FEW = 16  # moves of the first search
FIRST_WIDTH, LAST_WIDTH, WIDTH_GROWTH = 2**7, 2**16, 8
FIRST_SHARE, NEXT_SHARE, GROWTH = 64, 8, 4  # how much of the gap is searched, and how much more each time


@dataclass(frozen=True, eq=False)
class ClassProblem:
    """Choose how many tensors of each class get which configuration: least total cost within both budgets.

    Args:
        counts: (classes,), the number of tensors in each class, at least 1.
        cost: (classes, configurations), per tensor. ``inf`` forbids the entry; a negative cost is a preference.
        memory: (classes, configurations), whole bytes per tensor.
        time: (classes, configurations), per tensor.
        memory_budget: Bytes that the sum over all tensors must not exceed. ``None`` or ``inf`` means no limit.
        time_budget: Time that the *sum* over all tensors must not exceed (`Problem` limits the mean), up to 1e-9 of
            the slowest time per tensor. ``None`` or ``inf`` means no limit.

    Raises:
        ValueError: An array has a wrong shape or a value that is not accepted.

    Example:
        >>> problem = ClassProblem([3, 1], [[0, 1], [0, 2]], [[8, 4], [8, 4]], [[1, 1], [1, 1]], memory_budget=24)
        >>> problem.classes, problem.configurations, problem.tensors
        (2, 2, 4)
    """

    counts: Integers
    cost: Floats
    memory: Integers
    time: Floats
    memory_budget: int | None = None
    time_budget: float | None = None

    def __post_init__(self) -> None:
        counts = np.array(self.counts)
        rows = np.shape(self.cost)[:1]
        if counts.shape != rows:
            raise ValueError(f"counts has shape {counts.shape}; it must be {rows}, one number for each row of cost.")
        bad = ~((counts >= 1) & (counts == np.rint(counts)))
        if bad.any():
            raise ValueError(
                f"counts of class {int(bad.argmax())} is {counts[bad][0]}; it must be a whole number of at least 1."
            )
        validate(self, "class", counts.astype(np.float64))
        counts = counts.astype(np.int64)
        counts.setflags(write=False)
        object.__setattr__(self, "counts", counts)

    @property
    def classes(self) -> int:
        return len(self.cost)

    @property
    def configurations(self) -> int:
        return len(self.cost[0])

    @property
    def tensors(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, eq=False)
class ClassSolution(Bounded):
    """The numbers of tensors, how good they are proven to be, and the prices of both budgets."""

    counts: Integers
    """(classes, configurations), the number of tensors of each class with each configuration."""
    objective: float
    """Total cost."""
    bound: float
    """No solution within the budgets costs less. Equal to ``objective`` if the solution is proven optimal."""
    memory_used: int
    """Bytes; never more than the budget."""
    time_used: float
    """Sum over all tensors."""
    memory_price: float
    """How much the linear relaxation's objective falls per extra byte of budget; 0 if the budget does not bind."""
    time_price: float
    """The same per extra unit of total time."""


def solve_classes(problem: ClassProblem, *, within: float = 0.0) -> ClassSolution:
    """Find the numbers of tensors with the least total cost within both budgets.

    The solution is optimal up to rounding: about 1e-15 of the largest possible total cost for each tensor. If a proof
    would take more than about a second, ``solution.bound`` says how far from optimal it can be. The memory budget holds
    to the byte. Equal arrays give equal solutions.

    Args:
        problem: The classes, their costs and the budgets.
        within: Stop once the solution is proven to cost at most this much more than the optimum.

    Returns:
        The best solution found, with its bound and the prices of both budgets.

    Raises:
        Infeasible: No solution keeps both budgets.

    Example:
        Three tensors of the first class and one of the second; 8 bytes are missing, so two tensors get less.

        >>> costs, bytes_, times = [[0, 1], [0, 2]], [[8, 4], [8, 4]], [[1, 1], [1, 1]]
        >>> solution = solve_classes(ClassProblem([3, 1], costs, bytes_, times, memory_budget=24))
        >>> solution.counts.tolist(), solution.objective, solution.memory_used, solution.memory_price
        ([[1, 2], [1, 0]], 2.0, 24, 0.25)
    """
    scaled = _Scaled(problem)
    instance = scaled.instance(problem.memory_budget)
    start = _start(instance)
    if start is None:
        raise scaled.infeasible(problem.memory_budget)
    effort = Effort(MOST_STATES)
    return scaled.solution(_minimise(instance, _dual(instance), start, effort, within=scaled.units(within)))


def class_frontier(problem: ClassProblem, budgets: Iterable[int | None], *, within: float = 0.0) -> list[ClassSolution]:
    """Solve a class problem for many memory budgets, which share what the dual learns.

    Args:
        problem: The classes, their costs and the time budget. Its own memory budget is not used.
        budgets: Memory budgets in bytes; None for no limit.
        within: As in `solve_classes`.

    Returns:
        One solution per budget, in the order given.

    Raises:
        Infeasible: A budget is below `smallest_class_memory`.

    Example:
        >>> problem = ClassProblem([3, 1], [[0, 1], [0, 2]], [[8, 4], [8, 4]], [[1, 1], [1, 1]])
        >>> [solution.objective for solution in class_frontier(problem, [32, 24, 16])]
        [0.0, 2.0, 5.0]
    """
    scaled = _Scaled(problem)
    dual = _dual(scaled.instance(None))
    wanted = [None if budget is None or budget == math.inf else math.floor(budget) for budget in budgets]
    ascending = sorted(set(wanted), key=lambda budget: math.inf if budget is None else budget)
    solutions: dict[int | None, ClassSolution] = {}
    counts: Integers | None = None
    spent = 0
    for index, budget in enumerate(ascending):  # from small to large: each solution also fits the next budget
        instance = scaled.instance(budget)
        counts = _start(instance) if counts is None else counts
        if counts is None:
            raise scaled.infeasible(budget)
        left = FRONTIER_STATES - spent
        effort = Effort(left // min(len(ascending) - index, FRONTIER_SHARE))
        outcome = _minimise(instance, dual, counts, effort, within=scaled.units(within))
        spent = min(spent + effort.states, FRONTIER_STATES)
        solutions[budget] = scaled.solution(outcome)
        counts = outcome.counts
    return [solutions[budget] for budget in wanted]


def smallest_class_memory(problem: ClassProblem) -> int:
    """Return the smallest memory budget, in bytes, that can be kept under the problem's time budget.

    Args:
        problem: The classes and the time budget. Its memory budget is not used.

    Raises:
        Infeasible: No solution keeps the time budget.

    Example:
        >>> smallest_class_memory(ClassProblem([2], [[0, 0]], [[8, 2]], [[1.0, 1.4]], time_budget=2.6))
        10
    """
    scaled = _Scaled(problem)
    smallest = scaled.smallest_memory()
    if smallest is None:
        raise scaled.infeasible(None)
    return smallest


@dataclass(frozen=True, eq=False)
class _Outcome:
    counts: Integers
    gap: float  # in units of cost; 0 if the counts are proven optimal
    price: Floats  # (2,)


class _Scaled:
    """A class problem in whole numbers, and the way back."""

    def __init__(self, problem: ClassProblem) -> None:
        self.problem = problem
        counts = problem.counts.astype(np.float64)
        weights, self.cost_unit, self.time_unit = whole_numbers(problem, counts, COST_STEPS)
        allowed = np.isfinite(weights[COST])
        # Only differences within a class matter, and small numbers keep bounds exact.
        least = np.where(allowed, weights, np.inf).min(axis=2)  # (3, classes)
        self.weights = np.where(allowed, weights - least[:, :, None], np.reshape([np.inf, 0, 0], (3, 1, 1)))
        self.offset = least[1:] @ counts  # (2,)
        self.largest = self.weights[1:].max(axis=2) @ counts  # (2,)

    def instance(self, memory_budget: int | None) -> ClassInstance:
        """Return the problem with another memory budget."""
        problem, limits = self.problem, self.largest.copy()  # an absent budget is one that cannot bind
        if memory_budget is not None:
            limits[0] = min(limits[0], memory_budget - self.offset[0])
        if problem.time_budget is not None:
            # Rounding may add half a step per tensor: a solution within the budget must not be refused for that.
            mean = problem.time_budget / problem.tensors
            budget = math.floor(problem.tensors * (mean / self.time_unit + 0.5))
            limits[1] = min(limits[1], budget - self.offset[1])
        # Each cost is off by up to half a step, so a difference of one step per tensor means nothing.
        return ClassInstance.of(self.weights, problem.counts, limits, error=problem.tensors)

    def units(self, cost: float) -> float:
        """Return a cost in whole numbers."""
        return cost / self.cost_unit

    def solution(self, outcome: _Outcome) -> ClassSolution:
        counts, problem = outcome.counts.copy(), self.problem
        counts.setflags(write=False)
        objective = self._sum(problem.cost, counts)
        return ClassSolution(
            counts=counts,
            objective=objective,
            bound=objective - outcome.gap * self.cost_unit,
            memory_used=int((problem.memory * counts).sum()),
            time_used=self._sum(problem.time, counts),
            memory_price=float(outcome.price[0] * self.cost_unit),
            time_price=float(outcome.price[1] * self.cost_unit / self.time_unit),
        )

    def smallest_memory(self) -> int | None:
        leanest = _least(self.instance(None), MEMORY)
        return None if leanest is None else int((self.problem.memory * leanest).sum())

    def infeasible(self, memory_budget: int | None) -> Infeasible:
        fastest = _least(self.instance(memory_budget), TIME)
        smallest_time = None if fastest is None else self._sum(self.problem.time, fastest)
        budgets = memory_budget, self.problem.time_budget
        return Infeasible(*budgets, self.smallest_memory(), smallest_time, "total time")

    @staticmethod
    def _sum(values: Any, counts: Integers) -> float:
        used = counts > 0
        return math.fsum(values[used] * counts[used])


def _dual(instance: ClassInstance) -> Dual:
    return Dual(instance.weights * instance.counts[:, None])


def _minimise(
    instance: ClassInstance,
    dual: Dual,
    counts: Integers,
    effort: Effort,
    enough: float | None = None,
    within: float = 0.0,
) -> _Outcome:
    """Bound, then search for solutions close to the bound, further from it each time.

    Args:
        instance: The problem.
        dual: Its dual.
        counts: Any solution that fits.
        effort: The number of states that may be made.
        enough: A cost to stop at, once it is reached or known to be out of reach.
        within: A gap to stop at.
    """
    totals = instance.totals(counts)
    dual.maximise(instance.limits, totals)
    nearest = np.argsort(-dual.values(instance.limits), kind="stable")[:NEAR]
    mixture = _mixture(instance, dual, counts)
    counts = _steer(instance, dual, counts, nearest)
    core = ClassCore(instance, dual.choice(nearest[0]), dual.prices[nearest], mixture)

    cost, lower = float(instance.totals(counts)[COST]), core.bound
    gain = instance.gain
    # If many moves are open, a first search over few of them makes the gap small. Each later one takes a part of the
    # gap, from below: if it finds no solution there and has not skipped any, the bound rises; what it finds is optimal.
    step, width = cost - lower, FIRST_WIDTH
    few = core.cheapest(FEW)
    most_reduced = few + 1e-6 * step if few < step else math.inf
    while lower < cost - max(gain, within) and not effort.exhausted:
        if enough is not None and (cost <= enough or lower > enough + 0.5):
            break
        target = min(lower + step, cost - gain)
        before = effort.states
        found = core.search(cost, target, most_reduced, width, effort)
        lower = max(lower, min(target, found.skipped))
        complete, last = found.skipped >= target, width == LAST_WIDTH and target == cost - gain
        if found.counts is not None:
            counts, cost = found.counts, float(instance.totals(found.counts)[COST])
        if most_reduced < math.inf:
            most_reduced, step = math.inf, (cost - lower) / (FIRST_SHARE if few < cost - lower else 1)
            continue
        if not complete:
            # a wider search takes at least as many states, so it must not be cut short
            is_futile = last or 2 * effort.states - before > effort.most_states
            if is_futile and found.counts is None:
                break
            width = min(width * WIDTH_GROWTH, LAST_WIDTH)
        if found.counts is None or complete:
            step *= GROWTH
        if found.counts is not None:
            step = min(step, (cost - lower) / NEXT_SHARE)
    gap = 0.0 if lower >= cost - gain else cost - lower
    return _Outcome(counts, gap, dual.prices[nearest[0]])


def _mixture(instance: ClassInstance, dual: Dual, counts: Integers) -> Floats:
    """Return (classes, configurations): a solution of the linear relaxation."""
    weights = dual.mixture(instance.limits, instance.totals(counts))
    mixture: Floats = weights[0] * counts
    for index in np.flatnonzero(weights[1:]):
        mixture += weights[1 + index] * instance.uniform(dual.choice(int(index)))
    return mixture


def _steer(instance: ClassInstance, dual: Dual, counts: Integers, nearest: Integers) -> Integers:
    """Walk from a solution that fits towards the dual's best ones, tensor by tensor, while it fits and as it pays."""
    fitting_cost = np.where((dual.totals[:, 1:] <= instance.limits).all(axis=1), dual.totals[:, COST], np.inf)
    if fitting_cost.min() < instance.totals(counts)[COST]:
        counts = instance.uniform(dual.choice(int(fitting_cost.argmin())))
    for index in nearest[::-1]:
        goal = dual.choice(index)
        rows, columns = np.nonzero(counts)
        rows, columns = (np.repeat(array, counts[rows, columns]) for array in (rows, columns))
        differing = columns != goal[rows]
        rows, columns = rows[differing], columns[differing]
        walked = (instance.weights[:, rows, goal[rows]] - instance.weights[:, rows, columns]).cumsum(axis=1)
        slack = instance.limits - instance.totals(counts)[1:]
        gain = np.where((walked[1:] <= slack[:, None]).all(axis=0), walked[COST], 0)
        if gain.size and gain.min() < 0:
            moved = slice(gain.argmin() + 1)
            counts = counts.copy()
            np.subtract.at(counts, (rows[moved], columns[moved]), 1)
            np.add.at(counts, (rows[moved], goal[rows[moved]]), 1)
    return counts


def _start(instance: ClassInstance) -> Integers | None:
    """Return any solution that keeps both budgets; None if there is none."""
    for what in (MEMORY, TIME):
        counts = _extreme(instance, what)
        if instance.fits(counts):
            return counts
    leanest = _least(instance, MEMORY, enough=float(instance.limits[0]))
    return leanest if leanest is not None and instance.fits(leanest) else None


def _least(instance: ClassInstance, what: int, enough: float | None = None) -> Integers | None:
    """Return the solution of least memory (or time) that keeps the other budget; None if none keeps it.

    It is the same problem again: memory becomes the cost, and its limit goes.
    """
    other = MEMORY + TIME - what
    start = _extreme(instance, other)
    if instance.totals(start)[other] > instance.limits[other - 1]:
        return None
    weights, limits = instance.weights.copy(), instance.limits.copy()
    weights[COST] = np.where(np.isfinite(weights[COST]), weights[what], np.inf)
    limits[what - 1] = weights[what].max(axis=1) @ instance.counts
    relaxed = ClassInstance.of(weights, instance.counts, limits)
    return _minimise(relaxed, _dual(relaxed), start, Effort(LEAST_STATES), enough).counts


def _extreme(instance: ClassInstance, what: int) -> Integers:
    """Return the solution with least memory and then least time in every class (or the other way round)."""
    amount, other = instance.weights[what], instance.weights[MEMORY + TIME - what]
    amount = np.where(np.isfinite(instance.weights[COST]), amount, np.inf)
    least = amount == amount.min(axis=1, keepdims=True)
    return instance.uniform(np.where(least, other, np.inf).argmin(axis=1))
