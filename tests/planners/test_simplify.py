"""Simple assignments near the optimum, against enumeration of all assignments of small problems."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

from baoc.planners.simplify import COST, MEMORY, TIME, Group, Run, Target, simplest, undominated

SEEDS = range(80)


class Case:
    """A random problem of two groups, with all its assignments."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        configurations = int(rng.integers(2, 4))
        sizes = rng.integers(1, 5, size=2)
        self.weights = []  # per group: (3, tensors, configurations)
        for tensors in sizes.tolist():
            numel = rng.integers(1, 4, size=(tensors, 1))
            per_element = rng.random((3, 1, configurations)) * [[[3.0]], [[40.0]], [[1.0]]]
            weights = per_element * numel
            weights[MEMORY] = np.rint(weights[MEMORY])
            self.weights.append(weights)
        if configurations > 2 and rng.random() < 0.3:
            self.weights[0][COST, :, 0] = np.inf  # forbidden
        self.groups = [Group(w, [str(i) for i in range(w.shape[1])]) for w in self.weights]
        per_group = [list(itertools.product(range(configurations), repeat=w.shape[1])) for w in self.weights]
        self.totals = functools.cache(self._totals)
        self.assignments = [each for each in itertools.product(*per_group) if math.isfinite(self.totals(each)[COST])]
        totals = [self.totals(each) for each in self.assignments]
        fits_exactly = totals[int(rng.integers(len(totals)))]  # so that something fits
        self.memory = float(fits_exactly[MEMORY])
        self.time = math.inf if rng.random() < 0.4 else float(fits_exactly[TIME])
        self.tolerance = float(rng.choice([0.0, 0.1, 0.5]))
        self.error = self.tolerance + float(rng.choice([0.0, 0.5, 3.0]))
        self.both = math.isfinite(self.time)
        self.fitting = [each for each in self.assignments if self.fits(each)]
        self.least = min(self.totals(each)[COST] for each in self.fitting)
        least_of_all = min(total[COST] for total in totals if total[TIME] <= self.time + 1e-9)
        self.spare = self.least <= least_of_all + self.tolerance

    def _totals(self, assignment: tuple[tuple[int, ...], ...]) -> np.ndarray:
        parts = [w[:, np.arange(w.shape[1]), list(mine)].sum(axis=1) for w, mine in zip(self.weights, assignment)]
        return np.sum(parts, axis=0)

    def fits(self, assignment: tuple[tuple[int, ...], ...]) -> bool:
        total = self.totals(assignment)
        return bool(total[MEMORY] <= self.memory and total[TIME] <= self.time + 1e-9)

    def solve(self) -> tuple[list[tuple[Run, ...]], float] | None:
        target = Target(self.least, self.tolerance, self.error, self.memory, self.time, self.spare, self.both)
        return simplest(self.groups, target)


