"""The class problem against brute force, against HiGHS, and against `solve` with one block per tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from baoc.solve import (
    ClassProblem,
    ClassSolution,
    Infeasible,
    Problem,
    class_core,
    class_frontier,
    classes,
    core,
    smallest_class_memory,
    smallest_memory,
    solve,
    solve_classes,
)
from tests.solve.instances import CLASS_SHARES, class_instance, highs
from tests.solve.test_solve import FAMILIES, TIME_STEP, ties


def in_roles(random: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes of a role differ in size only, so many solutions cost nearly the same."""
    sizes = random.choice([2**4, 2**6, 7 * 2**5], shape[0])[:, None]
    roles = random.integers(0, 2, shape[0])
    cost, per_element = np.round(random.uniform(0, 3, (2, shape[1])), 2), random.integers(0, 9, shape[1])
    times = np.round(random.uniform(0.5, 1.6, shape[1]), 1)
    return cost[roles] * sizes, sizes * per_element + random.integers(0, 2, shape), sizes * times


CLASS_FAMILIES = [*FAMILIES, in_roles]


def random_problem(family, seed: int, most_classes: int, most_configurations: int, most_tensors: int) -> ClassProblem:
    """A problem whose budgets some solution just meets, or just misses."""
    random = np.random.default_rng(seed)
    shape = int(random.integers(1, most_classes + 1)), int(random.integers(1, most_configurations + 1))
    cost, memory, time = family(random, shape)
    forbidden = random.random(shape) < 0.15
    forbidden[np.arange(shape[0]), random.integers(0, shape[1], shape[0])] = False
    cost = np.where(forbidden, np.inf, cost)
    counts = np.exp(random.uniform(0, np.log(most_tensors + 1), shape[0])).astype(int)
    met = np.stack([random.multinomial(n, ~f / (~f).sum()) for n, f in zip(counts, forbidden)])
    used = int((met * memory).sum()) + int(random.integers(-2, 2))
    spent = float((met * time).sum()) - random.choice([0, 0, 0.05])
    memory_budget, time_budget = [(used, spent), (used, None), (None, spent), (used, spent)][seed % 4]
    return ClassProblem(counts, cost, memory, time, memory_budget, time_budget)


def expanded(problem: ClassProblem) -> Problem:
    """The same problem with one block per tensor."""
    rows = np.repeat(np.arange(problem.classes), problem.counts)
    mean = None if problem.time_budget is None else problem.time_budget / problem.tensors
    return Problem(problem.cost[rows], problem.memory[rows], problem.time[rows], problem.memory_budget, mean)


