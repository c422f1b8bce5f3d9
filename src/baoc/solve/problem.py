"""What is asked, what is answered, and the whole numbers in between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

EXACT = 2**53  # below it float64 holds every whole number, and sums of them are exact in any order
COST_STEPS = 1e15  # the largest total cost is split into about so many steps
TIME_DIGITS = 9  # decimals kept of a time between 1 and 10


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose one of C configurations for each of N blocks: least total cost, both budgets kept.

    A cost of ``inf`` forbids the entry (a hard constraint of the paper's); a negative cost is a preference. ``memory`` is in
    whole bytes, and its sum stays within ``memory_budget`` to the byte. ``time`` is a ratio, and its *mean over blocks* stays
    within ``time_budget``, both rounded to nine decimals. A budget of ``None`` or ``inf`` does not bind.

    >>> problem = Problem(cost=[[0, 1, 3], [0, 2, 9]], memory=[[8, 4, 0], [8, 4, 0]], time=np.ones((2, 3)), memory_budget=12)
    >>> problem.blocks, problem.configurations
    (2, 3)
    """

    cost: Floats  # (blocks, configurations)
    memory: Integers  # (blocks, configurations), bytes
    time: Floats  # (blocks, configurations), relative to the reference
    memory_budget: int | None = None
    time_budget: float | None = None

    def __post_init__(self) -> None:
        cost = np.array(self.cost, dtype=np.float64)
        if cost.ndim != 2 or 0 in cost.shape:
            raise ValueError(f"cost has shape {cost.shape}; it must be (blocks, configurations), neither of them 0.")
        if np.isnan(cost).any() or np.isneginf(cost).any():
            raise ValueError(f"cost of block {_first(np.isnan(cost) | np.isneginf(cost))} is NaN or -inf.")
        allowed = np.isfinite(cost)
        if not allowed.any(axis=1).all():
            block = int(np.argmin(allowed.any(axis=1)))
            raise ValueError(f"block {block} has no configuration left: every entry of its cost is inf.")

        memory = _numbers("memory", self.memory, allowed)
        if (memory != np.rint(memory)).any():
            raise ValueError(f"memory of block {_first(memory != np.rint(memory))} is not a whole number of bytes.")
        if memory.max(axis=1).sum() >= EXACT:
            raise ValueError(f"memory sums to {memory.max(axis=1).sum():.3g} bytes; it must stay below 2**53.")
        time = _numbers("time", self.time, allowed)

        fields = {
            "cost": cost,
            "memory": memory.astype(np.int64),
            "time": time,
            "memory_budget": _budget("memory_budget", self.memory_budget, math.floor),
            "time_budget": _budget("time_budget", self.time_budget, float),
        }
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            object.__setattr__(self, name, value)

    @property
    def blocks(self) -> int:
        return self.cost.shape[0]

    @property
    def configurations(self) -> int:
        return self.cost.shape[1]


@dataclass(frozen=True, eq=False)
class Solution:
    """An assignment, how good it is proven to be, and what a little more of each budget is worth."""

    choice: Integers  # (blocks,), the configuration of each block
    objective: float
    """Total cost of the choice."""
    bound: float
    """No assignment within the budgets costs less than this. Equal to ``objective`` when the choice is proven optimal."""
    memory_used: int
    """Bytes; never more than the budget."""
    time_used: float
    """Mean over blocks."""
    memory_price: float
    """How much the objective of the linear relaxation falls per extra byte of budget; 0 where the budget does not bind."""
    time_price: float
    """The same per extra unit of mean time."""
    passes: int
    """Passes over the arrays that the dual took."""
    core: int
    """Blocks that the bound left open, for the exact search."""
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
        return self.gap == 0


