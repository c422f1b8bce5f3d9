"""Fine-tuning of pretrained weights: tasks, runs that are kept, verdicts and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments import finetune
from experiments.commands import main
from experiments.finetune import page, resnet, running, tasks, training
from experiments.finetune.results import GRID, Results, difference
from experiments.finetune.tasks import FineTuning, Problem
from experiments.finetune.training import Run
from experiments.runs import Row, Store
from experiments.workloads.base import HeldOut
from experiments.zoo.training import REFERENCE


def points(seed: int) -> Problem:
    """Return a network with a norm that tells which of eight numbers is the largest."""
    first = nn.Linear(8, 64)
    norm = nn.LayerNorm(64)
    norm.weight.data.uniform_(0.5, 1.5)  # as if it were trained
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 8, generator=random)
    labels = inputs.argmax(dim=1)
    held_out: Mapping[HeldOut, tasks.Examples] = {
        "validation": (inputs[:16], labels[:16]),
        "test": (inputs[16:32], labels[16:32]),
    }
    model = nn.Sequential(first, norm, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return tasks.classifier(model, seed, 8, (inputs[32:], labels[32:]), held_out)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> FineTuning:
    """Return a task that needs no weights."""
    task = FineTuning("points", "points", "none", points, 3e-3, steps=8, seeds=2, once=("muon-8",), budgets=("auto",))
    monkeypatch.setitem(training.TASKS, "points", task)
    return task


def made_up(task: FineTuning, method: str, seed: int, rung: int, loss: float | None, **more: object) -> Row:
    run = Run(task.name, method, seed, rung)
    scores = None if loss is None else {"loss": loss, "accuracy": 0.5}
    row = {"key": run.key, "task": task.name, "method": method, "seed": seed, "rung": rung, "lr": run.lr}
    row |= {"steps": task.steps, "validation": scores, "test": scores, "error": None, "parameters": 100}
    return {**row, "regime": "finetune", "state_bytes": 200, "distance": 0.01, **more}


# ---- tasks ----


def test_the_learning_rate_rises_shortly_and_falls_to_zero() -> None:
    factors = [finetune.TASKS["minilm-intents"].lr_factor(step) for step in range(30)]
    assert 0 < factors[0] < factors[2] < factors[3] == 1.0 and factors[-1] < 0.02
    assert factors[3:] == sorted(factors[3:], reverse=True)


def test_resnet_20_is_that_of_the_paper(tmp_path: Path) -> None:
    model = resnet.ResNet()
    assert sum(param.numel() for param in model.parameters()) == 269_722
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "best_prec1": 91.7}, tmp_path / "resnet20-abc.th")
    path = resnet.weights_file(tmp_path)
    assert path is not None and resnet.weights_file(tmp_path / "none") is None
    x = resnet.pixels(torch.rand(2, 3, 32, 32) * 2 - 1)
    torch.testing.assert_close(resnet.pretrained(path).eval()(x), model.eval()(x))


def test_pixels_are_normalized() -> None:
    middle = torch.tensor(resnet.MEAN).view(1, 3, 1, 1).expand(1, 3, 2, 2) * 2 - 1
    assert resnet.pixels(middle).abs().max() < 1e-6


def test_tasks_whose_weights_are_not_there_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAOC_MODELS", "")
    given = ["finetune", "--task", "smollm2-gsm8k", "--models", str(tmp_path), "--output", str(tmp_path / "runs")]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert "left out: smollm2-gsm8k" in said and "no finished runs" in said
    (tmp_path / "resnet20").mkdir()
    (tmp_path / "resnet20" / "resnet20.th").touch()
    assert finetune.TASKS["resnet20-noise"].is_there and not finetune.TASKS["minilm-imdb"].is_there


# ---- runs ----


def test_runs_are_kept_and_not_repeated(tiny: FineTuning, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finetune.train([tiny], 3, tmp_path / "runs")
    rows = Store(tmp_path / "runs").rows
    results = Results(rows)
    best = {method: results.best_rung(tiny, method) for method in (REFERENCE, running.BASELINE)}
    for method, seeds in ((REFERENCE, 2), (running.BASELINE, 2), ("baoc@auto", 2), ("muon-8", 1)):
        rung = best.get(method, best[REFERENCE])
        assert rung is not None and [row["seed"] for row in results.of(tiny, method, rung)] == list(range(seeds))
    grid = {row["rung"] for row in rows if row["method"] == REFERENCE}
    assert set(GRID) <= grid and best[REFERENCE] is not None
    inside = min(grid) < best[REFERENCE] < max(grid)
    assert inside or len(grid) == len(GRID) + running.MOST_BEYOND
    (ours, _) = [row for row in rows if row["method"] == "baoc@auto"]
    assert ours["regime"] == "finetune" and sum(ours["plan"].values()) == ours["parameters"] and ours["distance"] > 0
    capsys.readouterr()
    finetune.train([tiny], 3, tmp_path / "runs")
    assert Store(tmp_path / "runs").rows == rows and not capsys.readouterr().err
    path = finetune.write([tiny], tmp_path / "runs", ["some", "command"])
    assert "Made by `some command`." in path.read_text() and "| `muon-8` |" in path.read_text()


def test_a_run_is_repeatable(tiny: FineTuning) -> None:
    run = Run("points", "baoc@auto", seed=0, rung=0)
    first, second = ({**training.train(run), "seconds": 0, "train_seconds": 0} for _ in range(2))
    assert first == second and 0 <= first["test"]["accuracy"] <= 1


def test_nothing_is_trained_before_training(tiny: FineTuning) -> None:
    row = training.train(Run("points", training.UNTRAINED, seed=0, rung=0))
    assert row["test"]["loss"] > 0 and "state_bytes" not in row


def test_a_budget_without_a_plan_and_a_divergence_are_noted(tiny: FineTuning) -> None:
    row = training.train(Run("points", "baoc@0.0001", seed=0, rung=0))
    assert row["test"] is None and "smallest" in row["error"]
    row = training.train(Run("points", "adamw32", seed=0, rung=80))
    assert row["error"] is None and row["test"] is None and row["distance"] is None


# ---- verdicts ----


def test_the_grid_is_extended_while_the_best_is_at_an_edge(tiny: FineTuning) -> None:
    rows = [made_up(tiny, REFERENCE, 0, rung, loss) for rung, loss in ((-1, 3.0), (0, 2.0), (1, 1.0), (2, None))]
    assert Results(rows).wider(tiny, REFERENCE, GRID) == (*GRID, 2)
    assert Results(rows).wider(tiny, REFERENCE, (*GRID, 2)) == (*GRID, 2)


def test_a_divergence_is_worse(tiny: FineTuning) -> None:
    theirs = [made_up(tiny, REFERENCE, seed, 0, 1.0) for seed in (0, 1)]
    found = difference([made_up(tiny, "muon-8", seed, 0, None if seed else 1.0) for seed in (0, 1)], theirs)
    assert found is not None and math.isinf(found.percent) and found.verdict == "worse"
    assert page.told(found) == "diverged" and difference([], theirs) is None


def test_the_page_says_what_loses_first(tiny: FineTuning) -> None:
    losses = {REFERENCE: (1.0, 2.0), "adamw-8": (1.0, 2.0), "baoc@auto": (1.1, 2.2), "muon-8": (0.9,)}
    rows = [made_up(tiny, method, seed, 0, loss) for method, found in losses.items() for seed, loss in enumerate(found)]
    rows.append(made_up(tiny, "muon-8", 0, 1, 0.8))
    lines = page.text([tiny], rows, ["some", "command"]).splitlines()
    lost = lines.index("## What loses")
    assert lines[lost + 2] == "The default, `baoc@auto`, is worse than `adamw-8` on points (1 tasks)."
    assert lines[lost + 6] == "| points | `baoc@auto` | 0.003 | +10.00 ± 0.00 | 2.00 |"
    assert (
        "| AdamW32 | 0.003 | 2.00 | 1.5000 ± 0.5000 | 50.0 ± 0.0 | 0.0100 ± 0.0000 | +0.00 ± 0.00 | 2 | level |"
        in lines
    )
    assert any(line.startswith("| `muon-8` |") and line.endswith("| -10.00 | 1 | one seed |") for line in lines)
    assert any(line.startswith("| `muon-8` | 0.009 |") and "| -20.00 |" in line for line in lines)
    none = [{**made_up(tiny, "baoc@auto", 0, 0, None), "error": "too small"}]
    text = page.text([tiny], [row for row in rows if row["method"] != "baoc@auto"] + none, [])
    assert "No plan fits for `baoc@auto` on points" in text
