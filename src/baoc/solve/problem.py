"""The allocation problem, its solution, and the same problem in whole numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

EXACT = 2**53  # below it float64 holds every whole number, and sums of them are exact in any order
COST_STEPS = 1e15  # the largest possible total cost is some 1e14 to 1e15 steps
TIME_DIGITS = 9  # decimals after the leading digit of the slowest time


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one configuration for each block: least total cost within both budgets.

    Args:
        cost: (blocks, configurations). ``inf`` forbids the entry (the paper's hard constraint); a negative cost is a
            preference.
        memory: (blocks, configurations), whole bytes.
        time: (blocks, configurations), relative to the reference.
        memory_budget: Bytes that the sum over blocks must not exceed. ``None`` or ``inf`` means no limit.
        time_budget: Time that the *mean* over blocks must not exceed, up to 1e-9. ``None`` or ``inf`` means no limit.

    Raises:
        ValueError: An array has a wrong shape or a value that is not accepted.

    Example:
        >>> problem = Problem(cost=[[0, 1], [0, 2]], memory=[[8, 4], [8, 4]], time=[[1, 1], [1, 1]], memory_budget=12)
        >>> problem.blocks, problem.configurations
        (2, 2)
    """

    cost: Floats
    memory: Integers
    time: Floats
    memory_budget: int | None = None
    time_budget: float | None = None

    def __post_init__(self) -> None:
        validate(self, "block", np.ones(len(np.atleast_1d(self.cost))))

    @property
    def blocks(self) -> int:
        return len(self.cost)

    @property
    def configurations(self) -> int:
        return len(self.cost[0])


class Bounded:
    """A solution with a proven lower bound on the optimal cost."""

    objective: float
    bound: float

    @property
    def gap(self) -> float:
        """The largest possible distance to the optimal cost."""
        return self.objective - self.bound

    @property
    def relative_gap(self) -> float:
        """The gap as a fraction of the objective."""
        if self.gap == 0:
            return 0.0
        return self.gap / abs(self.objective) if self.objective else math.inf

    @property
    def optimal(self) -> bool:
        """Whether the solution is proven to be optimal."""
        return self.gap == 0


@dataclass(frozen=True, eq=False)
class Solution(Bounded):
    """An assignment with its proven bound and the shadow prices of both budgets."""

    choice: Integers
    """(blocks,), the configuration of each block."""
    objective: float
    """Total cost of the choice."""
    bound: float
    """No assignment within the budgets costs less. Equal to ``objective`` if the choice is proven optimal."""
    memory_used: int
    """Bytes; never more than the budget."""
    time_used: float
    """Mean over blocks."""
    memory_price: float
    """How much the linear relaxation's objective falls per extra byte of budget; 0 if the budget does not bind. If an
    extra byte and a missing byte have different prices, a value between the two."""
    time_price: float
    """The same per extra unit of mean time."""
    passes: int
    """Number of passes that the dual made over the arrays."""
    core: int
    """Number of blocks that the bound left open."""
    states: int
    """Number of partial assignments in the search."""


class Infeasible(ValueError):
    """No assignment keeps both budgets. The message and the attributes say which budgets are feasible.

    For thousands of blocks, the search may stop before it has a proof. Then the smallest budgets are the smallest ones
    found, and "no assignment" means that none was found.

    Args:
        memory_budget: The memory budget in bytes; None for no limit.
        time_budget: The time budget; None for no limit.
        smallest_memory: The smallest memory budget that is feasible with this time budget; None if there is none.
        smallest_time: The smallest time budget that is feasible with this memory budget; None if there is none.
        time_name: What the message calls the time.
    """

    def __init__(
        self,
        memory_budget: int | None,
        time_budget: float | None,
        smallest_memory: int | None,
        smallest_time: float | None,
        time_name: str = "mean time",
    ) -> None:
        self.memory_budget = memory_budget
        self.time_budget = time_budget
        self.smallest_memory = smallest_memory
        self.smallest_time = smallest_time
        at_time = "" if time_budget is None else f" for a {time_name} of {time_budget:.9g}"
        in_memory = "" if memory_budget is None else f" in {memory_budget} bytes"
        super().__init__(
            "no assignment keeps the budgets: "
            + (f"no memory is enough{at_time}" if smallest_memory is None else "")
            + (f"the smallest memory{at_time} is {smallest_memory} bytes" if smallest_memory is not None else "")
            + "; "
            + (f"no time is enough{in_memory}" if smallest_time is None else "")
            + (f"the smallest {time_name}{in_memory} is {smallest_time:.9g}" if smallest_time is not None else "")
            + "."
        )

    @property
    def memory_alone(self) -> bool:
        """Whether the memory budget is feasible without a time budget."""
        return self.smallest_time is not None

    @property
    def time_alone(self) -> bool:
        """Whether the time budget is feasible without a memory budget."""
        return self.smallest_memory is not None


COST, MEMORY, TIME = range(3)