class Infeasible(ValueError):
    """No assignment keeps both budgets. Says by how much they would have to grow."""

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
        """The smallest feasible memory budget under this time budget; None if no memory would be enough."""
        self.smallest_time = smallest_time
        """The smallest feasible time budget under this memory budget; None if no time would be enough."""
        reasons = []
        if smallest_memory is None:
            reasons.append(f"no memory is enough for a mean time of {time_budget:.9g}")
        else:
            under = "" if time_budget is None else f" for a mean time of {time_budget:.9g}"
            reasons.append(f"the smallest memory{under} is {smallest_memory} bytes")
        if smallest_time is None:
            reasons.append(f"no time is enough for {memory_budget} bytes")
        else:
            under = "" if memory_budget is None else f" in {memory_budget} bytes"
            reasons.append(f"the smallest mean time{under} is {smallest_time:.9g}")
        super().__init__("no assignment keeps the budgets: " + ", and ".join(reasons) + ".")

    @property
    def memory_alone(self) -> bool:
        """Whether the memory budget could be kept if time did not matter."""
        return self.smallest_time is not None

    @property
    def time_alone(self) -> bool:
        """Whether the time budget could be kept if memory did not matter."""
        return self.smallest_memory is not None


@dataclass(frozen=True, eq=False)
class Instance:
    """A problem in whole numbers, kept in float64: sums are exact, and equal costs compare equal.

    Without this, 0.1 + 0.2 and 0.3 would be two costs, ties would be settled by rounding, and a budget of 1.3 could refuse
    times of 1.2 and 1.4.
    """

    weights: Floats  # (3, blocks, configurations): cost, memory, time; a forbidden entry is (inf, 0, 0)
    limits: Floats  # (2,): of the memory and of the time, both summed over blocks
    cost_unit: float
    time_unit: float

    @classmethod
    def of(cls, problem: Problem) -> Instance:
        allowed = np.isfinite(problem.cost)
        total_cost = np.abs(np.where(allowed, problem.cost, 0)).max(axis=1).sum()
        cost_unit = 10.0 ** math.ceil(math.log10(total_cost / COST_STEPS)) if total_cost else 1.0
        slowest = np.where(allowed, problem.time, 0).max()
        time_unit = 10.0 ** (math.floor(math.log10(slowest)) - TIME_DIGITS) if slowest else 1.0
        memory = np.where(allowed, problem.memory, 0)
        time = np.where(allowed, np.rint(problem.time / time_unit), 0)
        weights = np.stack([np.rint(problem.cost / cost_unit), memory, time])
        # An absent budget is one that cannot bind. No formula has to know of it.
        most = weights[1:].max(axis=2).sum(axis=1)
        memory_limit = most[0] if problem.memory_budget is None else problem.memory_budget
        time_limit = most[1] if problem.time_budget is None else round(problem.time_budget / time_unit) * problem.blocks
        return cls(weights, np.minimum([memory_limit, time_limit], most), cost_unit, time_unit)

    def totals(self, choice: Integers) -> Floats:
        """(3,): cost, memory and time of an assignment."""
        return self.weights[:, np.arange(len(choice)), choice].sum(axis=1)

    def fits(self, choice: Integers) -> bool:
        return bool((self.totals(choice)[1:] <= self.limits).all())


def _numbers(name: str, values: Any, allowed: npt.NDArray[np.bool_]) -> Floats:
    numbers = np.array(values, dtype=np.float64)
    if numbers.shape != allowed.shape:
        raise ValueError(f"{name} has shape {numbers.shape}, but cost has shape {allowed.shape}.")
    numbers[~allowed] = 0  # whatever stands there will not be chosen
    bad = ~(np.isfinite(numbers) & (numbers >= 0))
    if bad.any():
        raise ValueError(f"{name} of block {_first(bad)} is {numbers[bad][0]}; it must be finite and not negative.")
    return numbers


def _budget(name: str, value: Any, convert: Any) -> Any:
    if value is None or value == math.inf:
        return None
    if math.isnan(value):
        raise ValueError(f"{name} is NaN; it must be a number, or None for no limit.")
    return convert(value)


def _first(where: npt.NDArray[np.bool_]) -> str:
    block, configuration = np.argwhere(where)[0]
    return f"{block} in configuration {configuration}"
