"""The order of the runs, and what is trained at which learning rate.

AdamW32 and 8-bit AdamW each look for their best learning rate with the first seed, on validation data. BAOC and Muon
run at AdamW32's: whoever replaces AdamW has that one. Last, Muon looks for its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

import torch

from experiments.finetune.results import GRID, Results
from experiments.finetune.tasks import FineTuning
from experiments.finetune.training import UNTRAINED, Run, train
from experiments.runs import Row, Store
from experiments.zoo.training import BUDGETED, REFERENCE

BASELINE, MUON = "adamw-8", "muon-8"
FIRST = (f"{BUDGETED}auto", f"{BUDGETED}0.25", REFERENCE)
"""What is compared on all tasks before the rest is on any."""
MOST_BEYOND = 4
"""How often a grid is extended while the best learning rate is at its edge."""


def methods(task: FineTuning) -> tuple[str, ...]:
    """Return what runs at AdamW32's learning rate, AdamW32 first."""
    return (REFERENCE, *(f"{BUDGETED}{budget}" for budget in task.budgets), MUON)


def run(tasks: Sequence[FineTuning], seeds: int, store: Store, stream: TextIO | None = None) -> None:
    """Train what is missing, the most telling first. The store is open for writing."""
    torch.set_num_threads(1)
    for task in tasks:
        _train_missing([Run(task.name, UNTRAINED, 0, 0)], store, stream)
        for method in (REFERENCE, BASELINE):
            _tune(task, method, store, stream)
        _train_missing(_compared(task, (BASELINE, *FIRST), seeds, Results(store.rows)), store, stream)
    for task in tasks:
        rest = [method for method in methods(task) if method not in FIRST]
        rest.sort(key=task.once.__contains__)  # what takes long comes last
        _train_missing(_compared(task, rest, seeds, Results(store.rows)), store, stream)
    for task in tasks:
        if MUON not in task.once:
            _tune(task, MUON, store, stream)
            rung = Results(store.rows).best_rung(task, MUON)
            own = [Run(task.name, MUON, seed, rung) for seed in range(min(seeds, task.seeds)) if rung is not None]
            _train_missing(own, store, stream)


def _tune(task: FineTuning, method: str, store: Store, stream: TextIO | None) -> None:
    """Try learning rates with the first seed until the best is inside the grid."""
    grid: tuple[int, ...] = GRID
    for _ in range(1 + MOST_BEYOND):
        _train_missing([Run(task.name, method, 0, rung) for rung in grid], store, stream)
        grid = Results(store.rows).wider(task, method, grid)


def _compared(task: FineTuning, names: Sequence[str], seeds: int, results: Results) -> list[Run]:
    """Return the runs of all seeds, each method at its learning rate."""
    runs = []
    for method in names:
        rung = results.best_rung(task, BASELINE if method == BASELINE else REFERENCE)
        count = 1 if method in task.once else min(seeds, task.seeds)
        runs += [Run(task.name, method, seed, rung) for seed in range(count) if rung is not None]
    return runs


def _train_missing(runs: Sequence[Run], store: Store, stream: TextIO | None) -> None:
    finished = {row["key"] for row in store.rows}
    for one in runs:
        if one.key not in finished:
            row = train(one)
            store.add(row)
            print(f"{one.key}: {_told(row)}", file=stream or sys.stderr, flush=True)


def _told(row: Row) -> str:
    if row["error"]:
        return f"no plan: {row['error']}"
    if row["validation"] is None or row["test"] is None:
        return "diverged"
    return f"validation {row['validation']['loss']:.4f}, test {row['test']['loss']:.4f}, {row['seconds']:.0f} s"
