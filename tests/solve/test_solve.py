"""`baoc.solve` against brute force, against HiGHS, and against its own promises."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import baoc.solve
from baoc.solve import Infeasible, Problem, Solution, core, frontier, smallest_memory, smallest_time, solve, solver
from tests.solve.instances import BINDING, SLACK, highs, instance

TIME_STEP = 1e-9


def everything(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cost, memory and mean time of every assignment there is."""
    cost, memory, time = np.zeros(1), np.zeros(1, dtype=np.int64), np.zeros(1)
    for block in range(problem.blocks):
        cost = (cost[:, None] + problem.cost[block]).ravel()
        memory = (memory[:, None] + problem.memory[block]).ravel()
        time = (time[:, None] + problem.time[block]).ravel()
    allowed = np.isfinite(cost)
    return cost[allowed], memory[allowed], time[allowed] / problem.blocks


def within(problem: Problem, memory: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    in_memory = memory <= (np.inf if problem.memory_budget is None else problem.memory_budget)
    in_time = time <= (np.inf if problem.time_budget is None else problem.time_budget + TIME_STEP / 2)
    return in_memory, in_time


def check_by_brute_force(problem: Problem) -> bool:
    """Whether the problem is feasible, after asserting that every answer is right."""
    cost, memory, time = everything(problem)
    in_memory, in_time = within(problem, memory, time)
    feasible = in_memory & in_time
    if feasible.any():
        solution = solve(problem)
        check_solution(problem, solution)
        assert solution.optimal
        assert solution.objective == pytest.approx(cost[feasible].min(), rel=1e-12, abs=1e-12 * np.abs(cost).max())
        return True
    with pytest.raises(Infeasible) as caught:
        solve(problem)
    assert caught.value.time_alone == in_time.any()
    assert caught.value.memory_alone == in_memory.any()
    if in_time.any():
        assert caught.value.smallest_memory == memory[in_time].min()
    if in_memory.any():
        assert caught.value.smallest_time == pytest.approx(time[in_memory].min(), abs=TIME_STEP)
    return False


def check_solution(problem: Problem, solution: Solution) -> None:
    """A solution is what it says it is, and within the budgets."""
    blocks = np.arange(problem.blocks)
    assert solution.choice.shape == (problem.blocks,)
    assert np.isfinite(problem.cost[blocks, solution.choice]).all()
    assert solution.objective == pytest.approx(problem.cost[blocks, solution.choice].sum(), rel=1e-12, abs=1e-12)
    assert solution.memory_used == sum(int(problem.memory[i, c]) for i, c in enumerate(solution.choice))
    assert solution.time_used == pytest.approx(problem.time[blocks, solution.choice].mean())
    assert problem.memory_budget is None or solution.memory_used <= problem.memory_budget
    assert problem.time_budget is None or solution.time_used <= problem.time_budget + TIME_STEP
    assert solution.bound <= solution.objective
    assert solution.memory_price >= 0
    assert solution.time_price >= 0


def ties(random: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Few values, so that a great many assignments cost the same and budgets are met exactly."""
    return random.integers(-2, 4, shape) / 10, random.integers(0, 6, shape), random.integers(5, 9, shape) / 10


def anything(random: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return random.normal(size=shape), random.integers(0, 10**11, shape), random.uniform(0.5, 1.6, shape)


def all_scales(random: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cost = np.exp(random.uniform(-15, 7, shape)) * random.choice([-1, 1], shape)
    return cost, np.exp(random.uniform(0, 25, shape)).astype(np.int64), random.uniform(0.5, 1.6, shape)


def last_bytes(random: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A few bytes among 1e11, each of them worth a lot."""
    return random.uniform(0, 3, shape), 10**11 + random.integers(0, 5, shape), random.uniform(0.5, 1.6, shape)


def equal_blocks(random: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What prior risks look like: blocks differ in size only, and some not even in that."""
    sizes = random.choice([100, 1000, 12345], shape[0])
    cost, time = np.round(random.uniform(0, 3, shape[1]), 2), np.round(random.uniform(0.5, 1.6, shape[1]), 1)
    return np.tile(cost, (shape[0], 1)), sizes[:, None] * random.integers(0, 9, shape[1]), np.tile(time, (shape[0], 1))


def cost_follows_memory(
    random: np.random.Generator, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Strongly correlated: the hard case of knapsacks."""
    memory = random.integers(1, 1000, shape)
    return 3 - memory / 400, memory, 1 + memory * random.choice([-0.0003, 0.0003], shape)


FAMILIES = [ties, anything, all_scales, last_bytes, equal_blocks, cost_follows_memory]


def small_problem(family, seed: int) -> Problem:
    random = np.random.default_rng(seed)
    shape = int(random.integers(1, 7)), int(random.integers(1, 6))
    cost, memory, time = family(random, shape)
    forbidden = random.random(shape) < 0.15
    forbidden[np.arange(shape[0]), random.integers(0, shape[1], shape[0])] = False
    cost = np.where(forbidden, np.inf, cost)
    # Budgets that some assignment just meets, or just misses.
    choice = [random.choice(np.flatnonzero(np.isfinite(row))) for row in cost]
    used = sum(int(memory[i, c]) for i, c in enumerate(choice)) + int(random.integers(-2, 2))
    spent = time[np.arange(shape[0]), choice].mean() - random.choice([0, 0, 0.05])
    memory_budget, time_budget = [(used, spent), (used, None), (None, spent), (used, spent)][seed % 4]
    return Problem(cost, memory, time, memory_budget, time_budget)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_brute_force(family):
    feasible = [check_by_brute_force(small_problem(family, seed)) for seed in range(200)]
    assert 20 < sum(feasible) < 200


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_brute_force_with_hardly_any_room(family, monkeypatch):
    """Widening, leaving out, slicing and dropping states must not change an answer: here they happen all the time."""
    for module, name, value in [
        (core, "FRONT", 0),
        (core, "SLICES", 2),
        (core, "CHUNK", 3),
        (core, "FACTORS", ()),
        (solver, "FIRST_ENTRIES", 1),
        (solver, "FIRST_WIDTH", 1),
        (solver, "GROWTH", 2),
        (solver, "NEAR", 2),
    ]:
        monkeypatch.setattr(module, name, value)
    for seed in range(1000, 1150):
        check_by_brute_force(small_problem(family, seed))


@pytest.mark.parametrize("time_budget", [SLACK, BINDING])
@pytest.mark.parametrize(("blocks", "seed"), [(12, 0), (12, 1), (12, 2), (40, 0), (40, 1), (100, 0)])
def test_agrees_with_highs(blocks, seed, time_budget):
    problem = instance(blocks, 21, time_budget, seed)
    solution, judgement = solve(problem), highs(problem)
    check_solution(problem, solution)
    assert judgement.optimal
    assert solution.optimal
    assert solution.objective == pytest.approx(judgement.objective, rel=1e-8)


@pytest.mark.parametrize(("blocks", "gap"), [(1_000, 0.0), (5_000, 1e-6), (20_000, 1e-6)])
@pytest.mark.parametrize("time_budget", [SLACK, BINDING])
def test_large_problems_are_proven(blocks, gap, time_budget):
    problem = instance(blocks, 21, time_budget)
    solution = solve(problem, relative_gap=gap)
    check_solution(problem, solution)
    assert solution.relative_gap <= gap


@pytest.mark.parametrize("time_budget", [SLACK, BINDING])
def test_prices_are_those_of_the_linear_relaxation(time_budget):
    problem = instance(60, 21, time_budget, seed=3)
    solution = solve(problem)
    priced = problem.cost + solution.memory_price * problem.memory + solution.time_price * problem.time / problem.blocks
    spent = solution.memory_price * problem.memory_budget + solution.time_price * problem.time_budget
    relaxed = highs(problem, relaxed=True).objective
    assert priced.min(axis=1).sum() - spent == pytest.approx(relaxed, rel=1e-8)
    assert (solution.time_price > 0) == (time_budget == BINDING)
    # An extra byte is worth its price, up to what the relaxation's curvature takes back.
    more = replace(problem, memory_budget=problem.memory_budget + 1000)
    assert relaxed - highs(more, relaxed=True).objective == pytest.approx(1000 * solution.memory_price, rel=1e-2)


def test_prices_of_budgets_that_do_not_bind_are_zero():
    solution = solve(Problem([[0, 1]] * 3, [[8, 4]] * 3, [[1, 2]] * 3, memory_budget=24, time_budget=1))
    assert (solution.memory_price, solution.time_price, solution.objective) == (0, 0, 0)


def test_memory_is_kept_to_the_byte():
    """Two blocks of half a terabyte; one byte decides."""
    size = 5 * 10**11
    problem = Problem([[0, 1], [0, 1]], [[size, size - 1], [size, size - 1]], [[1, 1], [1, 1]])
    used = {b: solve(replace(problem, memory_budget=2 * size - b)) for b in (0, 1, 2)}
    assert [(s.objective, s.memory_used - 2 * size) for s in used.values()] == [(0, 0), (1, -1), (2, -2)]
    with pytest.raises(Infeasible):
        solve(replace(problem, memory_budget=2 * size - 3))


def test_time_budgets_are_decimal():
    """In binary, 1.2 + 1.4 is more than 2 * 1.3 and three times 0.1 is more than 0.3."""
    assert solve(Problem([[0]] * 2, [[1]] * 2, [[1.2], [1.4]], time_budget=1.3)).objective == 0
    assert solve(Problem([[0]] * 3, [[1]] * 3, [[0.1]] * 3, time_budget=0.1)).objective == 0
    with pytest.raises(Infeasible):
        solve(Problem([[0]] * 2, [[1]] * 2, [[1.2], [1.4]], time_budget=1.299999998))


def test_equal_costs_are_equal():
    """0.1 + 0.2 costs what 0.3 does. So less memory decides, not the 17th digit."""
    assert solve(Problem([[0.3, 0.1 + 0.2]], [[5, 4]], [[1, 1]])).choice.tolist() == [1]


@pytest.mark.parametrize("budget", [4, 6, 8, 11, None])
def test_of_equal_entries_the_first_is_chosen(budget):
    problem = Problem([[3, 0, 3, 0, 1]] * 4, [[1, 8, 1, 8, 2]] * 4, [[1, 1, 1, 1, 1]] * 4, budget)
    choice = solve(problem).choice
    assert not set(choice.tolist()) & {2, 3}
    assert (np.diff(choice) >= 0).all()  # and equal blocks get configurations in order


@pytest.mark.parametrize("family", [ties, equal_blocks])
def test_no_entry_is_chosen_that_another_one_beats(family):
    for seed in range(300):
        problem = replace(small_problem(family, seed), time_budget=None)
        try:
            choice = solve(problem).choice
        except Infeasible:
            continue
        entries = np.stack([problem.cost, problem.memory, problem.time])  # (3, blocks, configurations)
        chosen = entries[:, np.arange(problem.blocks), choice, None]
        no_worse, equal = (entries <= chosen).all(axis=0), (entries == chosen).all(axis=0)
        assert (no_worse == equal).all()
        assert (equal.argmax(axis=1) == choice).all()


@pytest.mark.parametrize("times", [1, 8, 10**6])
def test_states_are_only_dropped_for_better_ones(times):
    random = np.random.default_rng(times)
    states = np.stack([random.integers(0, 300, 800), random.integers(0, 300, 800), random.integers(0, times, 800)])
    kept = core.pareto_front(states.astype(float))
    no_worse = (states[:, kept, None] <= states[:, None, :]).all(axis=0)  # [kept, all]
    assert no_worse.any(axis=0).all()
    assert len(kept) < 500
    if times <= 8:  # as many slices as times: nothing is missed
        assert (no_worse[:, kept] == np.eye(len(kept), dtype=bool)).all()


def test_the_same_arrays_give_the_same_choice():
    problem = instance(100, 21, BINDING)
    choices = [solve(replace(problem)).choice for _ in range(3)]
    assert all((choice == choices[0]).all() for choice in choices)


def test_the_order_of_blocks_does_not_change_the_cost():
    problem = instance(50, 21, BINDING)
    order = np.random.default_rng(0).permutation(50)
    shuffled = replace(problem, cost=problem.cost[order], memory=problem.memory[order], time=problem.time[order])
    assert solve(shuffled).objective == pytest.approx(solve(problem).objective, rel=1e-13)


@pytest.mark.parametrize(
    "limit", [{"most_states": 1}, {"most_states": 3000}, {"time_limit": 0.0}, {"relative_gap": 0.01}]
)
def test_what_is_cut_short_is_within_its_bound(limit):
    problem = instance(200, 21, BINDING)
    best, solution = solve(problem), solve(problem, **limit)
    check_solution(problem, solution)
    assert best.optimal
    assert solution.bound <= best.objective * (1 + 1e-12)
    assert best.objective <= solution.objective * (1 + 1e-12)
    assert solution.relative_gap <= limit.get("relative_gap", np.inf)
    assert solution.gap == pytest.approx(solution.objective - solution.bound)


@pytest.mark.parametrize("time_budget", [SLACK, BINDING, None])
def test_frontier_is_what_solve_gives(time_budget):
    problem = replace(instance(30, 21, time_budget), memory_budget=None)
    smallest = smallest_memory(problem)
    budgets = [None, *np.linspace(4 * smallest + 10**9, smallest, 15).astype(int).tolist(), smallest]
    solutions = frontier(problem, budgets)
    for budget, solution in zip(budgets, solutions):
        alone = replace(problem, memory_budget=budget)
        check_solution(alone, solution)
        assert solution.optimal
        assert solution.objective == pytest.approx(solve(alone).objective, rel=1e-13)
    objectives = [solution.objective for solution in solutions]
    assert objectives == sorted(objectives)
    assert frontier(problem, []) == []
    with pytest.raises(Infeasible) as caught:
        frontier(problem, [*budgets, smallest - 1])
    assert caught.value.smallest_memory == smallest


def test_the_smallest_budgets_can_be_kept_and_are_the_smallest():
    problem = instance(40, 21, BINDING)
    least = smallest_memory(problem)
    assert solve(replace(problem, memory_budget=least)).memory_used == least
    with pytest.raises(Infeasible, match=f"the smallest memory for a mean time of 0.8 is {least} bytes") as caught:
        solve(replace(problem, memory_budget=least - 1))
    assert caught.value.memory_alone
    assert caught.value.time_alone

    fastest = smallest_time(problem)
    assert solve(replace(problem, time_budget=fastest)).time_used == pytest.approx(fastest, abs=TIME_STEP)
    with pytest.raises(Infeasible, match=f"the smallest mean time in {problem.memory_budget} bytes is {fastest:.9g}"):
        solve(replace(problem, time_budget=fastest - 2 * TIME_STEP))


def test_a_budget_that_nothing_keeps_is_named():
    problem = Problem([[0, 1]], [[8, 4]], [[1, 2]])
    with pytest.raises(Infeasible, match="the smallest memory is 4 bytes; no time is enough in 3 bytes") as caught:
        solve(replace(problem, memory_budget=3))
    assert (caught.value.memory_alone, caught.value.time_alone) == (False, True)
    with pytest.raises(
        Infeasible, match=r"no memory is enough for a mean time of 0\.5; the smallest mean time is 1"
    ) as caught:
        solve(replace(problem, time_budget=0.5))
    assert (caught.value.memory_alone, caught.value.time_alone) == (True, False)
    with pytest.raises(
        Infeasible, match=r"the smallest memory for a mean time of 1 is 8 bytes; .* in 4 bytes is 2"
    ) as caught:
        solve(replace(problem, memory_budget=4, time_budget=1))
    assert (caught.value.memory_alone, caught.value.time_alone) == (True, True)


GOOD = {"cost": [[0, 1], [0, 1]], "memory": [[2, 1], [2, 1]], "time": [[1, 1], [1, 1]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost": [0, 1]}, r"cost has shape \(2,\)"),
        ({"cost": np.zeros((0, 3))}, r"cost has shape \(0, 3\)"),
        ({"cost": [[0, 1], [np.nan, 1]]}, "cost of block 1, configuration 0 is nan"),
        ({"cost": [[0, 1], [0, -np.inf]]}, "cost of block 1, configuration 1 is -inf"),
        ({"cost": [[0, 1], [np.inf, np.inf]]}, "block 1 has no configuration left"),
        ({"memory": [[2, 1]]}, r"memory has shape \(1, 2\), but cost has shape \(2, 2\)"),
        ({"memory": [[2, 1], [2.5, 1]]}, "memory of block 1, configuration 0 is 2.5; it must be whole bytes"),
        ({"memory": [[2, -1], [2, 1]]}, "memory of block 0, configuration 1 is -1.0"),
        ({"memory": [[2, 1], [2**53, 1]]}, "below 2\\*\\*53"),
        ({"time": [[1, 1], [1, np.nan]]}, "time of block 1, configuration 1 is nan"),
        ({"time": [[1, 1], [1, -1]]}, "time of block 1, configuration 1 is -1"),
        ({"time_budget": np.nan}, "time_budget is NaN"),
        ({"memory_budget": np.nan}, "memory_budget is NaN"),
    ],
)
def test_problems_check_themselves(change, message):
    with pytest.raises(ValueError, match=message):
        Problem(**{**GOOD, **change})


def test_what_stands_in_a_forbidden_entry_does_not_matter():
    problem = Problem([[0, np.inf]], [[2, -7]], [[1, np.nan]], memory_budget=np.inf, time_budget=np.inf)
    assert solve(problem).choice.tolist() == [0]
    assert (problem.memory_budget, problem.time_budget) == (None, None)


def test_problems_keep_their_own_arrays():
    cost = np.array([[0.0, 1.0]])
    problem = Problem(cost, [[2, 1]], [[1, 1]])
    cost[0, 0] = 5
    assert problem.cost[0, 0] == 0
    for array in (problem.cost, problem.memory, problem.time, solve(problem).choice):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_it_knows_nothing_of_torch():
    names = set()
    for path in Path(baoc.solve.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(".".join((node.module or "").split(".")[:2]))
    allowed = {"numpy", "numpy.typing", "baoc.solve", "__future__", "collections.abc"}
    assert names <= allowed | {"dataclasses", "math", "time", "typing"}