def expanded(runs: list[tuple[Run, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(run.configuration for run in mine for _ in range(run.tensors)) for mine in runs)


def cuts(mine: tuple[int, ...]) -> int:
    return sum(a != b for a, b in itertools.pairwise(mine))


case_of = functools.cache(Case)


@pytest.fixture(params=SEEDS)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def in_two_runs(case: Case) -> list[float]:
    """Costs of the assignments that fit and cut no group more than once."""
    return [case.totals(each)[COST] for each in case.fitting if all(cuts(mine) <= 1 for mine in each)]


def test_what_is_found_fits_and_gives_up_no_more_than_the_error_or_than_it_must(case: Case) -> None:
    found = case.solve()
    if found is None:
        assert not in_two_runs(case)
        return
    assignment, cost = expanded(found[0]), found[1]
    assert case.fits(assignment)
    assert case.totals(assignment)[COST] == pytest.approx(cost)
    best = min(in_two_runs(case), default=math.inf)
    assert cost <= max(case.least + case.tolerance, best + case.tolerance) + 1e-6
    assert cost <= max(case.least + case.error, best) + 1e-6
    assert all(cuts(mine) <= (2 if case.both else 1) for mine in assignment), "runs are contiguous"


def test_a_uniform_assignment_within_the_tolerance_wins_and_no_other_has_fewer_bytes(case: Case) -> None:
    uniform = [
        each
        for each in case.fitting
        if not any(map(cuts, each)) and case.totals(each)[COST] <= case.least + case.tolerance
    ]
    if uniform:
        found = case.solve()
        assert found is not None
        assignment = expanded(found[0])
        assert not any(map(cuts, assignment))
        assert case.totals(assignment)[MEMORY] == min(case.totals(each)[MEMORY] for each in uniform)


def test_a_cut_is_made_only_where_no_uniform_assignment_is_as_good(case: Case) -> None:
    found = case.solve()
    if found is not None and any(map(cuts, expanded(found[0]))):
        uniform = [case.totals(each)[COST] for each in case.fitting if not any(map(cuts, each))]
        assert min(uniform, default=math.inf) > case.least + case.tolerance


def test_the_random_problems_have_every_outcome() -> None:
    """The tests above would pass if nothing was ever found, or nothing ever cut."""
    found = [each.solve() for each in map(case_of, SEEDS)]
    most = [max(map(cuts, expanded(each[0]))) for each in found if each is not None]
    assert None in found and {0, 1} <= set(most)


def test_of_equal_layers_the_first_get_what_costs_less() -> None:
    weights = np.zeros((3, 6, 2))
    weights[COST] = [0.0, 1.0]
    weights[MEMORY] = [2.0, 1.0]
    group = Group(weights, ["0", "0", "1", "1", "2", "2"])
    target = Target(least=2.0, tolerance=0.1, error=0.1, memory=10, time=math.inf, spare=False)
    assert simplest([group], target) == ([(Run(0, 4), Run(1, 2))], 2.0)


def test_the_boundary_is_within_a_layer_only_where_layers_are_too_coarse() -> None:
    weights = np.zeros((3, 4, 2))
    weights[COST] = [0.0, 1.0]
    weights[MEMORY] = [2.0, 1.0]
    group = Group(weights, ["0", "0", "1", "1"])

    def boundary(memory: int, tolerance: float) -> int:
        least = float(8 - memory)
        found = simplest([group], Target(least, tolerance, tolerance, memory, math.inf, False))
        assert found is not None
        return found[0][0][0].tensors

    assert boundary(7, tolerance=0.0) == 3
    assert boundary(7, tolerance=1.0) == 2


def test_a_large_later_tensor_may_have_the_better_configuration() -> None:
    """Two convolutions, the first of which is tiny: its bytes do not pay for the second."""
    weights = np.zeros((3, 2, 2))
    weights[COST] = [[0.0, 0.1], [0.0, 10.0]]
    weights[MEMORY] = [[1.0, 0.0], [100.0, 0.0]]
    target = Target(least=0.1, tolerance=0.05, error=0.05, memory=100, time=math.inf, spare=False)
    assert simplest([Group(weights, ["0", "1"])], target) == ([(Run(1, 1), Run(0, 1))], 0.1)


def test_three_configurations_only_where_both_budgets_bind_and_two_cost_more_than_the_error() -> None:
    """A group of six layers has time for two updates of the first configuration and room for two of the second."""
    weights = np.zeros((3, 6, 3))
    weights[COST] = [0.0, 1.0, 3.0]
    weights[MEMORY] = [0.0, 1.0, 0.0]
    weights[TIME] = [1.0, 0.0, 0.0]
    group = Group(weights, [str(layer) for layer in range(6)])
    target = Target(least=8.0, tolerance=0.1, error=0.1, memory=2, time=2.0, spare=False, both=True)
    assert simplest([group], target) == ([(Run(0, 2), Run(1, 2), Run(2, 2))], 8.0)
    for other in ({"both": False}, {"error": 4.0}):  # one budget binds, or no measurement could tell
        assert simplest([group], dataclasses.replace(target, **other)) == ([(Run(0, 2), Run(2, 4))], 12.0)


@pytest.mark.parametrize("seed", range(30))
def test_undominated_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    totals = rng.integers(0, 5, size=(3, int(rng.integers(1, 60)))).astype(float)
    columns = range(totals.shape[1])
    expected = [
        j
        for j in columns
        if not any(
            (totals[:, i] <= totals[:, j]).all() and ((totals[:, i] < totals[:, j]).any() or i < j)
            for i in columns
            if i != j
        )
    ]
    assert undominated(totals).tolist() == expected
