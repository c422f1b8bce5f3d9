"""Solve one problem, a frontier of them, or say why there is nothing to solve."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from baoc.solve.core import BETTER, Effort, make_core, search
from baoc.solve.dual import Dual
from baoc.solve.problem import Floats, Infeasible, Instance, Integers, Problem, Solution

MOST_STATES = 2**25  # some ten seconds
BOUNDING_PRICES = 8
STEERING_CHOICES = 12
FIRST_ENTRIES, FIRST_WIDTH, GROWTH, LAST_WIDTH = 64, 2**10, 8, 2**18


def solve(
    problem: Problem, *, relative_gap: float = 0.0, time_limit: float | None = None, most_states: int = MOST_STATES
) -> Solution:
    """The assignment with the least total cost within both budgets.

    It stops when the choice is proven optimal, or within `relative_gap` of optimal, or when `most_states` partial assignments
    or `time_limit` seconds are spent. In the last two cases ``solution.bound`` says how far from optimal it can be.

    What holds:

    - The memory budget holds to the byte; the time budget holds to nine decimals.
    - "Optimal" is exact for costs rounded to 1e-15 of their largest possible total.
    - The same arrays give the same choice, on any machine and number of threads. Only `time_limit` can break this.
    - No block gets an entry that another one of its entries equals or beats in cost, memory and time; of equal entries it gets
      the first. Among blocks with equal rows, earlier blocks get lower configurations.

    Raises:
        Infeasible: no assignment keeps both budgets.

    >>> problem = Problem(cost=[[0, 1, 3], [0, 2, 9]], memory=[[8, 4, 0], [8, 4, 0]], time=np.ones((2, 3)), memory_budget=12)
    >>> solution = solve(problem)
    >>> solution.choice.tolist(), solution.objective, solution.memory_used, solution.memory_price
    ([1, 0], 1.0, 12, 0.25)
    """
    allocator = _Allocator(problem)
    effort = Effort(most_states, None if time_limit is None else time.monotonic() + time_limit)
    return allocator.solve(allocator.start(effort), relative_gap, effort)


def frontier(problem: Problem, budgets: Iterable[int], *, relative_gap: float = 0.0) -> list[Solution]:
    """One solution per memory budget, in the order given. What is learnt at one budget is used at the next.

    >>> problem = Problem(cost=[[0, 1, 3], [0, 2, 9]], memory=[[8, 4, 0], [8, 4, 0]], time=np.ones((2, 3)))
    >>> [solution.objective for solution in frontier(problem, [16, 12, 8, 4])]
    [0.0, 1.0, 3.0, 5.0]
    """
    problems = [replace(problem, memory_budget=budget) for budget in budgets]
    solutions: dict[int, Solution] = {}
    allocator = choice = None
    # From small to large: each choice also fits the next budget.
    for index in sorted(range(len(problems)), key=lambda i: _or_infinity(problems[i].memory_budget)):
        allocator = _Allocator(problems[index], allocator)
        effort = Effort(MOST_STATES)
        solutions[index] = allocator.solve(allocator.start(effort) if choice is None else choice, relative_gap, effort)
        choice = solutions[index].choice
    return [solutions[index] for index in range(len(problems))]


def smallest_memory(problem: Problem) -> int:
    """The smallest memory budget, in bytes, that can be kept under the problem's time budget.

    >>> problem = Problem(cost=[[0, 0]] * 2, memory=[[8, 2]] * 2, time=[[1.0, 1.4]] * 2, time_budget=1.3)
    >>> smallest_memory(problem)
    10
    """
    smallest = _smallest_memory(Instance.of(problem), Effort(MOST_STATES))
    if smallest is None:
        raise _infeasible(problem)
    return int(smallest)


def smallest_time(problem: Problem) -> float:
    """The smallest time budget that can be kept under the problem's memory budget.

    >>> problem = Problem(cost=[[0, 0]] * 2, memory=[[8, 2]] * 2, time=[[1.0, 1.4]] * 2, memory_budget=12)
    >>> smallest_time(problem)
    1.2
    """
    instance = Instance.of(problem)
    smallest = _smallest_time(instance, Effort(MOST_STATES))
    if smallest is None:
        raise _infeasible(problem)
    return _mean_time(smallest, instance)
