"""The order of the runs: AdamW32's learning rates first, then every budget at the best one, then beside it.

Learning rates are tried with the first seed. All seeds run at the best one, at a third and at three times of it. What
loses runs with more seeds: some tasks are chaotic, and few seeds say little about them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

import torch

from experiments import pool
from experiments.runs import Row, Store
from experiments.runs.batch import duration
from experiments.zoo.results import GRID, Results
from experiments.zoo.task import Task
from experiments.zoo.training import BUDGETED, REFERENCE, Run, train

BUDGETS = ("auto", "0.5", "0.25")
BESIDE = (0, -1, 1)
"""Learning rates of BAOC in rungs from AdamW32's best: the same, a third, three times."""
MOST_BEYOND = 3
"""How often a grid is extended while the best learning rate is at its edge."""


CONFIRMED = 3
"""Times as many seeds decide about a loss."""


def run(
    tasks: Sequence[Task],
    budgets: Sequence[str],
    seeds: int,
    store: Store,
    workers: int = 1,
    configurations: Sequence[str] = (),
    factors: Sequence[int] = BESIDE,
    stream: TextIO | None = None,
) -> None:
    """Train what is missing. The store is open for writing; only this process writes to it.

    Args:
        tasks: of the zoo.
        budgets: of BAOC.
        seeds: how many.
        store: where finished runs are.
        workers: how many processes.
        configurations: each on all weights of a model, at AdamW32's best learning rate.
        factors: learning rates in rungs from AdamW32's best.
        stream: where progress goes.
    """
    stream = stream or sys.stderr
    grids = dict.fromkeys(tasks, GRID)
    for _ in range(1 + MOST_BEYOND):
        tries = [Run(task.name, REFERENCE, 0, rung) for task, grid in grids.items() for rung in grid]
        _train_missing(tries, store, workers, stream)
        results = Results(store.rows)
        grids = {task: results.wider(task, grid) for task, grid in grids.items()}
    results = Results(store.rows)
    best = {task: rung for task in tasks if (rung := results.best_rung(task)) is not None}
    whole = [
        Run(task.name, method, seed, rung)
        for seed in range(seeds)
        for task, rung in best.items()
        for method in configurations
    ]
    _train_missing(whole, store, workers, stream)
    for factor in factors:
        ours = [
            Run(task.name, method, seed, rung + factor)
            for seed in range(seeds)
            for task, rung in best.items()
            for method in (*(f"{BUDGETED}{budget}" for budget in budgets), REFERENCE)
        ]
        _train_missing(ours, store, workers, stream)
    results = Results(store.rows)
    doubtful = [
        Run(task.name, method, seed, rung + factor)
        for task, rung in best.items()
        for budget in budgets
        for factor in factors
        if (found := results.comparison(task, f"{BUDGETED}{budget}", seeds, factor)) and found.verdict == "loss"
        for seed in range(seeds, CONFIRMED * seeds)
        for method in (f"{BUDGETED}{budget}", REFERENCE)
    ]
    _train_missing(doubtful, store, workers, stream)


def _train_missing(runs: Sequence[Run], store: Store, workers: int, stream: TextIO) -> None:
    finished = {row["key"] for row in store.rows}
    missing = [one for one in dict.fromkeys(runs) if one.key not in finished]
    started = time.monotonic()
    if workers == 1:
        torch.set_num_threads(1)
        rows = ((one, train(one)) for one in missing)
    else:
        rows = pool.results(train, missing, workers, threads=1)
    for number, (one, row) in enumerate(rows, 1):
        store.add(row)
        left = duration((time.monotonic() - started) / number * (len(missing) - number))
        print(f"run {number} of {len(missing)}, about {left} left: {one.key}: {_told(row)}", file=stream, flush=True)


def _told(row: Row) -> str:
    if row["error"]:
        return f"no plan: {row['error']}"
    return "diverged" if row["score"] is None else f"score {row['score']:.4g}, {row['seconds']:.1f} s"