@dataclass(frozen=True, eq=False)
class Instance:
    """A problem in whole numbers, stored as float64: sums are exact, and equal costs compare equal.

    With fractions, 0.1 + 0.2 and 0.3 would be different costs, rounding errors would decide ties, and two blocks with
    times 1.2 and 1.4 might not fit a mean time of 1.3.
    """

    weights: Floats  # (3, blocks, configurations): cost, memory, time. A forbidden entry is (inf, 0, 0)
    limits: Floats  # (2,): of memory and of time, each summed over blocks
    cost_unit: float
    time_unit: float

    @classmethod
    def of(cls, problem: Problem) -> Instance:
        weights, cost_unit, time_unit = whole_numbers(problem, np.ones(problem.blocks), COST_STEPS)
        # A missing budget becomes one that cannot bind, so that the solver needs no special case.
        limits = weights[1:].max(axis=2).sum(axis=1)
        if problem.memory_budget is not None:
            limits[0] = min(limits[0], problem.memory_budget)
        if problem.time_budget is not None:
            # Rounding may add half a step per block. The limit allows for it: an assignment in the budget must fit.
            limits[1] = min(limits[1], math.floor(problem.blocks * (problem.time_budget / time_unit + 0.5)))
        return cls(weights, limits, cost_unit, time_unit)

    def totals(self, choice: Integers) -> Floats:
        """Return (3,): cost, memory and time of an assignment."""
        totals: Floats = self.weights[:, np.arange(len(choice)), choice].sum(axis=1)
        return totals

    def fits(self, choice: Integers) -> bool:
        return bool((self.totals(choice)[1:] <= self.limits).all())


def whole_numbers(problem: Any, counts: Floats, cost_steps: float) -> tuple[Floats, float, float]:
    """Round a problem to whole numbers.

    Args:
        problem: A `Problem`, or a dataclass with the same arrays.
        counts: (rows,), the number of tensors that each row stands for.
        cost_steps: The largest possible total cost becomes a tenth of this to all of it.

    Returns:
        The weights as in `Instance`, the cost and the time that one step of them stands for.
    """
    allowed = np.isfinite(problem.cost)
    total_cost = counts @ np.abs(np.where(allowed, problem.cost, 0)).max(axis=1)
    cost_unit = 10.0 ** math.ceil(math.log10(total_cost / cost_steps)) if total_cost else 1.0
    slowest = problem.time.max()
    time_unit = 10.0 ** (math.floor(math.log10(slowest)) - TIME_DIGITS) if slowest else 1.0
    weights = np.stack([np.rint(problem.cost / cost_unit), problem.memory, np.rint(problem.time / time_unit)])
    weights[:, _dominated(weights)] = [[np.inf], [0], [0]]
    return weights, cost_unit, time_unit


def _dominated(weights: Floats) -> Booleans:
    """Return (blocks, configurations): which entries another entry of the same block equals or beats in all weights.

    Of equal entries, the first one is not dominated. This decides ties between configurations.
    """
    entries = np.ascontiguousarray(weights.transpose(2, 0, 1))  # (configurations, 3, blocks)
    dominated = np.zeros((weights.shape[2], weights.shape[1]), dtype=bool)
    for index, entry in enumerate(entries):
        later = entries[index + 1 :]
        no_worse = (entry <= later).all(axis=1)
        dominated[index + 1 :] |= no_worse
        dominated[index] |= ((later <= entry).all(axis=1) & ~no_worse).any(axis=0)
    return np.ascontiguousarray(dominated.T)


def validate(problem: Any, row: str, counts: Floats) -> None:
    """Check and convert the arrays and budgets of a frozen problem, in place.

    Args:
        problem: A dataclass with the fields of `Problem`.
        row: What errors call a row of the arrays, "block" or "class".
        counts: (rows,), the number of tensors that each row stands for.

    Raises:
        ValueError: An array has a wrong shape or a value that is not accepted.
    """
    cost = np.array(problem.cost, dtype=np.float64)
    if cost.ndim != 2 or 0 in cost.shape:
        raise ValueError(f"cost has shape {cost.shape}; it must be (rows, configurations), and neither may be 0.")
    bad = np.isnan(cost) | np.isneginf(cost)
    if bad.any():
        raise ValueError(
            f"cost of {_first(bad, row)} is {cost[bad][0]}; it must be a number, or inf to forbid the entry."
        )
    allowed = np.isfinite(cost)
    if not allowed.any(axis=1).all():
        index = int(np.argmin(allowed.any(axis=1)))
        raise ValueError(f"{row} {index} has no configuration left: its cost is inf in all of them.")

    memory = _amounts("memory", problem.memory, allowed, row)
    fractional = memory != np.rint(memory)
    if fractional.any():
        raise ValueError(f"memory of {_first(fractional, row)} is {memory[fractional][0]}; it must be whole bytes.")
    most = float(counts @ memory.max(axis=1))
    if most >= EXACT:
        raise ValueError(f"memory sums to as much as {most:.3g} bytes; it must stay below 2**53 to be exact.")

    values = {
        "cost": cost,
        "memory": memory.astype(np.int64),
        "time": _amounts("time", problem.time, allowed, row),
        "memory_budget": _budget("memory_budget", problem.memory_budget, math.floor),
        "time_budget": _budget("time_budget", problem.time_budget, float),
    }
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
        object.__setattr__(problem, name, value)


def _amounts(name: str, values: Any, allowed: Booleans, row: str) -> Floats:
    amounts = np.array(values, dtype=np.float64)
    if amounts.shape != allowed.shape:
        raise ValueError(f"{name} has shape {amounts.shape}, but cost has shape {allowed.shape}.")
    amounts[~allowed] = 0  # values of forbidden entries are not used
    bad = ~(np.isfinite(amounts) & (amounts >= 0))
    if bad.any():
        raise ValueError(f"{name} of {_first(bad, row)} is {amounts[bad][0]}; it must be finite and not negative.")
    return amounts


def _budget(name: str, value: Any, convert: Any) -> Any:
    if value is None or value == math.inf:
        return None
    if math.isnan(value):
        raise ValueError(f"{name} is NaN; it must be a number, or None for no limit.")
    return convert(value)


def _first(where: Booleans, row: str) -> str:
    index, configuration = np.argwhere(where)[0]
    return f"{row} {index}, configuration {configuration}"
