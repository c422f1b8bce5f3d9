"""The exact search over the few blocks and configurations that the dual's bound leaves open.

Dynamic programming over blocks. A state is a partial assignment: the blocks seen so far have chosen, all others stay at a base
assignment, so that every state is also a whole assignment. All that matters of it are three numbers, its change of cost,
memory and time against the base. A state is dropped when

- it cannot become better than the best assignment known: for any prices p >= 0, its completions cost at least
  ``cost + p . (weights - slack) + sum over blocks not yet seen of min_c (cost_c + p . weights_c)``;
- no completion fits: the same bound with the cost left out is above zero;
- another state is no worse in all three numbers.

Blocks go from large to small. The large ones decide, the small ones fill; once only small ones are left, the first two rules
see that a state far from its budgets cannot come back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baoc.solve.problem import Floats, Integers

BETTER = 0.5  # costs are whole numbers, so an improvement is at least 1; the other half is for the rounding of bounds
# Around the best prices p, bounds are also taken at p scaled by these factors, in one or both coordinates: the blocks that
# remain are a smaller problem, with other best prices.
FACTORS = (0.0, 0.5, 0.8, 0.9, 0.96, 1.04, 1.1, 1.25, 2.0)
FRONT = 64  # fewer states are not worth sorting for dominance
SLICES = 32
CHUNK = 2048  # states bounded at once: small enough that BLAS does not start threads for it


@dataclass
class Effort:
    """How much may still be spent."""

    states: int
    deadline: float | None = None
    spent: int = 0

    def spend(self, states: int) -> None:
        self.spent += states

    @property
    def exhausted(self) -> bool:
        return self.spent >= self.states or (self.deadline is not None and time.monotonic() >= self.deadline)


@dataclass(frozen=True, eq=False)
class Core:
    """Open blocks in order of search, and what each of their options changes."""

    blocks: Integers  # (open blocks,)
    options: list[Integers]  # per open block: configurations that may be chosen
    changes: list[Floats]  # per open block: (3, options), cost, memory and time against the base
    slack: Floats  # (2,): limits less what the base uses; negative where the base does not fit
    base_cost: float  # cost of the base less that of the best assignment known


@dataclass(frozen=True, eq=False)
class Found:
    improvement: float
    """Cost of the best assignment found less that of the best one known before; 0 if there is none better."""
    choice: list[tuple[int, int]]
    """(block, configuration) where the improved assignment leaves the base."""
    skipped: float
    """No assignment that the search left out for want of width or effort is better than this, on the same scale."""


def make_core(
    weights: Floats, base: Integers, open_entries: tuple[Integers, Integers], slack: Floats, cost: float, price: Floats
) -> Core:
    """Collect the open entries, block by block, without those that another one dominates."""
    rows, columns = open_entries  # sorted by row
    blocks, first = np.unique(rows, return_index=True)
    options, changes, sizes = [], [], []
    for block, others in zip(blocks, np.split(columns, first[1:])):
        option = np.append(base[block], others)
        change = weights[:, block, option] - weights[:, block, base[block], None]
        kept = _undominated(change)
        options.append(option[kept])
        changes.append(change[:, kept])
        sizes.append(price @ np.ptp(change[1:], axis=1))
    order = np.argsort(-np.array(sizes), kind="stable")
    return Core(blocks[order], [options[k] for k in order], [changes[k] for k in order], slack, cost)


def search(core: Core, prices: Floats, width: int, effort: Effort) -> Found:
    """Search the core with at most `width` states at a time. `prices` (any number, 2) give the bounds, the best one first."""
    bounds = _Bounds(core, prices)
    best, best_at = 0.0, None
    skipped = np.inf
    history: list[npt.NDArray[np.int32]] = []  # per block: for each state kept, its place among all extensions
    states = np.array([[core.base_cost], [0.0], [0.0]])  # (3, states)
    for depth, change in enumerate(core.changes):
        states = (states[:, None, :] + change[:, :, None]).reshape(3, -1)  # option-major
        effort.spend(states.shape[1])

        fitting = (states[1] <= core.slack[0]) & (states[2] <= core.slack[1])
        fitting_cost = np.where(fitting, states[0], np.inf)
        place = int(fitting_cost.argmin())
        if fitting_cost[place] < best:
            best, best_at = float(fitting_cost[place]), (depth, place)

        kept, bound = bounds.promising(states, depth + 1, best - BETTER)
        if len(kept) > FRONT:
            front = _front(bounds.clamped(states[:, kept], depth + 1))
            kept, bound = kept[front], bound[front]
        if len(kept) > width:
            order = np.argpartition(bound, width)
            skipped = min(skipped, float(bound[order[width:]].min()))
            kept = kept[order[:width]]
        states = states[:, kept]
        history.append(kept.astype(np.int32))
        if effort.exhausted and depth + 1 < len(core.changes):
            skipped = -np.inf
            break
        if not len(kept):
            break

    choice = []
    if best_at is not None:
        depth, place = best_at
        while depth >= 0:
            parents = len(history[depth - 1]) if depth else 1
            option, parent = divmod(place, parents)
            choice.append((int(core.blocks[depth]), int(core.options[depth][option])))
            depth -= 1
            place = int(history[depth][parent]) if depth >= 0 else 0
    return Found(best, choice, skipped)


@dataclass
class _Bounds:
    """Bounds on all completions of a state, by depth (how many blocks have been seen)."""

    core: Core
    prices: Floats
    directions: Floats = field(init=False)  # (bounds, 3): weights of cost, memory and time; those without cost come last
    rest: Floats = field(init=False)  # (depths, bounds): what the blocks not yet seen add at least, less directions . slack
    growth: Floats = field(init=False)  # (depths, 2): what they add at most in memory and time
    costed: int = field(init=False)

    def __post_init__(self) -> None:
        best = self.prices[0]
        around = [best * factor for f in FACTORS for factor in ((f, 1), (1, f), (f, f))]
        with_cost = np.unique(np.vstack([self.prices, *around]), axis=0)
        with_cost = np.vstack([best, with_cost])
        fit_only = [[1, 0], [0, 1], best] if best.all() else [[1, 0], [0, 1]]
        self.costed = len(with_cost)
        multipliers = np.vstack([with_cost, fit_only])
        self.directions = np.hstack([(np.arange(len(multipliers)) < self.costed)[:, None], multipliers])

        changes = self.core.changes
        self.rest = np.zeros((len(changes) + 1, len(multipliers)))
        self.growth = np.zeros((len(changes) + 1, 2))
        for depth in range(len(changes) - 1, -1, -1):
            self.rest[depth] = self.rest[depth + 1] + (self.directions @ changes[depth]).min(axis=1)
            self.growth[depth] = self.growth[depth + 1] + np.maximum(changes[depth][1:].max(axis=1), 0)
        self.rest -= multipliers @ self.core.slack

    def promising(self, states: Floats, depth: int, target: float) -> tuple[Integers, Floats]:
        """Which states may lead to a cost of `target` or less, and their bounds."""
        # The best prices alone drop most states; the others look at the rest.
        (kept,) = np.nonzero(self.directions[0] @ states + self.rest[depth, 0] <= target)
        parts, bounds = [], []
        for start in range(0, len(kept), CHUNK):
            chunk = kept[start : start + CHUNK]
            values = self.directions @ states[:, chunk] + self.rest[depth][:, None]
            bound = values[: self.costed].max(axis=0)
            good = (bound <= target) & (values[self.costed :] <= BETTER).all(axis=0)
            parts.append(chunk[good])
            bounds.append(bound[good])
        return (np.concatenate(parts), np.concatenate(bounds)) if parts else (kept, np.empty(0))

    def clamped(self, states: Floats, depth: int) -> Floats:
        """Memory and time below what can still be added are as good as each other: no completion reaches the limit."""
        states[1:] = np.maximum(states[1:], (self.core.slack - self.growth[depth])[:, None])
        return states


def _front(states: Floats) -> Integers:
    """Drop states that another one equals or dominates. It may miss some where times are many: it compares by slices of time.

    In order of memory, a state is dominated if an earlier one has no more time and no more cost. "No more time" is tested
    against the start of the state's slice, which turns the test into a running minimum per slice.
    """
    cost, memory, spent = states
    order = np.lexsort((cost, spent, memory))
    cost, spent = cost[order], spent[order]
    slices = np.unique(np.quantile(spent, np.linspace(0, 1, SLICES), method="lower"))
    slice_of = np.searchsorted(slices, spent, side="right") - 1
    keep = np.ones(len(order), dtype=bool)
    for index, start in enumerate(slices):
        least = np.minimum.accumulate(np.where(spent <= start, cost, np.inf))
        (members,) = np.nonzero(slice_of == index)
        members = members[members > 0]
        keep[members] = least[members - 1] > cost[members]
    kept: Integers = order[keep]
    return kept


def _undominated(change: Floats) -> npt.NDArray[np.bool_]:
    """Which of a block's options (3, options) no other one equals or dominates; of equal ones the first stays."""
    no_worse = (change[:, :, None] <= change[:, None, :]).all(axis=0)  # [a, b]: a is nowhere worse than b
    equal = no_worse & no_worse.T
    worse: npt.NDArray[np.bool_] = (no_worse & ~equal).any(axis=0) | np.triu(equal, 1).any(axis=0)
    return ~worse
