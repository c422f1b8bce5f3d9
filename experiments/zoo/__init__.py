"""Many small tasks of the kinds that people train: is BAOC ever worse than AdamW32 at the same learning rate?

python -m experiments zoo --jobs 2 --output docs/results/zoo
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.runs import Store, StoreError
from experiments.runs.page import write_page
from experiments.zoo import page, running
from experiments.zoo.catalog import TASKS
from experiments.zoo.pretrained import FOLDER, missing
from experiments.zoo.running import BESIDE, BUDGETS
from experiments.zoo.task import Problem, Task, task

__all__ = ["BESIDE", "BUDGETS", "FOLDER", "TASKS", "Problem", "Task", "missing", "task", "train", "write"]


def train(
    tasks: Sequence[Task],
    budgets: Sequence[str],
    seeds: int,
    folder: Path,
    workers: int = 1,
    configurations: Sequence[str] = (),
    factors: Sequence[int] = BESIDE,
) -> None:
    """Train what is missing: see :func:`experiments.zoo.running.run`."""
    with Store(folder).writing("zoo") as store:
        running.run(tasks, budgets, seeds, store, workers, configurations, factors)


def write(tasks: Sequence[Task], seeds: int, folder: Path, command: Sequence[str]) -> Path:
    """Write the page of the runs that are there."""
    store = Store(folder)
    if not store.rows:
        raise StoreError(f"there are no finished runs in {str(folder)!r} to make a page of.")
    return write_page(folder, page.text(tasks, store.rows, seeds, command))
