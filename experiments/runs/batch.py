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
from experiments.runs.cell import Cell, Row, RunOptions
from experiments.runs.progress import duration
from experiments.runs.store import Store, StoreError
from experiments.runs.training import train_cell, workload_of


@dataclass(frozen=True)
class Job:
    """One run, and how it is run."""

    cell: Cell
    options: RunOptions = field(default_factory=RunOptions)
    grid: tuple[float, ...] = ()
    """The learning rates of which this is one that is tried; none: the only one."""

    @property
    def about(self) -> Row:
        return {"phase": "tune" if self.grid else "final", "lr_grid": list(self.grid or [self.cell.lr_factor])}


def run_all(jobs: Iterable[Job], store: Store, workers: int = 1, stream: TextIO | None = None) -> None:
    """Train what is missing, the first first. The store is open for writing; only this process writes to it."""
    stream = stream or sys.stderr
    wanted = list({job.cell.key: job for job in jobs}.values())
    missing = [job for job in wanted if not _is_there(job, store)]
    for name, options in dict.fromkeys((job.cell.workload, job.options.workload) for job in missing):
        workload = workload_of(name, options)
        next(workload.train_batches(seed=0))  # if data is missing, say so now
        workload.build(seed=0)  # what it is trained on before, it is trained on once, and not by every process
    started = time.monotonic()
    for number, (job, row) in enumerate(_trained(missing, store, workers), 1):
        store.add({**row, **job.about})
        shutil.rmtree(store.running(job.cell), ignore_errors=True)
        left = (time.monotonic() - started) / number * (len(missing) - number)
        position = len(wanted) - len(missing) + number
        print(
            f"run {position} of {len(wanted)}, about {duration(left)} left: {job.cell.key}: {_told(row)}",
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


def _trained(jobs: Sequence[Job], store: Store, workers: int) -> Iterator[tuple[Job, Row]]:
    """Jobs with their rows, as they are finished."""
    if workers == 1:
        for job in jobs:
            yield job, _train((job, store.running(job.cell)))
        return
    threads = max(1, (os.cpu_count() or 1) // workers)
    work = [(job, store.running(job.cell)) for job in jobs]
    yield from ((job, row) for (job, _), row in pool.results(_train, work, workers, threads))


def _train(work: tuple[Job, Path]) -> Row:
    job, folder = work
    return train_cell(job.cell, job.options, folder=folder)


def _told(row: Row) -> str:
    if row["error"]:
        return f"no run: {row['error']}"
    if row["diverged_at"]:
        return f"diverged at step {row['diverged_at']}"
    return f"test loss {row['test_loss']:.4f}, {row['seconds']:.0f} s"
