"""A list of runs, each for itself: what is finished stays, the rest is trained, in several processes if need be."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from experiments import pool
from experiments.moving_line import MovingLine
from experiments.runs import ranks
from experiments.runs.cell import Cell, Row, RunOptions
from experiments.runs.store import Store, StoreError
from experiments.runs.training import Progress, train_cell, workload_of


@dataclass(frozen=True)
class Job:
    """One run, and how it is run."""

    cell: Cell
    options: RunOptions = field(default_factory=RunOptions)
    grid: tuple[float, ...] = ()
    """The learning rates of which this is one that is tried; none: the only one."""
    is_final: bool = False
    """It is trained with the best of the grid."""
    default: Row | None = field(default=None, repr=False)
    """See :func:`~experiments.runs.training.train_cell`."""

    @property
    def about(self) -> Row:
        is_tried = self.grid and not self.is_final
        return {"phase": "tune" if is_tried else "final", "lr_grid": list(self.grid or [self.cell.lr_factor])}


def run_all(jobs: Iterable[Job], store: Store, workers: int = 1, stream: TextIO | None = None, what: str = "") -> None:
    """Train what is missing, the first first. The store is open for writing; only this process writes to it."""
    stream = stream or sys.stderr
    wanted = list({job.cell.key: job for job in jobs}.values())
    missing = [job for job in wanted if not _is_there(job, store)]
    for name, options in dict.fromkeys((job.cell.workload, job.options.workload) for job in missing):
        workload_of(name, options).prepare()  # once, and not by every process; if data is missing, say so now
    started = time.monotonic()
    for number, (job, row) in enumerate(_trained(missing, store, workers, stream), 1):
        store.add({**row, **job.about})
        if not ranks.is_first():
            continue
        shutil.rmtree(store.running(job.cell), ignore_errors=True)
        left = (time.monotonic() - started) / number * (len(missing) - number)
        position = len(wanted) - len(missing) + number
        print(
            f"{what and f'{what}: '}run {position} of {len(wanted)}, about {duration(left)} left: {job.cell.key}: "
            f"{_told(row)}",
            file=stream,
            flush=True,
        )


def _is_there(job: Job, store: Store) -> bool:
    row = store.find(job.cell)
    if row is not None and row["settings"] != job.options.settings:
        raise StoreError(
            f"the run {job.cell.key!r} in {str(store.folder)!r} was made with other settings: {row['settings']}, not "
            f"{job.options.settings}. Go on with the old ones, or give another --output."
        )
    return row is not None


def _trained(jobs: Sequence[Job], store: Store, workers: int, stream: TextIO) -> Iterator[tuple[Job, Row]]:
    """Jobs with their rows, as they are finished."""
    if workers == 1:
        line = MovingLine(stream, "  ")
        progress = Progress(line.step, line.note) if ranks.is_first() else Progress()
        for job in jobs:
            row = _train((job, store.running(job.cell)), progress)
            line.leave()
            yield job, ranks.agreed(row)
        return
    threads = max(1, (os.cpu_count() or 1) // workers)
    work = [(job, store.running(job.cell)) for job in jobs]
    yield from ((job, row) for (job, _), row in pool.results(_train, work, workers, threads))


def _train(work: tuple[Job, Path], progress: Progress | None = None) -> Row:
    job, folder = work
    return train_cell(job.cell, job.options, progress, folder, job.default)


def _told(row: Row) -> str:
    if row["error"]:
        return f"no run: {row['error']}"
    if row["diverged_at"]:
        return f"diverged at step {row['diverged_at']}"
    if row.get("same_plan"):
        return "same plan as the default's, not trained again"
    return f"test loss {row['test_loss']:.4f}, {row['seconds']:.0f} s"


def duration(seconds: float) -> str:
    """As a person says it.

    >>> duration(42), duration(2100), duration(12_600)
    ('42 s', '35 min', '3.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
