"""The exact search over how many tensors of each class leave their cheapest configuration.

At the dual's best prices p, every class has a cheapest configuration, its base. A solution is a set of *moves* of
single tensors from the base to other configurations. Each move has a reduced cost r >= 0, and a solution costs

    L(p) + sum of r over its moves + p . (unused memory and time).

To reach a target, the sum of r must be at most ``target - L(p)``. Few moves are that cheap, and few tensors can make
them. The search is dynamic programming over the moves: it decides how many tensors make each one, so permutations of
tensors never arise. A state is four numbers: cost, memory, time, and the number of tensors of the current class that
have not moved. As in `core`, a state is dropped if it cannot reach the target, if it cannot fit, or if another state is
no worse. Three things differ from `core`:

- Bounds are linear in the number of tensors that make a move, so the numbers that pass all bounds are an interval. The
  search computes the interval and only creates these states.
- Memory and time are rounded up to multiples of the greatest common divisor of the moves to come, because no completion
  ends in between. Without this, classes with costs in proportion to their sizes need many times more states.
- If there are too many states, one half of those kept has the best bounds and the smallest distance to the linear
  relaxation's solution. The other half is spread over the rest. If all bounds are equal, the first half leads to
  solutions that use up both budgets, and the second half to the last few bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baoc.solve.core import FACTORS, Effort, pareto_front
from baoc.solve.problem import COST, MEMORY, TIME, Booleans, Floats, Integers

FRONT = 128  # fewer states are not worth sorting
EXPAND = 8  # new states before sorting, for each state that is kept at the most
CHUNK = 2048  # states bounded at once: too few for BLAS to start threads
OVERHEAD = 256  # a move costs as much time as this many states, however few there are
AWAY = 0.1  # weight of the distance from the linear relaxation's solution when states are ranked
ROUNDING = 1e-9  # of a number of tensors


@dataclass(frozen=True, eq=False)
class ClassInstance:
    """A class problem in whole numbers, kept in float64. In every class, the least of each weight is 0."""

    weights: Floats  # (3, classes, configurations), per tensor: cost, memory, time. A forbidden entry is (inf, 0, 0)
    counts: Integers  # (classes,)
    limits: Floats  # (2,): of memory and of time
    gain: float  # a solution is better if it costs less by this, or more

    @classmethod
    def of(cls, weights: Floats, counts: Integers, limits: Floats, error: float = 0.0) -> ClassInstance:
        """Build an instance. Its limits are rounded down to multiples of the weights' greatest common divisors.

        Args:
            weights: As in the instance.
            counts: As in the instance.
            limits: As in the instance.
            error: Differences of total cost up to this come from rounding.
        """
        allowed = np.isfinite(weights[COST])
        steps = np.array([max(int(np.gcd.reduce(row[allowed].astype(np.int64))), 1) for row in weights], dtype=float)
        gain = max(steps[COST] - 0.5, error)  # total costs differ by whole steps; bounds may be off by rounding
        return cls(weights, counts, np.floor(limits / steps[1:]) * steps[1:], gain)

    def totals(self, counts: Integers) -> Floats:
        """Return (3,): cost, memory and time of (classes, configurations) counts."""
        rows, columns = np.nonzero(counts)
        totals: Floats = self.weights[:, rows, columns] @ counts[rows, columns].astype(float)
        return totals

    def fits(self, counts: Integers) -> bool:
        return bool((self.totals(counts)[1:] <= self.limits).all())

    def uniform(self, choice: Integers) -> Integers:
        """Return the counts if every class has one configuration."""
        counts = np.zeros(self.weights.shape[1:], dtype=np.int64)
        counts[np.arange(len(choice)), choice] = self.counts
        return counts


@dataclass(frozen=True, eq=False)
class Found:
    """The best solution of a search."""

    counts: Integers | None  # (classes, configurations); None if no solution costs less than the best one known
    skipped: float  # no solution that the search left out costs less than this


@dataclass(frozen=True, eq=False)
class _Moves:
    """Moves in order of search: class by class, large tensors first."""

    rows: Integers  # (moves,): classes
    columns: Integers  # (moves,): configurations
    changes: Floats  # (3, moves): cost, memory and time per tensor
    most: Floats  # (moves,): tensors that can make the move within the target. Not whole
    tensors: Integers  # (moves,): of the class

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def first(self) -> Booleans:
        """(moves,): whether the move is the first one of its class."""
        first: Booleans = np.diff(self.rows, prepend=-1) != 0
        return first


class ClassCore:
    """The data that searches with different targets share.

    Args:
        instance: The problem.
        base: (classes,), the cheapest configurations at the first prices.
        prices: (any number, 2), which give bounds. The best ones come first.
        mixture: (classes, configurations), a solution of the linear relaxation.
    """

    def __init__(self, instance: ClassInstance, base: Integers, prices: Floats, mixture: Floats) -> None:
        self.instance, self.base, self.mixture = instance, base, mixture
        self.price = price = prices[0]
        fit_only = np.eye(2)  # prices of bounds without the cost
        around = [price * factor for factor in FACTORS]
        if price.all():
            around += [price * factor for f in FACTORS for factor in ((f, 1), (1, f))]
            fit_only = np.vstack([fit_only, price])
        all_prices = np.vstack([prices, *around, fit_only])
        self.costed = len(all_prices) - len(fit_only)
        # (bounds, 3): factors of cost, memory and time
        self.directions = np.hstack([(np.arange(len(all_prices)) < self.costed)[:, None], all_prices])
        self.measure = price if price.any() else 1 / np.maximum(instance.limits, 1)  # of distances and sizes

        classes = np.arange(len(base))
        weights = instance.weights
        self.changes = weights - weights[:, classes, base][:, :, None]  # (3, classes, configurations)
        reduced = self.changes[COST] + price[0] * self.changes[MEMORY] + price[1] * self.changes[TIME]
        self.reduced = np.maximum(reduced, 0)  # (classes, configurations)
        self.reduced[classes, base] = np.inf
        self.totals = weights[:, classes, base] @ instance.counts.astype(float)
        self.bound = float(self.totals[COST] + price @ (self.totals[1:] - instance.limits))  # L

    def cheapest(self, moves: int) -> float:
        """Return the reduced cost up to which more than `moves` moves are open; inf if there are not that many."""
        finite = np.sort(self.reduced[np.isfinite(self.reduced)])
        return float(finite[moves]) if len(finite) > moves else math.inf

    def search(self, best: float, target: float, most_reduced: float, width: int, effort: Effort) -> Found:
        """Search for the solution of least cost below `best`.

        Args:
            best: The cost of the best solution known.
            target: A cost below `best`. States that cannot lead to it are dropped.
            most_reduced: Moves with a higher reduced cost are left out.
            width: The number of states that are kept.
            effort: Counts the states, and ends the search when exhausted.
        """
        limits = np.array([best, *self.instance.limits])
        start = self.totals - limits
        target -= best
        room = target - (self.bound - best)
        moves = self._open(min(room * (1 + ROUNDING), most_reduced), room)
        left_out = self.reduced[self.reduced > most_reduced].min(initial=np.inf)
        skipped = np.inf if left_out > room else self.bound - best + left_out
        ahead = _Ahead(self, moves)
        targets = np.full(len(self.directions), 0.5)
        targets[: self.costed] = target
        gain = self.instance.gain

        lowest, lowest_at = 0.0, None
        if (start[1:] <= 0).all() and start[COST] < 0:
            lowest, lowest_at = float(start[COST]), (-1, 0, 0)
            targets[: self.costed] = min(target, lowest - gain)
        history: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []  # per move: parents and tensors
        states = np.append(start, 0.0)[:, None]  # (4, states): the last one is how many tensors have not moved
        first = moves.first
        for index in range(len(moves)):
            if first[index]:
                states[3] = moves.tensors[index]
            states[1:3] += -states[1:3] % ahead.lattice[:, index, None]
            low, high, bound = ahead.interval(index, states, targets)
            numbers = np.maximum(high - low + 1, 0).astype(np.int64)
            if numbers.sum() > EXPAND * width:
                share = max(EXPAND * width // np.count_nonzero(numbers), 1)
                skipped = min(skipped, float(bound[numbers > share].min(initial=np.inf)))
                middle = ahead.nearest(index, states) - share // 2
                low = np.where(numbers > share, np.clip(middle, low, np.maximum(high - share + 1, low)), low)
                numbers = np.minimum(numbers, share)
            parents = np.repeat(np.arange(len(numbers)), numbers)
            if not len(parents):
                break
            tensors = np.arange(len(parents)) - np.repeat(numbers.cumsum() - numbers, numbers) + low[parents]
            states = states[:, parents]
            states[:3] += moves.changes[:, index, None] * tensors
            states[3] -= tensors
            effort.states += len(parents) + OVERHEAD

            fitting_cost = np.where((states[1:3] <= 0).all(axis=0), states[COST], np.inf)
            place = int(fitting_cost.argmin())
            if fitting_cost[place] < lowest:
                lowest, lowest_at = float(fitting_cost[place]), (index, int(parents[place]), int(tensors[place]))
                targets[: self.costed] = min(target, lowest - gain)

            kept = ahead.front(index, states) if len(parents) > FRONT else np.arange(len(parents))
            if len(kept) > width:
                bounds, distance = ahead.rank(index, states[:, kept])
                order = np.argsort(bounds + AWAY * distance, kind="stable")
                chosen = np.zeros(len(kept), dtype=bool)
                chosen[order[: width // 2]] = True
                chosen[order[np.linspace(width // 2, len(kept) - 1, width - width // 2).astype(np.int64)]] = True
                skipped = min(skipped, float(bounds[~chosen].min()))
                kept = kept[chosen]
            states = states[:, kept]
            history.append((parents[kept].astype(np.int32), tensors[kept].astype(np.int32)))
            if effort.exhausted and index + 1 < len(moves):
                skipped = -np.inf
                break
        return Found(None if lowest_at is None else self._counts(moves, history, lowest_at), best + skipped)

    def _open(self, most_reduced: float, room: float) -> _Moves:
        rows, columns = np.nonzero(self.reduced <= most_reduced)
        reduced, changes = self.reduced[rows, columns], self.changes[:, rows, columns]
        tensors = self.instance.counts[rows]
        size = np.zeros(len(self.base))
        np.maximum.at(size, rows, self.measure @ np.abs(changes[1:]))
        order = np.lexsort((reduced, rows, -size[rows]))
        with np.errstate(divide="ignore", over="ignore"):
            most = np.minimum(room / reduced, tensors)
        return _Moves(rows[order], columns[order], changes[:, order], most[order], tensors[order])

    def _counts(
        self,
        moves: _Moves,
        history: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]],
        place: tuple[int, int, int],
    ) -> Integers:
        """Follow a state back to the start."""
        counts = self.instance.uniform(self.base)
        index, parent, tensors = place
        while index >= 0:
            row = moves.rows[index]
            counts[row, self.base[row]] -= tensors
            counts[row, moves.columns[index]] += tensors
            index -= 1
            if index >= 0:
                parent, tensors = (int(array[parent]) for array in history[index])
        return counts


class _Ahead:
    """Bounds on the effect of the moves that follow each move."""

    def __init__(self, core: ClassCore, moves: _Moves) -> None:
        self.core, self.moves = core, moves
        bounds, number = len(core.directions), len(moves)
        self.values = core.directions @ moves.changes  # (bounds, moves)
        self.per_tensor = np.zeros((number, bounds))  # the least that a tensor of the same class can add
        self.rest = np.zeros((number, bounds))  # the least that all others can add
        self.growth = np.zeros((number, 2))  # the most that can be added to memory and time
        self.useful = np.zeros(number)  # tensors of the same class that later moves can use
        self.expected = np.zeros((2, number))  # what the linear relaxation's solution adds
        whole = np.abs(moves.changes[1:, ::-1]).astype(np.int64)
        self.lattice = np.maximum(np.gcd.accumulate(whole, axis=1)[:, ::-1], 1).astype(float)  # (2, moves)

        # Each tensor makes at most one move, which bounds moves that all tensors of the class can make. For the others,
        # the numbers of tensors as fractions of `most` add up to 1 at most. The sum of both minima is a bound.
        limited = moves.most < moves.tensors
        first = moves.first
        rest, growth = np.zeros(bounds), np.zeros(2)
        each, few = np.zeros(bounds), np.zeros(bounds)
        each_growth, few_growth, useful = np.zeros(2), np.zeros(2), 0.0
        for index in range(number - 1, -1, -1):
            tensors, most = moves.tensors[index], moves.most[index]
            value, change = self.values[:, index], moves.changes[1:, index]
            self.per_tensor[index], self.rest[index] = each, rest + few
            self.growth[index], self.useful[index] = growth + tensors * each_growth + few_growth, useful
            useful += most
            if limited[index]:
                few, few_growth = np.minimum(few, most * value), np.maximum(few_growth, most * change)
            else:
                each, each_growth = np.minimum(each, value), np.maximum(each_growth, change)
            if first[index]:
                rest, growth = rest + tensors * each + few, growth + tensors * each_growth + few_growth
                each, few = np.zeros(bounds), np.zeros(bounds)
                each_growth, few_growth, useful = np.zeros(2), np.zeros(2), 0.0
        if number:
            added = moves.changes[1:] * core.mixture[moves.rows, moves.columns]
            self.expected[:, :-1] = added[:, :0:-1].cumsum(axis=1)[:, ::-1]

    def interval(self, index: int, states: Floats, targets: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the least and the largest number of tensors to move, and a bound, for every state."""
        slope = self.values[:, index] - self.per_tensor[index]
        rising, falling, flat = slope > 0, slope < 0, slope == 0
        low, high, bound = np.zeros((3, states.shape[1]))
        for start in range(0, states.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            room = targets[:, None] - self._values(index, states[:, part])
            bound[part] = targets[0] - room[0]
            most = np.minimum(states[3, part], (room[rising] / slope[rising, None]).min(axis=0, initial=np.inf))
            most[(room[flat] < 0).any(axis=0)] = -1
            high[part] = np.floor(most + ROUNDING)
            low[part] = np.ceil((room[falling] / slope[falling, None]).max(axis=0, initial=0.0) - ROUNDING)
        return low, high, bound

    def nearest(self, index: int, states: Floats) -> Floats:
        """Return the number of tensors after which a state is nearest to the linear relaxation's solution."""
        measure = self.core.measure
        change = measure * self.moves.changes[1:, index]
        away = measure[:, None] * (states[1:3] + self.expected[:, index, None])
        nearest: Floats = np.rint(-(change[:, None] * away).sum(axis=0) / max(float(change @ change), 1e-300))
        return nearest

    def rank(self, index: int, states: Floats) -> tuple[Floats, Floats]:
        """Return bounds, and the distances to the linear relaxation's solution."""
        bounds = np.empty(states.shape[1])
        for start in range(0, states.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            bounds[part] = self._values(index, states[:, part])[: self.core.costed].max(axis=0)
        away = np.abs(states[1:3] + self.expected[:, index, None])
        return bounds, (self.core.measure[:, None] * away).sum(axis=0)

    def front(self, index: int, states: Floats) -> Integers:
        """Return the states that no other state equals or beats in everything."""
        reduced: Floats = states[:3].copy()
        # All values from which the limits can no longer be reached become equal.
        np.maximum(reduced[1:], -self.growth[index][:, None], out=reduced[1:])
        free = np.minimum(states[3], np.ceil(self.useful[index]))
        if free.max() > free.min():
            # Compare only states with equal numbers of free tensors: more of them raise the cost and lower the memory.
            for what, sign in ((COST, 1), (MEMORY, -1)):
                ranks = np.unique(reduced[what], return_inverse=True)[1]
                reduced[what] = ranks + sign * len(free) * free
        return np.sort(pareto_front(reduced))

    def _values(self, index: int, states: Floats) -> Floats:
        """Return (bounds, states): the bounds if no more tensors make this move."""
        values: Floats = self.core.directions @ states[:3]
        values += self.per_tensor[index][:, None] * states[3]
        values += self.rest[index][:, None]
        return values
