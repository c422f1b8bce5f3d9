"""The exact search over the few blocks and configurations that the dual's bound leaves open.

The search is dynamic programming, block by block. A state has a choice for each block visited so far and keeps a base
assignment in all others, so every state is also a complete assignment. It is stored as three numbers: the change of
cost, memory and time from the base. A state is dropped if

- it cannot lead to a better assignment than the best one known: at any prices p >= 0, every completion costs at least
  ``cost + p . (weights - slack) + sum over blocks to come of min_c (cost_c + p . weights_c)``;
- no completion fits: the same expression without the costs is above zero;
- another state is no worse in all three numbers.

The search visits large blocks first and small ones last. Once only small blocks are left, the first two rules drop all
states that are far from the limits. The order of reduced costs, which is usual for knapsack cores, needs a hundred
times more states if many blocks are equal.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baoc.solve.problem import COST, MEMORY, TIME, Floats, Instance, Integers

BETTER = 0.5  # costs are whole numbers: an improvement is at least 1, and bounds may be off by rounding
# The blocks to come are a smaller problem with its own best prices. Bounds therefore also use the best prices of the
# whole problem with one or both multiplied by these factors.
FACTORS = (0.0, 0.5, 0.8, 0.9, 0.96, 1.04, 1.1, 1.25, 2.0)
FRONT = 128  # fewer states are not worth sorting
SLICES, LEAST_SLICE = 512, 64  # the largest number of slices, and the smallest number of states in one
CHUNK = 2048  # states bounded at once: too few for BLAS to start threads, which would be slower


@dataclass
class Effort:
    """The limits of a search, and the number of states so far."""

    most_states: int
    deadline: float = float("inf")  # of time.monotonic()
    states: int = 0

    @property
    def exhausted(self) -> bool:
        return self.states >= self.most_states or time.monotonic() >= self.deadline


@dataclass(frozen=True, eq=False)
class Core:
    """The open blocks in order of search, and the changes that their options make."""

    blocks: Integers  # (open blocks,)
    starts: Integers  # (open blocks,): the index of each block's first option
    options: Integers  # (options,): configurations, block after block, the base's own among them
    changes: Floats  # (3, options): cost, memory and time against the base
    slack: Floats  # (2,): limits minus the totals of the base; negative where it does not fit
    base_cost: float  # cost of the base minus the cost of the best assignment known

    @classmethod
    def of(
        cls, instance: Instance, base: Integers, entries: tuple[Integers, Integers], best: float, price: Floats
    ) -> Core:
        """Build the core of a base and some more entries.

        Args:
            instance: The problem.
            base: (blocks,), an assignment.
            entries: Blocks and configurations, sorted by block.
            best: The cost of the best assignment known.
            price: (2,), the best prices.
        """
        blocks, starts = np.unique(entries[0], return_index=True)
        rows = np.insert(entries[0], starts, blocks)
        options = np.insert(entries[1], starts, base[blocks])
        changes = instance.weights[:, rows, options] - instance.weights[:, rows, base[rows]]
        if len(blocks) > 1:
            starts = starts + np.arange(len(blocks))
            spread = np.maximum.reduceat(changes[1:], starts, axis=1) - np.minimum.reduceat(changes[1:], starts, axis=1)
            lengths = np.diff(starts, append=len(rows))
            large_first = np.argsort(-(price @ spread), kind="stable")
            rank = np.argsort(large_first)
            order = np.argsort(np.repeat(rank, lengths), kind="stable")
            blocks, options, changes = blocks[large_first], options[order], changes[:, order]
            starts = np.cumsum(lengths[large_first]) - lengths[large_first]
        totals = instance.totals(base)
        return cls(blocks, starts, options, changes, instance.limits - totals[1:], float(totals[COST]) - best)


@dataclass(frozen=True, eq=False)
class Found:
    """The best assignment of a search. Costs are relative to the best assignment known before."""

    cost: float  # below 0, or 0 if none is better
    changes: list[tuple[int, int]]  # (block, configuration) where it differs from the base
    skipped: float  # no assignment that the search skipped, due to width or effort, costs less than this


def search(core: Core, prices: Floats, width: int, effort: Effort) -> Found:
    """Search a core.

    Args:
        core: The open blocks and their options.
        prices: (any number, 2), which give bounds. The best ones come first.
        width: The number of states that are kept.
        effort: Counts the states, and ends the search when exhausted.
    """
    bounds = _Bounds(core, prices)
    best, best_at = min(0.0, core.base_cost) if (core.slack >= 0).all() else 0.0, None
    skipped = np.inf
    history: list[npt.NDArray[np.int32]] = []  # per block: the index of each kept state among all new states
    states = np.array([[core.base_cost], [0.0], [0.0]])  # (3, states)
    ends = np.append(core.starts[1:], len(core.options))
    for depth, (start, end) in enumerate(zip(core.starts, ends)):
        change = core.changes[:, start:end]
        states = (states[:, None, :] + change[:, :, None]).reshape(3, -1)  # option by option
        effort.states += states.shape[1]

        fits = (states[MEMORY] <= core.slack[0]) & (states[TIME] <= core.slack[1])
        fitting_cost = np.where(fits, states[COST], np.inf)
        place = int(fitting_cost.argmin())
        if fitting_cost[place] < best:
            best, best_at = float(fitting_cost[place]), (depth, place)

        kept, bound = bounds.promising(states, depth + 1, best - BETTER)
        if len(kept) > FRONT:
            front = pareto_front(bounds.clamped(states[:, kept], depth + 1))
            kept, bound = kept[front], bound[front]
        if len(kept) > width:
            order = np.argpartition(bound, width)
            skipped = min(skipped, float(bound[order[width:]].min()))
            kept = kept[order[:width]]
        if not len(kept):
            break
        states = states[:, kept]
        history.append(kept.astype(np.int32))
        if effort.exhausted and depth + 1 < len(core.blocks):
            skipped = -np.inf
            break

    changes = []
    if best_at is not None:
        last, place = best_at
        for depth in range(last, -1, -1):
            option, parent = divmod(place, len(history[depth - 1]) if depth else 1)
            changes.append((int(core.blocks[depth]), int(core.options[core.starts[depth] + option])))
            place = int(history[depth - 1][parent]) if depth else 0
    return Found(best, changes, skipped)


class _Bounds:
    """Bounds on the completions of a state, by its depth: the number of blocks visited."""

    def __init__(self, core: Core, prices: Floats) -> None:
        best = prices[0]
        fit_only = np.eye(2)  # prices of bounds without the cost
        around = [best * factor for factor in FACTORS]
        if best.all():
            around += [best * factor for f in FACTORS for factor in ((f, 1), (1, f))]
            fit_only = np.vstack([fit_only, best])
        all_prices = np.vstack([prices, *around, fit_only])
        self.costed = len(all_prices) - len(fit_only)
        # (bounds, 3): factors of cost, memory and time
        self.directions = np.hstack([(np.arange(len(all_prices)) < self.costed)[:, None], all_prices])

        self.rest = np.zeros((len(core.blocks) + 1, len(all_prices)))  # the least that the blocks to come add
        growth = np.zeros((len(core.blocks) + 1, 2))  # the most that they add
        if len(core.blocks):
            least = np.minimum.reduceat(self.directions @ core.changes, core.starts, axis=1)
            most = np.maximum.reduceat(core.changes[1:], core.starts, axis=1)
            self.rest[:-1] = least[:, ::-1].cumsum(axis=1)[:, ::-1].T
            growth[:-1] = most[:, ::-1].cumsum(axis=1)[:, ::-1].T
        self.rest -= all_prices @ core.slack
        self.harmless = core.slack - growth  # (depths, 2)

    def promising(self, states: Floats, depth: int, target: float) -> tuple[Integers, Floats]:
        """Return which states may lead to a cost of `target` or less, and their bounds."""
        # The best prices drop most of the states, so the other bounds are only computed for the rest.
        (kept,) = np.nonzero(self.directions[0] @ states + self.rest[depth, 0] <= target)
        parts, bounds = [kept[:0]], [np.empty(0)]
        for start in range(0, len(kept), CHUNK):
            chunk = kept[start : start + CHUNK]
            values = self.directions @ states[:, chunk] + self.rest[depth][:, None]
            bound = values[: self.costed].max(axis=0)
            good = (bound <= target) & (values[self.costed :] <= BETTER).all(axis=0)
            parts.append(chunk[good])
            bounds.append(bound[good])
        return np.concatenate(parts), np.concatenate(bounds)

    def clamped(self, states: Floats, depth: int) -> Floats:
        """Return the states with equal memory (or time) wherever the limit can no longer be reached."""
        clamped: Floats = states.copy()
        np.maximum(clamped[1:], self.harmless[depth][:, None], out=clamped[1:])
        return clamped


def pareto_front(states: Floats) -> Integers:
    """Return the states that no other state equals or beats in everything.

    In order of memory, a state is beaten if an earlier one has no more time and no more cost. Times are cut into
    slices. States of earlier slices have less time, so a running minimum of their costs, for half of the slices against
    the other half, finds what they beat; then likewise within each half. If there are more distinct times than slices,
    a few beaten states remain.
    """
    order = np.lexsort((states[COST], states[TIME], states[MEMORY]))
    cost, spent = states[COST, order], states[TIME, order]
    slices = np.unique(np.sort(spent)[:: max(len(spent) // SLICES, LEAST_SLICE)])
    parts = [(np.arange(len(order)), cost, np.searchsorted(slices, spent, side="right") - 1, 0, len(slices))]
    kept = []
    while parts:
        place, cost, slice_of, begin, end = parts.pop()
        is_last = end - begin == 1
        middle = (begin + end) // 2
        early = spent[place] == slices[begin] if is_last else slice_of < middle
        least = np.minimum.accumulate(np.where(early, cost, np.inf))
        if is_last:
            kept.append(place[np.append(True, least[:-1] > cost[1:])])
            continue
        late = ~early & (least > cost)
        halves = (early, begin, middle), (late, middle, end)
        parts += [(place[half], cost[half], slice_of[half], *bounds) for half, *bounds in halves if half.any()]
    front: Integers = order[np.sort(np.concatenate(kept))]
    return front
