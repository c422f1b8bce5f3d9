"""Real pretrained weights, each on a task with a test set: does the default plan lose to 8-bit AdamW?

python -m experiments finetune --models DIR --data DIR --output docs/results/finetune
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.finetune import page, running
from experiments.finetune.tasks import TASKS, FineTuning
from experiments.runs import Store, StoreError
from experiments.runs.page import write_page

__all__ = ["TASKS", "FineTuning", "train", "write"]


def train(tasks: Sequence[FineTuning], seeds: int, folder: Path) -> None:
    """Train what is missing: see :func:`experiments.finetune.running.run`."""
    with Store(folder).writing("finetune") as store:
        running.run(tasks, seeds, store)


def write(tasks: Sequence[FineTuning], folder: Path, command: Sequence[str]) -> Path:
    """Write the page of the runs that are there."""
    store = Store(folder)
    if not store.rows:
        raise StoreError(f"there are no finished runs in {str(folder)!r} to make a page of.")
    return write_page(folder, page.text(tasks, store.rows, command))
