"""Run an experiment: what is finished stays, the rest is trained, and the tables and figures are made."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from experiments import methods
from experiments.packages import not_installed
from experiments.runs import paper_page, preflight, ranks, report
from experiments.runs.batch import Job, run_all
from experiments.runs.catalog import EXPERIMENTS, FULL, PAPER, SCALES, SMALL, STAND_INS, Experiment
from experiments.runs.cell import Cell, Row, RunError, RunOptions
from experiments.runs.series import Series
from experiments.runs.store import Store
from experiments.runs.training import workload_of
from experiments.runs.tuning import TUNING_SEED, choose
from experiments.runs.variants import FAMILY, has_variants
from experiments.workloads import DatasetWorkload, Workload


@dataclass(frozen=True)
class Request:
    """What a person asks for. Empty means the experiment's own."""

    experiment: str
    output: Path | None = None
    """The folder of all of the paper's experiments, each of which has a folder in it."""
    workloads: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    seeds: int = 3
    steps: int | None = None
    epochs: int | None = None
    tuning: bool = True
    """Try every learning rate of a method; if not, take the middle one."""
    reuse: tuple[Path, ...] = ()
    """Folders of other experiments, whose runs need not be trained again, besides those in the same output."""
    options: RunOptions = field(default_factory=RunOptions)
    scale: str = SMALL
    jobs: int = 1

    def __post_init__(self) -> None:
        if self.experiment not in EXPERIMENTS:
            raise RunError(f"there is no experiment {self.experiment!r}. There are {', '.join(EXPERIMENTS)}.")
        if self.scale not in self.what.workloads:
            raise RunError(f"there is no scale {self.scale!r}. There are {', '.join(SCALES)}.")
        for name in ("seeds", "steps", "epochs", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RunError(f"{name} is {value}; it must be at least 1.")
        known = (*self.what.variants, *self.what.more_variants)
        for variant in self.variants:
            if variant not in known:
                told = f"It has {', '.join(known)}." if known else "It has none."
                raise RunError(f"the experiment {self.experiment!r} has no variant {variant!r}. {told}")
        if self.variants and not any(map(has_variants, self.methods or self.what.methods)):
            raise RunError(f"only the paper's planner has variants: add --method {FAMILY}@0.5, or another share.")
        if ranks.world() > 1 and self.jobs > 1:
            raise RunError("--jobs and torchrun do not go together: all of torchrun's processes train one model.")

    @property
    def what(self) -> Experiment:
        return EXPERIMENTS[self.experiment]

    @property
    def chosen_variants(self) -> tuple[str, ...]:
        return self.variants or self.what.variants

    @property
    def root(self) -> Path:
        """The folder of all of the paper's experiments at this scale."""
        return self.output or Path("results") / f"paper-{self.scale}"

    @property
    def folder(self) -> Path:
        if self.experiment in PAPER:
            return self.root / self.experiment
        return self.output or Path("results") / self.experiment


def run(request: Request, stream: TextIO | None = None) -> list[Path]:
    """Train what is missing; return the files with the results.

    Raises:
        RunError: a GPU, weights or data are missing. Nothing has been trained then.
    """
    stream = stream or sys.stderr
    with ranks.joined(request.options.device):
        every = all_series(request, stream)
        store = Store(request.folder)
        finished = [Store(folder, must_exist=True) for folder in request.reuse] + _siblings(request)
        with store.writing(request.experiment):
            for series in every:
                store.check(series, request.options.settings)
            for series in every:
                _take_finished(series, request, store, finished)
            _train(every, request, store, stream)
        return tables_of(request) if ranks.is_first() else []


def tables_of(request: Request) -> list[Path]:
    """The files with the results of the runs that are there; nothing is trained."""
    files = report.write(Store(request.folder), request.what)
    return [*files, paper_page.write(request.root)] if request.experiment in PAPER else files


def all_series(request: Request, stream: TextIO) -> list[Series]:
    """Everything that was asked for, checked before anything is trained."""
    names = request.workloads or _own_workloads(request, stream)
    lines = preflight.missing(names, request.options)
    if lines and ranks.is_first():
        print(*(f"missing: {line}" for line in lines), sep="\n", file=stream, flush=True)
    if lines:
        count = "1 thing is" if len(lines) == 1 else f"{len(lines)} things are"
        raise RunError(f"{count} missing (see above), and nothing was trained. --workload trains some of them only.")
    usable = _usable_methods(request, stream)
    found = []
    for workload_name in names:
        workload = workload_of(workload_name, request.options.workload)
        next(workload.train_batches(seed=TUNING_SEED))  # if data is damaged, say so now
        for name in usable:
            found.append(_series(workload_name, name, workload, request))
    return found


def _series(workload_name: str, name: str, workload: Workload, request: Request) -> Series:
    factors = methods.get(name).lr_factors
    middle = factors[len(factors) // 2]
    grid = tuple(middle * factor for factor in workload.lr_spread) or factors
    seeds = tuple(range(TUNING_SEED, TUNING_SEED + request.seeds))
    # The learning rate that all share must not hang on one seed.
    is_common = request.what.one_lr and name == request.what.reference
    return Series(
        workload_name,
        name,
        _steps(workload_name, workload, request),
        grid if request.tuning else (middle,),
        seeds,
        request.chosen_variants if has_variants(name) else (),
        seeds if is_common else seeds[:1],
    )


def _steps(name: str, workload: Workload, request: Request) -> int:
    if request.steps:
        return request.steps
    own = request.what.epochs.get(name.partition("/")[0]) if request.scale == FULL else None
    epochs = request.epochs or own
    if epochs and isinstance(workload, DatasetWorkload):
        return math.ceil(epochs * workload.count("train") / workload.batch_size)
    return workload.steps * (request.what.longer if request.scale == SMALL else 1)


def _own_workloads(request: Request, stream: TextIO) -> tuple[str, ...]:
    """The experiment's, or what stands for them where there is no data."""
    own = request.what.workloads[request.scale]
    if request.scale != SMALL or request.options.workload.data_folder is not None:
        return own
    found: dict[str, list[str]] = {}
    for name in own:
        size, _, dataset = name.partition("/")
        found.setdefault(f"{size}/{STAND_INS.get(dataset, dataset)}", []).append(name)
    for name, replaced in found.items():
        if replaced != [name] and ranks.is_first():
            print(f"{name} stands for {' and '.join(replaced)}: no data folder (--data or BAOC_DATA)", file=stream)
    return tuple(found)


def _usable_methods(request: Request, stream: TextIO) -> Sequence[str]:
    """Those asked for must be there; of the experiment's own, those without their packages are left out."""
    usable = []
    reference = [request.what.reference] if request.what.one_lr else []
    for name in dict.fromkeys([*reference, *(request.methods or request.what.methods)]):
        missing = methods.get(name).missing
        if not missing:
            usable.append(name)
            continue
        reason = not_installed(name, *missing)
        if request.methods:
            raise RunError(reason)
        if ranks.is_first():
            print(f"left out: {reason}", file=stream)
    return usable


def _siblings(request: Request) -> list[Store]:
    """The paper's other experiments in the same folder: they share many runs."""
    if request.experiment not in PAPER:
        return []
    folders = (request.root / name for name in PAPER if name != request.experiment)
    return [Store(folder) for folder in folders if (folder / "runs.jsonl").exists()]


def _take_finished(series: Series, request: Request, store: Store, others: Sequence[Store]) -> None:
    """Copy the runs that another experiment has trained already."""
    wanted = {cell.key: cell for cell in series.cells if store.find(cell) is None}
    for row in (row for other in others for row in other.rows):
        cell = wanted.get(row["key"])
        if cell is not None and row["settings"] == request.options.settings:
            store.add({**row, **series.about(wanted.pop(cell.key))})


def _train(every: Sequence[Series], request: Request, store: Store, stream: TextIO) -> None:
    """Train in rounds, since what is trained next depends on learning rates and plans that earlier rounds found."""

    def train(what: str, jobs: list[Job]) -> None:
        run_all(jobs, store, request.jobs, stream, what)

    def job(cell: Cell, series: Series, default: Row | None = None) -> Job:
        about = series.about(cell)
        return Job(cell, request.options, tuple(about["lr_grid"]), about["phase"] == "final", default)

    if request.what.one_lr:
        references = [series for series in every if series.method == request.what.reference]
        train("its learning rate", [job(cell, series) for series in references for cell in series.tuning])
        common = {series.workload: _best(series, store) for series in references}
        train(
            "at one learning rate",
            [job(cell, series) for series in every for cell in series.finals(common[series.workload])[0]],
        )
    train("the first of each", [job(series.tuning[0], series) for series in every])
    fitting = [series for series in every if not store.row(series.tuning[0])["error"]]
    train("learning rates", [job(cell, series) for series in fitting for cell in series.tuning])
    best = {series: _best(series, store) for series in fitting}
    train("seeds", [job(cell, series) for series in fitting for cell in series.finals(best[series])[0]])
    jobs = []
    for series in fitting:
        plain, *varied = series.finals(best[series])
        for cells in varied:
            for cell, default in zip(cells, plain):
                jobs.append(job(cell, series, store.row(default) if request.what.skips_same_plan else None))
    train("variants", jobs)


def _best(series: Series, store: Store) -> float:
    return choose([store.row(cell) for cell in series.tuning], series.grid).lr_factor
