"""What is asked, what is answered, and the whole numbers in between."""

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
TIME_DIGITS = 9  # decimals kept of the slowest time's leading digit


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one of C configurations for each of N blocks: least total cost, both budgets kept.

    A cost of ``inf`` forbids the entry (the paper's hard constraint); a negative cost is a preference. ``memory`` is
    in whole bytes, and its sum stays within ``memory_budget`` to the byte. ``time`` is a ratio, and its *mean over
    blocks* stays within ``time_budget``, give or take 1e-9. A budget of ``None`` or ``inf`` does not bind.

    >>> problem = Problem(cost=[[0, 1], [0, 2]], memory=[[8, 4], [8, 4]], time=[[1, 1], [1, 1]], memory_budget=12)
    >>> problem.blocks, problem.configurations
    (2, 2)
    """

    cost: Floats  # (blocks, configurations)
    memory: Integers  # (blocks, configurations), bytes
    time: Floats  # (blocks, configurations), relative to the reference
    memory_budget: int | None = None
    time_budget: float | None = None

    def __post_init__(self) -> None:
        cost = np.array(self.cost, dtype=np.float64)
        if cost.ndim != 2 or 0 in cost.shape:
            raise ValueError(f"cost has shape {cost.shape}; it must be (blocks, configurations), and neither may be 0.")
        bad = np.isnan(cost) | np.isneginf(cost)
        if bad.any():
            raise ValueError(
                f"cost of {_first(bad)} is {cost[bad][0]}; it must be a number, or inf to forbid the entry."
            )
        allowed = np.isfinite(cost)
        if not allowed.any(axis=1).all():
            block = int(np.argmin(allowed.any(axis=1)))
            raise ValueError(f"block {block} has no configuration left: its cost is inf in all of them.")

        memory = _amounts("memory", self.memory, allowed)
        fractional = memory != np.rint(memory)
        if fractional.any():
            raise ValueError(f"memory of {_first(fractional)} is {memory[fractional][0]}; it must be whole bytes.")
        if memory.max(axis=1).sum() >= EXACT:
            raise ValueError(
                f"memory sums to as much as {memory.max(axis=1).sum():.3g} bytes; below 2**53 it is exact."
            )

        values = {
            "cost": cost,
            "memory": memory.astype(np.int64),
            "time": _amounts("time", self.time, allowed),
            "memory_budget": _budget("memory_budget", self.memory_budget, math.floor),
            "time_budget": _budget("time_budget", self.time_budget, float),
        }
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            object.__setattr__(self, name, value)

    @property
    def blocks(self) -> int:
        return len(self.cost)

    @property
    def configurations(self) -> int:
        return len(self.cost[0])


@dataclass(frozen=True, eq=False)
class Solution:
    """An assignment, how good it is proven to be, and what a little more of each budget is worth."""

    choice: Integers  # (blocks,), the configuration of each block
    objective: float
    """Total cost of the choice."""
    bound: float
    """No assignment within the budgets costs less. Equal to ``objective`` if the choice is proven optimal."""
    memory_used: int
    """Bytes; never more than the budget."""
    time_used: float
    """Mean over blocks."""
    memory_price: float
    """How much the linear relaxation's objective falls per extra byte of budget: 0 if the budget does not bind, and
    something between the slopes on both sides if they differ."""
    time_price: float
    """The same per extra unit of mean time."""
    passes: int
    """Passes over the arrays that the dual took."""
    core: int
    """Blocks that the bound left open to the search."""
    states: int
    """Partial assignments that the search looked at."""

    @property
    def gap(self) -> float:
        return self.objective - self.bound

    @property
    def relative_gap(self) -> float:
        if self.gap == 0:
            return 0.0
        return self.gap / abs(self.objective) if self.objective else math.inf

    @property
    def optimal(self) -> bool:
        """Whether the choice is proven to be optimal."""
        return self.gap == 0


class Infeasible(ValueError):
    """No assignment keeps both budgets. Says how much would be needed.

    Thousands of blocks may be too many to search to the end for the last few bytes. Then the smallest budgets are the
    smallest ones found, and "no assignment" means that none was found.
    """

    def __init__(
        self,
        memory_budget: int | None,
        time_budget: float | None,
        smallest_memory: int | None,
        smallest_time: float | None,
    ) -> None:
        self.memory_budget = memory_budget
        self.time_budget = time_budget
        self.smallest_memory = smallest_memory
        """The smallest memory budget that can be kept under this time budget; None if no memory is enough."""
        self.smallest_time = smallest_time
        """The smallest time budget that can be kept under this memory budget; None if no time is enough."""
        at_time = "" if time_budget is None else f" for a mean time of {time_budget:.9g}"
        in_memory = "" if memory_budget is None else f" in {memory_budget} bytes"
        super().__init__(
            "no assignment keeps the budgets: "
            + (f"no memory is enough{at_time}" if smallest_memory is None else "")
            + (f"the smallest memory{at_time} is {smallest_memory} bytes" if smallest_memory is not None else "")
            + "; "
            + (f"no time is enough{in_memory}" if smallest_time is None else "")
            + (f"the smallest mean time{in_memory} is {smallest_time:.9g}" if smallest_time is not None else "")
            + "."
        )

    @property
    def memory_alone(self) -> bool:
        """Whether the memory budget could be kept if time did not matter."""
        return self.smallest_time is not None

    @property
    def time_alone(self) -> bool:
        """Whether the time budget could be kept if memory did not matter."""
        return self.smallest_memory is not None


COST, MEMORY, TIME = range(3)


@dataclass(frozen=True, eq=False)
class Instance:
    """A problem in whole numbers, kept in float64: sums are exact, and equal costs compare equal.

    Otherwise 0.1 + 0.2 and 0.3 would be two costs, rounding would settle ties, and a budget of 1.3 might refuse a block
    of 1.2 beside one of 1.4.
    """

    weights: Floats  # (3, blocks, configurations): cost, memory, time. A forbidden entry is (inf, 0, 0)
    limits: Floats  # (2,): of memory and of time, each summed over blocks
    cost_unit: float
    time_unit: float

    @classmethod
    def of(cls, problem: Problem) -> Instance:
        allowed = np.isfinite(problem.cost)
        total_cost = np.abs(np.where(allowed, problem.cost, 0)).max(axis=1).sum()
        cost_unit = 10.0 ** math.ceil(math.log10(total_cost / COST_STEPS)) if total_cost else 1.0
        slowest = problem.time.max()
        time_unit = 10.0 ** (math.floor(math.log10(slowest)) - TIME_DIGITS) if slowest else 1.0
        weights = np.stack([np.rint(problem.cost / cost_unit), problem.memory, np.rint(problem.time / time_unit)])
        weights[:, _dominated(weights)] = [[np.inf], [0], [0]]

        # An absent budget is one that cannot bind: nothing below has to know of it.
        limits = weights[1:].max(axis=2).sum(axis=1)
        if problem.memory_budget is not None:
            limits[0] = min(limits[0], problem.memory_budget)
        if problem.time_budget is not None:
            # Rounding may add half a step per block: an assignment within the budget must not be refused for that.
            limits[1] = min(limits[1], math.floor(problem.blocks * (problem.time_budget / time_unit + 0.5)))
        return cls(weights, limits, cost_unit, time_unit)

    def totals(self, choice: Integers) -> Floats:
        """(3,): cost, memory and time of an assignment."""
        totals: Floats = self.weights[:, np.arange(len(choice)), choice].sum(axis=1)
        return totals

    def fits(self, choice: Integers) -> bool:
        return bool((self.totals(choice)[1:] <= self.limits).all())


def _dominated(weights: Floats) -> Booleans:
    """(blocks, configurations): entries that another one of the same block equals or beats in everything.

    Of equal ones the first stays. This is where ties between configurations are settled.
    """
    entries = np.ascontiguousarray(weights.transpose(2, 0, 1))  # (configurations, 3, blocks)
    dominated = np.zeros((weights.shape[2], weights.shape[1]), dtype=bool)
    for index, entry in enumerate(entries):
        later = entries[index + 1 :]
        no_worse = (entry <= later).all(axis=1)
        dominated[index + 1 :] |= no_worse
        dominated[index] |= ((later <= entry).all(axis=1) & ~no_worse).any(axis=0)
    return np.ascontiguousarray(dominated.T)


def _amounts(name: str, values: Any, allowed: Booleans) -> Floats:
    amounts = np.array(values, dtype=np.float64)
    if amounts.shape != allowed.shape:
        raise ValueError(f"{name} has shape {amounts.shape}, but cost has shape {allowed.shape}.")
    amounts[~allowed] = 0  # it does not matter what stands there
    bad = ~(np.isfinite(amounts) & (amounts >= 0))
    if bad.any():
        raise ValueError(f"{name} of {_first(bad)} is {amounts[bad][0]}; it must be finite and not negative.")
    return amounts


def _budget(name: str, value: Any, convert: Any) -> Any:
    if value is None or value == math.inf:
        return None
    if math.isnan(value):
        raise ValueError(f"{name} is NaN; it must be a number, or None for no limit.")
    return convert(value)


def _first(where: Booleans) -> str:
    block, configuration = np.argwhere(where)[0]
    return f"block {block}, configuration {configuration}"
