"""The order of the runs: AdamW32's learning rate first, then everything seed by seed."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from experiments import methods
from experiments.frontier.catalog import BY_TYPE, OURS, PAPERS, PEERS, TUNING_SEEDS, UNIFORM, Setting
from experiments.frontier.lines import best_factor, lines_of
from experiments.packages import not_installed
from experiments.runs import Row, RunOptions, Store
from experiments.runs.batch import Job, run_all
from experiments.runs.summary import REFERENCE

CLEAR = 10.0
"""A method whose difference is so many times its spread after two seeds gets no third."""
MOST_BEYOND = 2
"""How many doublings beyond AdamW32's learning rates are tried."""


@dataclass(frozen=True)
class Chosen:
    """The methods that are run."""

    ours: tuple[str, ...] = (*OURS, *UNIFORM[:3])
    """At AdamW32's learning rate."""
    peers: tuple[str, ...] = PEERS
    """At their own."""
    others: tuple[str, ...] = (*PAPERS, *UNIFORM[3:], *BY_TYPE)
    """At AdamW32's learning rate, after the rest."""

    @property
    def at_one_lr(self) -> tuple[str, ...]:
        return (*self.ours, *self.others)


def run(
    settings: Sequence[Setting],
    chosen: Chosen,
    store: Store,
    seeds: int,
    options: RunOptions,
    workers: int = 1,
    stream: TextIO | None = None,
) -> None:
    """Train what is missing. A run's learning rate may depend on those before, so there is a list for each seed."""
    stream = stream or sys.stderr
    chosen = _installed(chosen, stream)
    _seek_references_lr(settings, store, TUNING_SEEDS[:seeds], options, workers, stream)
    for seed in range(seeds):
        run_all(list(jobs_of(settings, chosen, store, seed, options)), store, workers, stream)


def _seek_references_lr(
    settings: Sequence[Setting],
    store: Store,
    seeds: Sequence[int],
    options: RunOptions,
    workers: int,
    stream: TextIO,
) -> None:
    """Those of AdamW32's grid, and beyond it while the best of a workload is at an edge: all are judged against it."""
    grids = dict.fromkeys(settings, methods.get(REFERENCE).lr_factors)
    for _ in range(1 + MOST_BEYOND):
        tries = [
            _job(setting, REFERENCE, seed, factor, options, grid)
            for setting, grid in grids.items()
            for seed in seeds
            for factor in grid
        ]
        run_all(tries, store, workers, stream)
        grids = {setting: wider(grid, best_factor(store.rows, setting, REFERENCE)) for setting, grid in grids.items()}


def wider(grid: tuple[float, ...], best: float) -> tuple[float, ...]:
    """A grid with one more step beyond the best, if that is at an edge.

    >>> wider((0.5, 1.0, 2.0), 2.0), wider((0.5, 1.0, 2.0), 1.0)
    ((0.5, 1.0, 2.0, 4.0), (0.5, 1.0, 2.0))
    """
    low = (min(grid) / 2,) if best == min(grid) else ()
    high = (max(grid) * 2,) if best == max(grid) else ()
    return (*low, *grid, *high)


def jobs_of(settings: Sequence[Setting], chosen: Chosen, store: Store, seed: int, options: RunOptions) -> Iterator[Job]:
    """The runs of a seed; learning rates are tried with the first."""
    for names in ((REFERENCE, *chosen.ours), chosen.peers, chosen.others):
        for setting in settings:
            for name in names:
                grid = methods.get(name).lr_factors if name in (REFERENCE, *chosen.peers) else ()
                if grid and seed in (TUNING_SEEDS if name == REFERENCE else TUNING_SEEDS[:1]):
                    yield from (_job(setting, name, seed, factor, options, grid) for factor in grid)
                elif seed < 2 or not is_clear(store.rows, setting, name):
                    factor = best_factor(store.rows, setting, name if grid else REFERENCE)
                    yield _job(setting, name, seed, factor, options)


def is_clear(rows: Iterable[Row], setting: Setting, method: str) -> bool:
    """Whether two seeds have said enough. What all are compared with gets every seed."""
    if method == REFERENCE:
        return False
    line = next((line for line in lines_of(setting, list(rows)) if line.method == method), None)
    values = list(line.differences.values()) if line else []
    return len(values) > 1 and abs(statistics.fmean(values)) > CLEAR * statistics.stdev(values)


def _job(
    setting: Setting, method: str, seed: int, lr_factor: float, options: RunOptions, grid: tuple[float, ...] = ()
) -> Job:
    size = options.workload.batch_size or setting.batch_size
    options = replace(options, workload=replace(options.workload, batch_size=size))
    return Job(setting.cell(method, seed, lr_factor), options, grid)


def _installed(chosen: Chosen, stream: TextIO) -> Chosen:
    missing = {name: methods.get(name).missing for name in chosen.peers}
    for name, packages in missing.items():
        if packages:
            print(f"left out: {not_installed(name, *packages)}", file=stream)
    return replace(chosen, peers=tuple(name for name in chosen.peers if not missing[name]))
