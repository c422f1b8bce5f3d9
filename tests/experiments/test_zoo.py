"""The zoo: its tasks can be trained, runs are kept, and verdicts follow their rule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments import zoo
from experiments.commands import main
from experiments.runs import Row, Store
from experiments.zoo import page, running, training
from experiments.zoo.results import GRID, Results, compared
from experiments.zoo.task import Task, fitted, objective
from experiments.zoo.training import REFERENCE, Run

pytest.importorskip("sklearn")  # digits

BUILT_IN = {name: task for name, task in zoo.TASKS.items() if not task.model}


# ---- tasks ----


def test_the_zoo_is_large_and_varied() -> None:
    assert len(BUILT_IN) >= 40
    assert {task.schedule for task in BUILT_IN.values()} == {"constant", "cosine", "one-cycle"}
    assert len({task.kind for task in BUILT_IN.values()}) == 10
    for task in zoo.TASKS.values():
        assert task.about.endswith(".") and len(task.about) < 120, task.name


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_task_is_a_function_of_its_seed_and_trains_all_it_gives_away(name: str) -> None:
    def begun(seed: int) -> tuple[zoo.Problem, list[float]]:
        torch.manual_seed(seed)
        problem = BUILT_IN[name].build(seed)
        score, loss = training._score(problem), problem.loss()
        loss.backward()
        grads = [parameter.grad for parameter in training._parameters(problem)]
        assert all(grad is not None for grad in grads), "a weight has no part in it"
        return problem, [score, loss.item(), *(grad.abs().sum().item() for grad in grads)]

    problem, numbers = begun(0)
    assert all(map(math.isfinite, numbers)) and numbers[0] > 0
    assert begun(0)[1] == pytest.approx(numbers, rel=1e-4)  # matrix products depend on where tensors lie in memory
    assert begun(1)[1] != pytest.approx(numbers, rel=1e-4)
    score = training._score(problem)
    assert training._score(problem) == pytest.approx(score, rel=1e-4), "scores depend on weights alone"


@pytest.mark.parametrize("schedule", ["constant", "cosine", "one-cycle"])
def test_schedules(schedule: str) -> None:
    task = replace(zoo.TASKS["xor"], schedule=schedule, steps=100)
    factors = [task.lr_factor(step) for step in range(100)]
    assert max(factors) == pytest.approx(1.0) and all(factor > 0 for factor in factors)
    peak = {"constant": 0, "cosine": 0, "one-cycle": 30}[schedule]
    assert factors.index(max(factors)) == peak
    assert factors[-1] == 1.0 if schedule == "constant" else factors[-1] < 0.01


def test_tasks_with_weights_that_are_not_there_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(zoo.FOLDER, raising=False)
    assert main(["zoo", "--task", "smollm2", "--models", str(tmp_path), "--output", str(tmp_path / "zoo")]) == 2
    said = capsys.readouterr().err
    assert "left out: smollm2" in said and "no finished runs" in said
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert not zoo.missing(zoo.TASKS["smollm2"]) and zoo.missing(zoo.TASKS["minilm-intents"])


# ---- runs ----


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Task:
    """Return a task of 20 steps."""
    task = replace(zoo.TASKS["xor"], steps=20)
    monkeypatch.setitem(training.TASKS, "xor", task)
    return task


def test_runs_are_kept_and_not_repeated(short: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zoo.train([short], ["auto"], 2, tmp_path / "zoo", configurations=["adamw-8"])
    rows = Store(tmp_path / "zoo").rows
    ours = [row for row in rows if row["method"] == "baoc@auto"]
    theirs = [row for row in rows if row["method"] == REFERENCE]
    assert len(ours) == 2 * len(running.BESIDE) and len(theirs) >= len(GRID) + len(running.BESIDE)
    assert {(row["lr"], row["seed"]) for row in ours} <= {(row["lr"], row["seed"]) for row in theirs}
    whole = [row for row in rows if row["method"] == "adamw-8"]
    best = min((row for row in theirs if row["seed"] == 0), key=lambda row: row["score"])
    assert [(row["seed"], row["lr"]) for row in whole] == [(0, best["lr"]), (1, best["lr"])]
    assert all((row["regime"], row["role"]) == ("general", "matrix") for row in whole)
    capsys.readouterr()
    zoo.train([short], ["auto"], 2, tmp_path / "zoo", configurations=["adamw-8"])
    assert Store(tmp_path / "zoo").rows == rows and not capsys.readouterr().err


def test_a_run_is_repeatable(short: Task) -> None:
    run = Run("xor", "baoc@auto", seed=0, rung=0)
    first, second = ({**training.train(run), "seconds": None} for _ in range(2))
    assert first == second and first["score"] > 0 and first["steps"] == 20


def test_adamw32_is_torchs(short: Task) -> None:
    torch.manual_seed(3)
    problem = short.build(3)
    optimizer = torch.optim.AdamW(problem.params.parameters(), lr=short.lr, weight_decay=short.weight_decay)
    scores = []
    for _ in range(20):
        loss = problem.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scores.append(problem.score())
    row = training.train(Run("xor", REFERENCE, seed=3, rung=0))
    assert row["score"] == pytest.approx(math.prod(scores[-5:]) ** 0.2, rel=1e-6)


def test_a_budget_without_a_plan_is_noted(short: Task) -> None:
    row = training.train(Run("xor", "baoc@0.01", seed=0, rung=0))  # vectors alone need more
    assert row["score"] is None and "smallest" in row["error"]


def test_a_divergence_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def runaway(seed: int) -> zoo.Problem:
        """A cliff."""
        weight = torch.nn.Parameter(torch.ones(()))
        return objective([weight], lambda: 1 / (weight - weight.detach()))

    monkeypatch.setitem(training.TASKS, "runaway", Task(runaway, lr=1.0, steps=3))
    row = training.train(Run("runaway", REFERENCE, seed=0, rung=0))
    assert row["score"] is None and row["error"] is None


def test_test_batches_are_not_those_that_are_trained_on() -> None:
    drawn: list[float] = []

    def draw(random: torch.Generator) -> list[torch.Tensor]:
        drawn.append(torch.rand(1, generator=random).item())
        return [torch.tensor(drawn[-1])]

    problem = fitted([], lambda x: x, draw, seed=0)
    tests = list(drawn)
    assert problem.score() == pytest.approx(sum(tests) / 4) and problem.loss().item() not in tests


# ---- verdicts ----


def test_verdicts() -> None:
    one = dict.fromkeys(range(3), 1.0)
    assert compared({0: 1.019, 1: 1.019, 2: 1.019}, one, decades=False).verdict == "tie"
    assert compared({0: 1.021, 1: 1.022, 2: 1.023}, one, decades=False).verdict == "loss"
    assert compared({0: 0.9, 1: 0.91, 2: 0.92}, one, decades=False).verdict == "win"
    assert compared({0: 1.0, 1: 1.0, 2: 1.2}, one, decades=False).verdict == "tie", "within two standard errors"
    assert compared({0: 1.49, 1: 1.49}, one, decades=True).verdict == "tie"
    assert compared({0: 1.51, 1: 1.51}, one, decades=True).verdict == "loss"
    assert compared({0: 1.2, 1: 9.0}, one, decades=True).verdict == "tie", "within two standard errors"
    assert compared({0: 1e-13}, {0: 1e-15}, decades=True).verdict == "tie", "both are rounding errors"
    assert compared({0: 0.5, 1: math.inf}, one, decades=False).verdict == "loss", "a divergence"
    assert compared({0: 0.5}, {0: math.inf}, decades=False) is None and compared({}, one, decades=False) is None


def made_up(task: Task, method: str, seed: int, rung: int, score: float | None) -> Row:
    run = Run(task.name, method, seed, rung)
    row = {"key": run.key, "task": task.name, "method": method, "seed": seed, "lr": run.lr, "steps": task.steps}
    return {**row, "score": score, "error": None, "parameters": 81, "seconds": 1.0, "state_bytes": 0}


def test_the_best_learning_rate_is_sought_beyond_an_edge() -> None:
    task = zoo.TASKS["vae"]
    scores = {-2: 5.0, -1: 4.0, 0: 3.0, 1: 2.0, 2: 1.0, 3: None}
    results = Results([made_up(task, REFERENCE, 0, rung, score) for rung, score in scores.items()])
    assert results.wider(task, GRID) == (*GRID, 3)
    assert results.wider(task, (*GRID, 3)) == (*GRID, 3) and results.best_rung(task) == 2


def test_the_page_says_what_is_lost_first(tmp_path: Path) -> None:
    small, large = zoo.TASKS["vae"], zoo.TASKS["xor"]
    rows = [made_up(task, REFERENCE, seed, 0, 1.0 + seed) for task in (small, large) for seed in (0, 1)]
    rows += [made_up(small, "baoc@auto", seed, 0, 1.1 * (1.0 + seed)) for seed in (0, 1)]
    rows += [made_up(large, "baoc@auto", seed, 0, 4.0 * (1.0 + seed)) for seed in (0, 1)]
    rows += [made_up(small, "baoc@0.25", 0, 0, None)]
    rows += [{**made_up(large, "baoc@0.25", 0, 0, None), "error": "too small"}]
    with Store(tmp_path / "zoo").writing("zoo") as store:
        for row in rows:
            store.add(row)
    (tmp_path / "zoo.md").write_text("old\n\n## Reading\n\n- By hand.\n")
    path = zoo.write([small, large], 2, tmp_path / "zoo", ["some", "command"])
    lines = path.read_text().splitlines()
    lost = lines.index("## What is lost")
    assert lost < lines.index("## Counts") < lines.index("## Every task") and "Made by `some command`." in lines
    assert lines[lost + 6 : lost + 9] == [
        "| vae | generative | 0.25 | **diverged** |",
        "| xor | tabular | auto | **x4 ± 0%** |",
        "| vae | generative | auto | **+10.0 ± 0.0%** |",
    ]
    assert "| auto | AdamW32's best lr | 0 | 0 | 2 | 0 | x2.550 | xor **x4 ± 0%** |" in lines
    assert "| 0.25 | AdamW32's best lr | 0 | 0 | 1 | 1 | xinf | vae **diverged** |" in lines
    assert lines[-3:] == ["## Reading", "", "- By hand."]
    assert page.text([small, large], rows, 2, []).count("no plan") == 1
