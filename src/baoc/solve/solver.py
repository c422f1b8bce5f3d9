"""Solve a problem with one row per block, for one budget or many."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from baoc.solve.core import BETTER, Core, Effort, search
from baoc.solve.dual import Dual
from baoc.solve.problem import COST, MEMORY, TIME, Floats, Infeasible, Instance, Integers, Problem, Solution

MOST_STATES = 2**25  # some ten seconds
ADVICE_STATES = 2**22  # for the feasible budgets in an error message
NEAR = 12  # passes nearest to the dual's maximum, which bound and steer
FIRST_ENTRIES, FIRST_WIDTH, LAST_WIDTH, GROWTH = 2**6, 2**10, 2**18, 8


def solve(
    problem: Problem, *, relative_gap: float = 0.0, time_limit: float | None = None, most_states: int = MOST_STATES
) -> Solution:
    """Find the assignment of least total cost within both budgets.

    - The memory budget holds to the byte. The time budget holds up to 1e-9, and no assignment within it is excluded.
    - "Optimal" is exact for costs rounded to about 1e-15 of the largest possible total.
    - Equal arrays give equal choices, for any number of threads, unless `time_limit` ends the search.
    - A block never gets an entry that another of its entries equals or beats in cost, memory and time. Of equal entries
      it gets the first one. Among blocks with equal rows, earlier ones get lower configurations.

    Args:
        problem: The costs and the budgets.
        relative_gap: Stop when the choice is proven to be within this fraction of the optimal cost.
        time_limit: Seconds after which the search stops; None for no limit.
        most_states: Number of partial assignments after which the search stops.

    Returns:
        The best assignment found. If the search stopped early, ``bound`` says how far from optimal it can be.

    Raises:
        Infeasible: No assignment keeps both budgets.

    Example:
        >>> costs, bytes_, times = [[0, 1, 3], [0, 2, 9]], [[8, 4, 0], [8, 4, 0]], [[1, 1, 1], [1, 1, 1]]
        >>> solution = solve(Problem(costs, bytes_, times, memory_budget=14))
        >>> solution.choice.tolist(), solution.objective, solution.memory_used, solution.memory_price
        ([1, 0], 1.0, 12, 0.25)
    """
    instance = Instance.of(problem)
    start = _start(instance)
    if start is None:
        raise _infeasible(problem, instance)
    effort = Effort(most_states, math.inf if time_limit is None else time.monotonic() + time_limit)
    outcome = _minimise(instance, Dual(instance.weights), start, effort, relative_gap)
    return _solution(problem, instance, outcome, _twins(instance))


def frontier(problem: Problem, budgets: Iterable[int | None], *, relative_gap: float = 0.0) -> list[Solution]:
    """Solve a problem for many memory budgets, several times faster than one by one.

    The budgets share the passes of the dual. Objectives are the same as those of `solve`. If several choices have the
    same cost, the choice may differ.

    Args:
        problem: The costs and the time budget. Its own memory budget is not used.
        budgets: Memory budgets in bytes; None for no limit.
        relative_gap: As in `solve`.

    Returns:
        One solution per budget, in the order given.

    Raises:
        Infeasible: A budget is below `smallest_memory`.

    Example:
        >>> problem = Problem([[0, 1, 3], [0, 2, 9]], [[8, 4, 0], [8, 4, 0]], [[1, 1, 1], [1, 1, 1]])
        >>> [solution.objective for solution in frontier(problem, [16, 12, 8, 4])]
        [0.0, 1.0, 3.0, 5.0]
    """
    unlimited = Instance.of(replace(problem, memory_budget=None))
    dual, twins = Dual(unlimited.weights), _twins(unlimited)
    wanted = [math.inf if budget is None else math.floor(budget) for budget in budgets]
    solutions: dict[float, Solution] = {}
    choice: Integers | None = None
    for budget in sorted(set(wanted)):  # from small to large: each choice also fits the next budget
        instance = replace(unlimited, limits=np.minimum(unlimited.limits, [budget, math.inf]))
        choice = _start(instance) if choice is None else choice
        if choice is None:
            raise _infeasible(replace(problem, memory_budget=None if budget == math.inf else int(budget)), instance)
        outcome = _minimise(instance, dual, choice, Effort(MOST_STATES), relative_gap)
        solutions[budget] = _solution(problem, instance, outcome, twins)
        choice = outcome.choice
    return [solutions[budget] for budget in wanted]


def smallest_memory(problem: Problem) -> int:
    """Return the smallest memory budget, in bytes, that is feasible with the problem's time budget.

    Raises:
        Infeasible: No assignment keeps the time budget.

    Example:
        >>> smallest_memory(Problem([[0, 0]] * 2, [[8, 2]] * 2, [[1.0, 1.4]] * 2, time_budget=1.3))
        10
    """
    instance = Instance.of(problem)
    leanest = _least(instance, MEMORY, Effort(MOST_STATES))
    if leanest is None:
        raise _infeasible(problem, instance)
    return int(instance.totals(leanest)[MEMORY])


def smallest_time(problem: Problem) -> float:
    """Return the smallest time budget that is feasible with the problem's memory budget.

    Raises:
        Infeasible: No assignment keeps the memory budget.

    Example:
        >>> smallest_time(Problem([[0, 0]] * 2, [[8, 2]] * 2, [[1.0, 1.4]] * 2, memory_budget=12))
        1.2
    """
    instance = Instance.of(problem)
    fastest = _least(instance, TIME, Effort(MOST_STATES))
    if fastest is None:
        raise _infeasible(problem, instance)
    return _mean(problem.time, fastest)


@dataclass(frozen=True, eq=False)
class _Outcome:
    choice: Integers
    gap: float  # in units of cost; 0 if the choice is proven optimal
    price: Floats  # (2,)
    passes: int
    core: int
    states: int


def _minimise(
    instance: Instance,
    dual: Dual,
    choice: Integers,
    effort: Effort,
    relative_gap: float = 0.0,
    target: float | None = None,
) -> _Outcome:
    """Bound the cost, then search the entries that the bound leaves open, with more states in each round.

    Args:
        instance: The problem.
        dual: Its dual.
        choice: Any assignment that fits.
        effort: The number of states and the time that the search may take.
        relative_gap: Stop at this proven gap.
        target: Stop when this cost is reached, or proven to be out of reach.
    """
    passes = dual.maximise(instance.limits, instance.totals(choice))
    nearest = np.argsort(-dual.values(instance.limits), kind="stable")[:NEAR]
    choice = _steer(instance, dual, choice, nearest)
    prices = dual.prices[nearest]

    # Costs are counted from this choice: differences of large sums would lose the last digits.
    reference = float(instance.totals(choice)[COST])
    at_least, lower = _bounds(instance, choice, prices)
    upper = 0.0

    blocks = np.arange(len(choice))
    entries, width, complete = FIRST_ENTRIES, FIRST_WIDTH, False
    open_blocks, states_before = 0, effort.states
    while True:
        candidate = at_least <= upper - BETTER  # entries that a better assignment could have
        if upper - lower <= BETTER or not candidate.any(axis=1).all():
            lower = upper
        cost = reference + upper
        proven = upper - lower <= relative_gap * abs(cost)
        decided = target is not None and (cost <= target or reference + lower > target + BETTER)
        if proven or decided or complete or effort.exhausted:
            break

        # The base is the choice, except for entries that no better assignment has. Open the entries with the lowest
        # bounds. An assignment with any other entry costs at least the bound of the first entry that is left out.
        base = np.where(candidate[blocks, choice], choice, at_least.argmin(axis=1))
        candidate[blocks, base] = False
        rows, columns = np.nonzero(candidate)
        left_out = np.inf
        if len(rows) > entries:
            bounds = at_least[rows, columns]
            order = np.argsort(bounds, kind="stable")
            left_out = float(bounds[order[entries]])
            first = np.sort(order[:entries])
            rows, columns = rows[first], columns[first]

        core = Core.of(instance, base, (rows, columns), cost, prices[0])
        found = search(core, prices, width, effort)
        if found.cost < 0:
            choice = base
            for block, configuration in found.changes:
                choice[block] = configuration
        lower = max(lower, min(upper + found.cost, upper + found.skipped, left_out))
        upper += found.cost
        open_blocks = max(open_blocks, len(core.blocks))
        complete = width == LAST_WIDTH and left_out == np.inf
        entries, width = entries * GROWTH, min(width * GROWTH, LAST_WIDTH)
    return _Outcome(choice, upper - lower, prices[0], passes, open_blocks, effort.states - states_before)


def _bounds(instance: Instance, choice: Integers, prices: Floats) -> tuple[Floats, float]:
    """Return lower bounds on the cost of assignments with each entry, (blocks, configurations), and of all assignments.

    An assignment with an entry costs at least L(p) plus the entry's reduced cost: the difference to the cheapest entry
    of its block at prices p. The choice itself costs L(p) plus all its reduced costs plus the price of the unused
    memory and time. Relative to the choice, L(p) is therefore minus these.
    """
    shifted = instance.weights - instance.weights[:, np.arange(len(choice)), choice][:, :, None]
    slack = instance.limits - instance.totals(choice)[1:]
    at_least = np.full(shifted.shape[1:], -np.inf)
    lower = -np.inf
    for price in prices:
        priced = shifted[COST] + price[0] * shifted[MEMORY]
        priced += price[1] * shifted[TIME]
        cheapest = priced.min(axis=1, keepdims=True)
        value = float(cheapest.sum() - price @ slack)
        priced += value - cheapest
        np.maximum(at_least, priced, out=at_least)
        lower = max(lower, value)
    return at_least, lower


def _steer(instance: Instance, dual: Dual, choice: Integers, nearest: Integers) -> Integers:
    """Change a feasible assignment towards the dual's best ones, block by block, as long as it fits and costs less.

    The search can only change a few blocks. If many blocks are alike, the dual changes them all at once, from far below
    the budgets to far above. The search should start between the two.
    """
    fitting_cost = np.where((dual.totals[:, 1:] <= instance.limits).all(axis=1), dual.totals[:, COST], np.inf)
    if fitting_cost.min() < instance.totals(choice)[COST]:
        choice = dual.choice(int(fitting_cost.argmin()))
    for index in nearest[::-1]:
        goal = dual.choice(index)
        (differing,) = np.nonzero(choice != goal)
        steps = instance.weights[:, differing, goal[differing]] - instance.weights[:, differing, choice[differing]]
        walked = steps.cumsum(axis=1)
        slack = instance.limits - instance.totals(choice)[1:]
        gain = np.where((walked[1:] <= slack[:, None]).all(axis=0), walked[COST], 0)
        if gain.size and gain.min() < 0:
            moved = differing[: gain.argmin() + 1]
            choice = choice.copy()
            choice[moved] = goal[moved]
    return choice


def _start(instance: Instance) -> Integers | None:
    """Return any assignment that keeps both budgets; None if there is none."""
    for what in (MEMORY, TIME):
        choice = _extreme(instance, what)
        if instance.fits(choice):
            return choice
    leanest = _least(instance, MEMORY, Effort(MOST_STATES), target=float(instance.limits[0]))
    return leanest if leanest is not None and instance.fits(leanest) else None


def _least(instance: Instance, what: int, effort: Effort, target: float | None = None) -> Integers | None:
    """Return the assignment of least memory (or time) that keeps the other budget; None if none keeps it.

    This is the same problem with memory as the cost and without its limit.
    """
    other = MEMORY + TIME - what
    start = _extreme(instance, other)
    if instance.totals(start)[other] > instance.limits[other - 1]:
        return None
    weights, limits = instance.weights.copy(), instance.limits.copy()
    weights[COST] = np.where(np.isfinite(weights[COST]), weights[what], np.inf)
    limits[what - 1] = weights[what].max(axis=1).sum()
    relaxed = replace(instance, weights=weights, limits=limits)
    return _minimise(relaxed, Dual(weights), start, effort, target=target).choice


def _extreme(instance: Instance, what: int) -> Integers:
    """Return the assignment with least memory, then least time, in every block (or the other way round)."""
    amount, other = instance.weights[what], instance.weights[MEMORY + TIME - what]
    amount = np.where(np.isfinite(instance.weights[COST]), amount, np.inf)
    least = amount == amount.min(axis=1, keepdims=True)
    choice: Integers = np.where(least, other, np.inf).argmin(axis=1)
    return choice


def _infeasible(problem: Problem, instance: Instance) -> Infeasible:
    leanest = _least(instance, MEMORY, Effort(ADVICE_STATES))
    fastest = _least(instance, TIME, Effort(ADVICE_STATES))
    return Infeasible(
        problem.memory_budget,
        problem.time_budget,
        None if leanest is None else int(instance.totals(leanest)[MEMORY]),
        None if fastest is None else _mean(problem.time, fastest),
    )


def _solution(problem: Problem, instance: Instance, outcome: _Outcome, twins: list[Integers]) -> Solution:
    choice = outcome.choice.copy()
    for group in twins:
        choice[group] = np.sort(choice[group])
    choice.setflags(write=False)
    blocks = np.arange(problem.blocks)
    objective = math.fsum(problem.cost[blocks, choice])
    return Solution(
        choice=choice,
        objective=objective,
        bound=objective - outcome.gap * instance.cost_unit,
        memory_used=int(problem.memory[blocks, choice].sum()),
        time_used=_mean(problem.time, choice),
        memory_price=float(outcome.price[0] * instance.cost_unit),
        time_price=float(outcome.price[1] * instance.cost_unit / instance.time_unit * problem.blocks),
        passes=outcome.passes,
        core=outcome.core,
        states=outcome.states,
    )


def _twins(instance: Instance) -> list[Integers]:
    """Return groups of blocks with equal rows, which can exchange configurations."""
    groups: dict[bytes, list[int]] = {}
    for block, row in enumerate(np.ascontiguousarray(instance.weights.transpose(1, 0, 2))):
        groups.setdefault(row.tobytes(), []).append(block)
    return [np.array(group) for group in groups.values() if len(group) > 1]


def _mean(time: Floats, choice: Integers) -> float:
    return math.fsum(time[np.arange(len(choice)), choice]) / len(choice)
