"""What each role, and each block, does to the loss when it alone gets a cheaper configuration.

    python -m experiments ablation --output docs/results/ablation

Everything else keeps 32-bit AdamW. Runs of one seed begin with the same weights and see the same batches, so losses are
compared seed by seed, at the learning rate that is best for AdamW32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.ablation import catalog, metrics, page
from experiments.ablation.catalog import PARTS, SETTINGS, Setting
from experiments.ablation.effects import Effects
from experiments.runs import RunOptions, Store, StoreError
from experiments.runs.batch import run_all
from experiments.runs.page import write_page

__all__ = ["PARTS", "SETTINGS", "Setting", "train", "write"]


def train(
    settings: Sequence[Setting],
    folder: Path,
    seeds: int,
    options: RunOptions,
    workers: int = 1,
    parts: Sequence[str] = PARTS,
) -> None:
    """Train what is missing."""
    with Store(folder).writing("ablation") as store:
        run_all(catalog.jobs(settings, seeds, options, parts), store, workers)


def write(settings: Sequence[Setting], folder: Path, options: RunOptions, command: Sequence[str] = ()) -> Path:
    """The page of the runs that are there. Metrics of blocks are measured where that has not been done."""
    store = Store(folder)
    if not store.rows:
        raise StoreError(f"there are no finished runs in {str(folder)!r} to make a page of.")
    measured = {}
    for setting in settings:
        swaps = {f"{block}={name}" for block in setting.blocks for name in catalog.OF_BLOCKS}
        mine = [row for row in store.rows if row["workload"] == setting.workload and row["steps"] == setting.steps]
        if any(row["method"] in swaps for row in mine):
            seeds = sorted({row["seed"] for row in mine if row["method"] in swaps})
            measured[setting.workload] = metrics.kept(setting, seeds, options, folder)
    return write_page(folder, page.text(settings, Effects(store.rows), measured, command))
