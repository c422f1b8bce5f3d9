"""From the optimum of the class problem to a plan that a person would sign.

The optimum may give tensors of one role five configurations, scattered over the layers, for a gain that no measurement
can see. This module looks for the simplest assignment within a tolerance of it, in this order:

1. one configuration per group of tensors (a role, as a rule);
2. one group has two configurations: its first layers the one, its later layers the other;
3. likewise, but the boundary may be within a layer;
4. every group may have two configurations, at last with the better one in the later layers;
5. groups may have three, in runs of whole layers: only where both budgets bind and two would give up more than the
   standard error of the prediction.

Only options that fit the budgets are looked at, so the memory budget is a ceiling. If none fits, the planner uses the
optimum as it is.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
COST, MEMORY, TIME = range(3)
_EPSILON = 1e-9  # sums in another order differ by less
_MANY = 256  # partial sums, from which on dominated ones are dropped
_MOST = 4_000_000  # partial sums at once
_BOUNDARIES = 32  # between layers, that are tried for three configurations


@dataclass(frozen=True)
class Run:
    """A configuration, and how many tensors of a group have it, in the order of their depth."""

    configuration: int
    tensors: int


@dataclass(frozen=True, eq=False)
class Options:
    """Ways to configure one group, none of which another one beats in cost, memory and time."""

    totals: Floats  # (3, options)
    runs: tuple[tuple[Run, ...], ...]


class Group:
    """Tensors that may share a configuration, in the order of their depth."""

    def __init__(self, weights: Floats, layers: Sequence[str]) -> None:
        """Make a group.

        Args:
            weights: (3, tensors, configurations): cost, bytes and time; cost is infinite where it is not allowed.
            layers: the layer that each tensor is in.
        """
        self._tensors = weights.shape[1]
        self._allowed = _useful(weights)
        zeros = np.zeros((3, 1, len(self._allowed)))
        self._sums = np.concatenate([zeros, weights[:, :, self._allowed].cumsum(axis=1)], axis=1)  # (3, tensors + 1, m)
        self._layer_ends = [i for i in range(1, self._tensors) if layers[i] != layers[i - 1]]
        self.uniform = self._in_two([])
        self._found: dict[str, Options] = {}

    @property
    def by_layer(self) -> Options:
        """One configuration or two, with the boundary between two layers."""
        return self._once("layer", self._layer_ends)

    @property
    def by_tensor(self) -> Options:
        """One configuration or two, with the boundary between any two tensors."""
        return self._once("tensor", range(1, self._tensors))

    @property
    def in_any_order(self) -> Options:
        """Likewise, and the later tensors may get the configuration that costs less."""
        return self._once("any", range(1, self._tensors))

    def _once(self, name: str, boundaries: Sequence[int]) -> Options:
        if name not in self._found:
            self._found[name] = self._in_two(boundaries, in_order=name != "any")
        return self._found[name]

    def _in_two(self, boundaries: Sequence[int], *, in_order: bool = True) -> Options:
        whole = self._sums[:, -1]  # (3, m)
        totals = [whole]
        runs: list[tuple[Run, ...]] = [(Run(c, self._tensors),) for c in self._allowed.tolist()]
        if len(boundaries):
            before = self._sums[:, list(boundaries)]  # (3, boundaries, m)
            mixed = before[:, :, :, None] + (whole[:, None, :] - before)[:, :, None, :]  # (3, boundaries, first, rest)
            # in order: of two, the first layers get the one that costs less
            rank = np.argsort(np.argsort(whole[COST], kind="stable"))
            is_pair = rank[:, None] < rank[None, :] if in_order else rank[:, None] != rank[None, :]
            index, first, rest = np.nonzero(np.broadcast_to(is_pair, mixed.shape[1:]))
            found = mixed[:, index, first, rest]
            kept = undominated(found)
            totals.append(found[:, kept])
            ends = np.asarray(boundaries)[index[kept]].tolist()
            firsts, rests = self._allowed[first[kept]].tolist(), self._allowed[rest[kept]].tolist()
            runs += [(Run(a, n), Run(b, self._tensors - n)) for a, b, n in zip(firsts, rests, ends)]
        return _best(np.concatenate(totals, axis=1), runs)

    @property
    def in_three(self) -> Options:
        """Up to three configurations, each for a run of layers, those that cost least first."""
        if "three" not in self._found:
            self._found["three"] = self._in_three()
        return self._found["three"]

    def _in_three(self) -> Options:
        by_layer = self.by_layer
        ends = self._layer_ends[:: -(-len(self._layer_ends) // _BOUNDARIES) or 1]
        triples = list(combinations(np.argsort(self._sums[COST, -1], kind="stable").tolist(), 3))
        if len(ends) < 2 or not triples:
            return by_layer
        bounds = np.array(list(combinations(ends, 2)))  # (pairs, 2)
        a, b, c = np.array(triples).T[:, :, None]  # (triples, 1) each
        first, second = bounds.T  # (pairs,)
        sums = self._sums
        totals = sums[:, first, a] + sums[:, second, b] - sums[:, first, b] + sums[:, -1, c] - sums[:, second, c]
        totals = totals.reshape(3, -1)  # (3, triples * pairs)
        kept = undominated(totals)
        runs = list(by_layer.runs)
        for triple, pair in zip(*np.unravel_index(kept, (len(triples), len(bounds)))):
            start, end = bounds[pair].tolist()
            lengths = start, end - start, self._tensors - end
            runs.append(tuple(Run(int(self._allowed[i]), n) for i, n in zip(triples[triple], lengths)))
        return _best(np.concatenate([by_layer.totals, totals[:, kept]], axis=1), runs)


@dataclass(frozen=True)
class Target:
    """What an assignment should reach."""

    least: float
    """The least cost of any assignment within the budgets."""
    tolerance: float
    """Assignments whose costs differ by less are a tie."""
    error: float
    """The standard error of the cost, at least the tolerance: what may be given up where no tie is simple."""
    memory: float
    """Budget in bytes; infinite for no ceiling."""
    time: float
    """Budget of the sum over tensors."""
    spare: bool
    """Memory is not what limits the cost: of a tie, take the assignment with the fewest bytes."""
    both: bool = False
    """Both budgets limit the cost, so a group may need three configurations."""


def simplest(groups: Sequence[Group], target: Target) -> tuple[list[tuple[Run, ...]], float] | None:
    """Return the simplest assignment whose cost is within a tolerance of the least.

    Args:
        groups: of tensors.
        target: budgets, the least cost and what may be given up.

    Returns:
        Runs of tensors per group, and the cost. ``None`` if no assignment of these kinds is within the budgets.
    """
    budgets = target.memory, target.time
    uniform = [group.uniform for group in groups]
    found = _search(uniform, target.least + target.tolerance, *budgets, aim=MEMORY)
    if found is not None:
        return found
    within_error = target.least + target.error
    tried: list[tuple[Sequence[Options], tuple[list[tuple[Run, ...]], float]]] = []
    best = np.inf
    for is_last_resort, options in _families(groups, uniform, target):
        if is_last_resort and best <= within_error + _EPSILON:
            break  # two configurations are as good as anyone can tell
        found = _search(options, best, *budgets, aim=COST)  # what costs more is neither simpler nor better
        if found is not None:
            tried.append((options, found))
            best = min(best, found[1])
            if found[1] <= target.least + target.tolerance + _EPSILON:
                break  # the ones to come are not simpler
    if not tried:
        return None
    # where the best is no tie with the least, simpler ones may be a tie with the best
    most = max(target.least + target.tolerance, min(best + target.tolerance, max(best, within_error)))
    options, found = next(each for each in tried if each[1][1] <= most + _EPSILON)
    if not target.spare:  # memory is worth spending on the groups that were cut, and only there
        options = [_only(each, runs) for each, runs in zip(options, found[0])]
    return _search(options, most, *budgets, aim=MEMORY) or found


def _only(options: Options, runs: tuple[Run, ...]) -> Options:
    """Leave a group that was cut as it is; others may have any one configuration."""
    kept = [i for i, each in enumerate(options.runs) if (each == runs if len(runs) > 1 else len(each) == 1)]
    return Options(options.totals[:, kept], tuple(options.runs[i] for i in kept))


def _families(
    groups: Sequence[Group], uniform: Sequence[Options], target: Target
) -> Iterator[tuple[bool, Sequence[Options]]]:
    """Kinds of assignments, the simpler ones first, and whether each is a last resort."""
    yield False, uniform
    for options in _in_two(groups, uniform):
        yield False, options
    if target.both:
        for options in _in_three(groups, uniform):
            yield True, options


def _in_two(groups: Sequence[Group], uniform: Sequence[Options]) -> Iterator[list[Options]]:
    """Options with at most two configurations per group, the simpler ones first."""
    for kind in ("by_layer", "by_tensor"):
        for index, group in enumerate(groups):
            yield [*uniform[:index], getattr(group, kind), *uniform[index + 1 :]]
    yield [group.by_layer for group in groups]
    yield [group.by_tensor for group in groups]
    yield [group.in_any_order for group in groups]


def _in_three(groups: Sequence[Group], uniform: Sequence[Options]) -> Iterator[list[Options]]:
    """Options with at most three configurations per group."""
    for index, group in enumerate(groups):
        yield [*uniform[:index], group.in_three, *uniform[index + 1 :]]
    yield [group.in_three for group in groups]


def _search(
    options: Sequence[Options], cost: float, memory: float, time: float, *, aim: int
) -> tuple[list[tuple[Run, ...]], float] | None:
    """Enumerate one option per group, leaving out what cannot end within the limits.

    Args:
        options: of every group.
        cost: at most.
        memory: at most.
        time: at most.
        aim: COST or MEMORY, to minimize; of equals, the cheaper and then the smaller.

    Returns:
        The runs and their cost, or ``None`` if nothing is within the limits.
    """
    limits = np.array([cost, memory, time]) + _EPSILON
    order = sorted(range(len(options)), key=lambda index: len(options[index].runs))
    rest = np.sum([each.totals.min(axis=1) for each in options], axis=0)  # (3,): what the groups to come add at least
    sums = np.zeros((3, 1))
    chosen: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []  # per group: option, and where its partial sum stood
    for index in order:
        mine = options[index].totals
        rest = rest - mine.min(axis=1)
        if sums.shape[1] * mine.shape[1] > _MOST:
            return None
        room = (limits - rest)[:, None] - sums  # (3, partial sums)
        fits = mine[COST] <= room[COST][:, None]  # (partial sums, options)
        fits &= mine[MEMORY] <= room[MEMORY][:, None]
        fits &= mine[TIME] <= room[TIME][:, None]
        parent, option = np.nonzero(fits)
        if not len(parent):
            return None
        sums = sums[:, parent] + mine[:, option]
        if len(parent) > _MANY and index != order[-1]:
            kept = undominated(sums)
            sums, parent, option = sums[:, kept], parent[kept], option[kept]
        chosen.append((option, parent))
    other = MEMORY if aim == COST else COST
    place = int(np.lexsort((sums[TIME], sums[other], sums[aim]))[0])
    total = float(sums[COST, place])
    runs: list[tuple[Run, ...]] = [()] * len(options)
    for index, (option, parent) in zip(reversed(order), reversed(chosen)):
        runs[index] = options[index].runs[option[place]]
        place = int(parent[place])
    return runs, total


def _useful(weights: Floats) -> NDArray[np.intp]:
    """Return the configurations that are allowed for all tensors, and that no other one beats for every tensor."""
    allowed = np.flatnonzero(np.isfinite(weights[COST]).all(axis=0))
    rows = np.unique(weights[:, :, allowed].transpose(1, 0, 2), axis=0)  # (kinds of tensors, 3, m)
    no_worse = (rows[:, :, :, None] <= rows[:, :, None, :]).all(axis=(0, 1))  # (m, m): the first against the second
    earlier = np.arange(len(allowed))[:, None] < np.arange(len(allowed))[None, :]
    beats = no_worse & (~no_worse.T | earlier)  # of equal ones the first stays
    useful: NDArray[np.intp] = allowed[~beats.any(axis=0)]
    return useful


def _best(totals: Floats, runs: Sequence[tuple[Run, ...]]) -> Options:
    kept = undominated(totals)
    return Options(totals[:, kept], tuple(runs[i] for i in kept))


def undominated(totals: Floats) -> NDArray[np.intp]:
    """Return which columns no other one equals or beats in everything; of equal ones the first.

    Args:
        totals: (3, columns).

    Example:
        >>> undominated(np.array([[0.0, 1.0, 1.0], [9.0, 5.0, 6.0], [1.0, 1.0, 1.0]])).tolist()
        [0, 1]
    """
    order = np.lexsort((totals[TIME], totals[COST], totals[MEMORY])).tolist()
    cost_of, time_of = totals[COST].tolist(), totals[TIME].tolist()
    costs: list[float] = []  # of the columns so far that none beats in cost and time: rising, while times fall
    times: list[float] = []
    kept = []
    for column in order:
        cost, time = cost_of[column], time_of[column]
        at = bisect.bisect_right(costs, cost)
        if at and times[at - 1] <= time:
            continue
        kept.append(column)
        start = at - 1 if at and costs[at - 1] == cost else at
        end = at
        while end < len(times) and times[end] >= time:
            end += 1
        costs[start:end], times[start:end] = [cost], [time]
    return np.array(sorted(kept), dtype=np.intp)
