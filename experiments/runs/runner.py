"""Run an experiment: what is finished stays, the rest is trained, and the tables and figures are made."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from experiments import methods
from experiments.packages import not_installed
from experiments.runs import report
from experiments.runs.catalog import EXPERIMENTS, Experiment
from experiments.runs.cell import Cell, Row, RunError, RunOptions
from experiments.runs.progress import Board
from experiments.runs.series import Series
from experiments.runs.store import Store
from experiments.runs.summary import REFERENCE
from experiments.runs.training import Progress, train_cell, workload_of
from experiments.runs.tuning import TUNING_SEED, choose
from experiments.runs.variants import method_of


@dataclass(frozen=True)
class Request:
    """What a person asks for. Empty means the experiment's own."""

    experiment: str
    output: Path | None = None
    workloads: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    seeds: int = 3
    steps: int | None = None
    tuning: bool = True
    """Try every learning rate of a method; if not, take the middle one."""
    reuse: tuple[Path, ...] = ()
    """Folders of other experiments, whose runs need not be trained again."""
    options: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        if self.experiment not in EXPERIMENTS:
            raise RunError(f"there is no experiment {self.experiment!r}. There are {', '.join(EXPERIMENTS)}.")
        for name in ("seeds", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RunError(f"{name} is {value}; it must be at least 1.")
        for variant in self.variants:
            if variant not in self.what.variants:
                known = f"It has {', '.join(self.what.variants)}." if self.what.variants else "It has none."
                raise RunError(f"the experiment {self.experiment!r} has no variant {variant!r}. {known}")

    @property
    def what(self) -> Experiment:
        return EXPERIMENTS[self.experiment]

    @property
    def chosen_variants(self) -> tuple[str, ...]:
        return self.variants or self.what.variants

    @property
    def folder(self) -> Path:
        return self.output or Path("results") / self.experiment


def run(request: Request, stream: TextIO | None = None) -> list[Path]:
    """Train what is missing; the files with the results."""
    stream = stream or sys.stderr
    series = all_series(request, stream)
    board = Board(series, stream)
    store = Store(request.folder)
    finished = [Store(folder, must_exist=True) for folder in request.reuse]
    with store.writing(request.experiment):
        for one in series:
            store.check(one, request.options.settings)
        for one in series:
            _take_finished(one, request, store, finished)
        common = _run_at_one_lr(series, request, store, board) if request.what.one_lr else {}
        for one in series:
            _run_series(one, request, store, board, common.get(one.workload))
    return report.write(store, request.what)


def tables_of(request: Request) -> list[Path]:
    """The files with the results of the runs that are there; nothing is trained."""
    return report.write(Store(request.folder), request.what)


def all_series(request: Request, stream: TextIO) -> list[Series]:
    """Everything that was asked for, checked before anything is trained."""
    found = []
    usable = _usable_methods(request, stream)
    for workload_name in request.workloads or request.what.workloads:
        workload = workload_of(workload_name, request.options.workload)
        next(workload.train_batches(seed=TUNING_SEED))  # if data is missing, say so now
        steps = request.steps or workload.steps * request.what.longer
        for name in usable:
            factors = methods.get(name).lr_factors
            grid = factors if request.tuning else (factors[len(factors) // 2],)
            seeds = tuple(range(TUNING_SEED, TUNING_SEED + request.seeds))
            # The learning rate that all share must not hang on one seed.
            tuning_seeds = seeds if request.what.one_lr and name == REFERENCE else seeds[:1]
            variants = request.chosen_variants
            found.append(Series(workload_name, name, steps, grid, seeds, variants, request.what.one_lr, tuning_seeds))
    return found


def _usable_methods(request: Request, stream: TextIO) -> Sequence[str]:
    """Those asked for must be there; of the experiment's own, those without their packages are left out."""
    usable = []
    reference = [REFERENCE] if request.what.one_lr else []
    for name in dict.fromkeys([*reference, *(request.methods or request.what.methods)]):
        missing = methods.get(name).missing
        for variant in request.chosen_variants:
            method_of(name, variant)
        if not missing:
            usable.append(name)
            continue
        reason = not_installed(name, *missing)
        if request.methods:
            raise RunError(reason)
        print(f"left out: {reason}", file=stream)
    return usable


def _take_finished(series: Series, request: Request, store: Store, others: Sequence[Store]) -> None:
    """Copy the runs that another experiment has trained already."""
    wanted = {cell.key: cell for cell in series.cells if store.find(cell) is None}
    for row in (row for other in others for row in other.rows):
        cell = wanted.get(row["key"])
        if cell is not None and row["settings"] == request.options.settings:
            store.add({**row, **series.about(wanted.pop(cell.key))})


def _run_at_one_lr(every_series: Sequence[Series], request: Request, store: Store, board: Board) -> dict[str, float]:
    """Every method with the lr factor that is best for AdamW32; that factor, by workload."""
    common: dict[str, float] = {}
    for series in every_series:
        if series.method == REFERENCE:
            tried = [_run_cell(cell, series, request, store, board) for cell in series.tuning]
            common[series.workload] = choose(tried, series.grid).lr_factor
        for cell in series.finals(common[series.workload])[0]:
            _run_cell(cell, series, request, store, board)
    return common


def _run_series(series: Series, request: Request, store: Store, board: Board, common: float | None) -> None:
    before, tried = board.position, []
    for cell in series.tuning:
        tried.append(_run_cell(cell, series, request, store, board))
        if tried[-1]["error"]:  # no plan fits: nor would it at another learning rate
            board.skip(series.workload, series.steps, series.size - (board.position - before))
            return
    best = choose(tried, series.grid).lr_factor
    if best == common and len(series.grid) > 1:
        board.skip(series.workload, series.steps, series.size_at_one_lr)
    for cells in series.finals(best):
        for index, cell in enumerate(cells):
            row = _run_cell(cell, series, request, store, board)
            if row["error"]:
                board.skip(series.workload, series.steps, len(cells) - index - 1)
                break


def _run_cell(cell: Cell, series: Series, request: Request, store: Store, board: Board) -> Row:
    row = store.find(cell)
    if row is not None:
        board.finished(cell)
        return row
    board.begin(cell, method_of(cell.method, cell.variant).label)
    folder = store.running(cell)
    row = train_cell(cell, request.options, Progress(board.step, board.note), folder)
    row |= series.about(cell)
    store.add(row)
    shutil.rmtree(folder, ignore_errors=True)
    board.end(cell)
    if row["error"]:
        board.note(f"  no run: {row['error']}")
    elif row["diverged_at"]:
        board.note(f"  diverged at step {row['diverged_at']}")
    return row