def everything(problem: ClassProblem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cost, memory and time of every solution there is."""
    totals = np.zeros((3, 1))
    for row in range(problem.classes):
        allowed = np.isfinite(problem.cost[row])
        entries = np.stack([problem.cost[row], problem.memory[row], problem.time[row]])[:, allowed]
        for _ in range(problem.counts[row]):
            totals = np.unique((totals[:, :, None] + entries[:, None]).reshape(3, -1), axis=1)
    return tuple(totals)


def largest_cost(problem: ClassProblem) -> float:
    return problem.tensors * np.abs(problem.cost[np.isfinite(problem.cost)]).max()


def check_solution(problem: ClassProblem, solution: ClassSolution) -> None:
    """A solution is what it says it is, and within the budgets."""
    counts = solution.counts
    assert counts.shape == problem.cost.shape
    assert (counts >= 0).all()
    assert (counts.sum(axis=1) == problem.counts).all()
    assert not counts[~np.isfinite(problem.cost)].any()
    cost = np.where(counts > 0, problem.cost, 0)
    assert solution.objective == pytest.approx((cost * counts).sum(), rel=1e-12, abs=1e-12)
    assert solution.memory_used == (problem.memory * counts).sum()
    assert solution.time_used == pytest.approx((problem.time * counts).sum())
    assert problem.memory_budget is None or solution.memory_used <= problem.memory_budget
    step = TIME_STEP * max(1, problem.time.max()) * problem.tensors
    assert problem.time_budget is None or solution.time_used <= problem.time_budget + step
    assert solution.bound <= solution.objective
    assert solution.memory_price >= 0
    assert solution.time_price >= 0


def check_by_brute_force(problem: ClassProblem) -> bool:
    """Whether the problem is feasible, after asserting that every answer is right."""
    cost, memory, time = everything(problem)
    step = TIME_STEP * max(1, problem.time.max()) * problem.tensors / 2
    in_memory = memory <= (np.inf if problem.memory_budget is None else problem.memory_budget)
    in_time = time <= (np.inf if problem.time_budget is None else problem.time_budget + step)
    feasible = in_memory & in_time
    if in_time.any():
        assert smallest_class_memory(problem) == memory[in_time].min()
    if feasible.any():
        solution = solve_classes(problem)
        check_solution(problem, solution)
        assert solution.optimal
        assert solution.objective == pytest.approx(cost[feasible].min(), abs=1e-12 * largest_cost(problem))
        return True
    with pytest.raises(Infeasible) as caught:
        solve_classes(problem)
    assert caught.value.time_alone == in_time.any()
    assert caught.value.memory_alone == in_memory.any()
    if in_time.any():
        assert caught.value.smallest_memory == memory[in_time].min()
    if in_memory.any():
        assert caught.value.smallest_time == pytest.approx(time[in_memory].min(), abs=2 * step)
    return False


@pytest.mark.parametrize("family", CLASS_FAMILIES)
def test_equals_brute_force(family):
    feasible = [check_by_brute_force(random_problem(family, seed, 3, 4, 5)) for seed in range(120)]
    assert 20 < sum(feasible) < 120


@pytest.mark.parametrize("family", CLASS_FAMILIES)
def test_equals_brute_force_with_hardly_any_room(family, monkeypatch):
    """Skipping states, intervals and moves must not change an answer: here it happens all the time."""
    for module, name, value in [
        (core, "SLICES", 2),
        (class_core, "FRONT", 0),
        (class_core, "EXPAND", 1),
        (class_core, "CHUNK", 3),
        (class_core, "FACTORS", ()),
        (classes, "NEAR", 1),
        (classes, "FEW", 1),
        (classes, "FIRST_WIDTH", 1),
        (classes, "WIDTH_GROWTH", 2),
    ]:
        monkeypatch.setattr(module, name, value)
    for seed in range(1000, 1060):
        check_by_brute_force(random_problem(family, seed, 3, 4, 4))


@pytest.mark.parametrize("family", CLASS_FAMILIES)
def test_equals_one_block_per_tensor(family):
    for seed in range(30):
        problem = random_problem(family, seed, 6, 8, 8)
        try:
            by_block = solve(expanded(problem))
        except Infeasible as infeasible:
            with pytest.raises(Infeasible) as caught:
                solve_classes(problem)
            assert caught.value.smallest_memory == infeasible.smallest_memory
            continue
        solution = solve_classes(problem)
        check_solution(problem, solution)
        assert solution.objective == pytest.approx(by_block.objective, abs=1e-12 * largest_cost(problem))
        assert smallest_class_memory(problem) == smallest_memory(expanded(problem))


@pytest.mark.parametrize("family", [ties, in_roles])
@pytest.mark.parametrize(("most_classes", "most_tensors"), [(4, 1), (8, 20), (12, 300), (4, 3000)])
def test_agrees_with_highs(family, most_classes, most_tensors):
    binding = 0
    for seed in range(24):
        problem = random_problem(family, seed, most_classes, 10, most_tensors)
        if problem.memory_budget is not None:  # between the least and what the cheapest solution takes
            free = solve_classes(replace(problem, memory_budget=None, time_budget=None)).memory_used
            least = smallest_class_memory(replace(problem, time_budget=None))
            problem = replace(problem, memory_budget=(free + 3 * least) // 4)
        try:
            solution = solve_classes(problem)
        except Infeasible:
            continue
        check_solution(problem, solution)
        judgement = highs(problem)
        assert judgement.optimal
        assert solution.objective == pytest.approx(judgement.objective, rel=1e-7, abs=1e-7)
        assert solution.bound <= judgement.objective + 1e-7 * max(1, abs(judgement.objective))
        assert solution.relative_gap < 1e-3
        binding += solution.memory_price > 0 and solution.time_price > 0
    assert binding or family is ties


@pytest.mark.parametrize("time_budget", [None, 1.0, 0.9])
@pytest.mark.parametrize("share", CLASS_SHARES)
def test_large_models_are_proven(share, time_budget):
    feasible = 0
    for seed in range(4):
        problem = class_instance(share, time_budget, seed)
        try:
            solution = solve_classes(problem)
        except Infeasible:
            assert smallest_class_memory(replace(problem, time_budget=None)) <= problem.memory_budget
            continue
        feasible += 1
        check_solution(problem, solution)
        assert solution.optimal
        assert solution.objective == pytest.approx(highs(problem).objective, rel=1e-8)
    assert feasible


@pytest.mark.parametrize("time_budget", [None, 1.0])
def test_frontier_is_what_solve_classes_gives(time_budget):
    problem = replace(class_instance(1.0, time_budget), memory_budget=None)
    smallest = smallest_class_memory(problem)
    budgets = [None, *np.linspace(3 * smallest, smallest, 12).astype(int).tolist(), smallest]
    solutions = class_frontier(problem, budgets)
    for budget, solution in zip(budgets, solutions):
        alone = replace(problem, memory_budget=budget)
        check_solution(alone, solution)
        assert solution.optimal
        assert solution.objective == pytest.approx(solve_classes(alone).objective, rel=1e-11)
    objectives = [solution.objective for solution in solutions]
    assert objectives == sorted(objectives)
    assert class_frontier(problem, []) == []
    with pytest.raises(Infeasible) as caught:
        class_frontier(problem, [*budgets, smallest - 1])
    assert caught.value.smallest_memory == smallest


def test_prices_are_those_of_the_linear_relaxation():
    problem = class_instance(0.5, 1.0)
    solution = solve_classes(problem)
    priced = problem.cost + solution.memory_price * problem.memory + solution.time_price * problem.time
    spent = solution.memory_price * problem.memory_budget + solution.time_price * problem.time_budget
    relaxed = highs(problem, relaxed=True).objective
    assert problem.counts @ priced.min(axis=1) - spent == pytest.approx(relaxed, rel=1e-7)
    assert solution.memory_price > 0
    assert solution.time_price > 0


def test_equal_arrays_give_equal_counts():
    problem = class_instance(0.25, 1.0)
    found = [solve_classes(replace(problem)).counts for _ in range(3)]
    assert all((counts == found[0]).all() for counts in found)


@pytest.mark.parametrize("most_states", [1, 500, 5000])
def test_what_is_cut_short_is_within_its_bound(most_states, monkeypatch):
    problem = class_instance(0.25, 1.0)
    best = solve_classes(problem)
    monkeypatch.setattr(classes, "MOST_STATES", most_states)
    solution = solve_classes(problem)
    check_solution(problem, solution)
    assert best.optimal
    assert solution.bound <= best.objective * (1 + 1e-12)
    assert best.objective <= solution.objective * (1 + 1e-12)
    assert solution.gap == pytest.approx(solution.objective - solution.bound)


@pytest.mark.parametrize("seed", range(3))
def test_hard_problems_end(seed):
    """All configurations of all classes are equally good value, so no bound tells solutions apart."""
    random = np.random.default_rng(seed)
    counts, memory = random.integers(1, 3000, 60), random.integers(1, 10**8, (60, 20))
    cost, time = 3 - memory / 4e7, random.uniform(0.7, 1.3, (60, 20))
    problem = ClassProblem(counts, cost, memory, time, int(counts @ memory.mean(axis=1)), float(counts.sum()) * 0.95)
    solution = solve_classes(problem)
    check_solution(problem, solution)
    assert solution.relative_gap < 1e-3


def test_memory_is_kept_to_the_byte():
    """Tensors of half a terabyte; one byte decides."""
    size = 5 * 10**11
    problem = ClassProblem([4], [[0, 1]], [[size, size - 1]], [[1, 1]])
    solutions = {missing: solve_classes(replace(problem, memory_budget=4 * size - missing)) for missing in range(5)}
    assert [solution.counts.tolist() for solution in solutions.values()] == [[[4 - m, m]] for m in range(5)]
    with pytest.raises(Infeasible, match=f"the smallest memory is {4 * size - 4} bytes"):
        solve_classes(replace(problem, memory_budget=4 * size - 5))


def test_time_budgets_are_totals():
    problem = ClassProblem([3], [[0, 1]], [[1, 1]], [[0.1, 0.05]])
    assert solve_classes(replace(problem, time_budget=0.3)).counts.tolist() == [[3, 0]]
    assert solve_classes(replace(problem, time_budget=0.25)).counts.tolist() == [[2, 1]]
    with pytest.raises(Infeasible, match=r"for a total time of 0\.1; the smallest total time is 0\.15"):
        solve_classes(replace(problem, time_budget=0.1))


def test_budgets_of_nothing_are_infeasible():
    problem = ClassProblem([2], [[0, 1]], [[8, 4]], [[1, 2]])
    for budget in (-1, 0, 7):
        with pytest.raises(Infeasible) as caught:
            solve_classes(replace(problem, memory_budget=budget))
        assert caught.value.smallest_memory == 8


GOOD = {"counts": [2, 1], "cost": [[0, 1], [0, 1]], "memory": [[2, 1], [2, 1]], "time": [[1, 1], [1, 1]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": [2]}, r"counts has shape \(1,\); it must be \(2,\)"),
        ({"counts": [[2, 1]]}, r"counts has shape \(1, 2\)"),
        ({"counts": [2, 0]}, "counts of class 1 is 0; it must be a whole number of at least 1"),
        ({"counts": [1.5, 1]}, "counts of class 0 is 1.5"),
        ({"counts": [1, np.nan]}, "counts of class 1 is nan"),
        ({"cost": [[0, 1], [np.nan, 1]]}, "cost of class 1, configuration 0 is nan"),
        ({"cost": [[0, 1], [np.inf, np.inf]]}, "class 1 has no configuration left"),
        ({"memory": [[2, 1]]}, r"memory has shape \(1, 2\), but cost has shape \(2, 2\)"),
        ({"memory": [[2**52, 1], [2, 1]]}, "below 2\\*\\*53"),
        ({"time": [[1, 1], [1, -1]]}, "time of class 1, configuration 1 is -1"),
        ({"memory_budget": np.nan}, "memory_budget is NaN"),
    ],
)
def test_problems_check_themselves(change, message):
    with pytest.raises(ValueError, match=message):
        ClassProblem(**{**GOOD, **change})


def test_problems_keep_their_own_arrays():
    counts = np.array([2, 1])
    problem = ClassProblem(**{**GOOD, "counts": counts})
    counts[0] = 5
    assert problem.counts[0] == 2
    for array in (problem.counts, problem.cost, problem.memory, problem.time, solve_classes(problem).counts):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
