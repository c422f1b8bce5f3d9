"""From a cell to its row: train, go on where a killed run was, evaluate."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from baoc.core.plan import PlanError
from experiments import workloads
from experiments.runs import ranks
from experiments.runs.cell import Cell, Row, RunOptions
from experiments.runs.outcome import digest, outcome
from experiments.runs.running import Running, checkpoint_in
from experiments.runs.variants import method_of
from experiments.workloads import Workload


@dataclass(frozen=True)
class Progress:
    """Whom to tell how a run goes."""

    step: Callable[[int, int, float], None] = field(default=lambda step, steps, loss: None)
    note: Callable[[str], None] = field(default=lambda text: None)


@functools.lru_cache(maxsize=8)  # an experiment goes round its workloads, once for each seed
def workload_of(name: str, options: workloads.Options) -> Workload:
    return workloads.get(name, options)


def train_cell(
    cell: Cell,
    options: RunOptions,
    progress: Progress | None = None,
    folder: Path | None = None,
    default: Row | None = None,
) -> Row:
    """Train, evaluate, and say all that the tables need.

    A diverged run (its loss is not finite) ends early; a budget that no plan fits is a row too, with the ``error``.
    Checkpoints go to ``folder``, and a run that left one there goes on from it. The caller removes the folder once the
    row is safe.

    ``default`` is the row of the same run without its variant. If the plan after the warm-up is the same, all that
    follows would be the same too: the run ends, and its row has the default's numbers and ``same_plan``.
    """
    progress = progress or Progress()
    workload = workload_of(cell.workload, options.workload)
    method = method_of(cell.method, cell.variant)
    row: Row = {
        **cell.fields,
        "key": cell.key,
        "settings": options.settings,
        "label": method.label,
        "lr": cell.lr_factor * workload.lr,
        "metric": workload.metric.name,
        "higher_is_better": workload.metric.higher_is_better,
    }
    next(workload.train_batches(seed=cell.seed))  # reads the data, which is no part of the training time
    try:
        running = _begun(cell, workload, options, progress, folder)
        if _train(running, options, progress, folder, default):
            return {**(default or {}), **row, "error": None, "same_plan": True}
    except PlanError as error:
        return {**row, "error": str(error)}
    return {**row, "error": None, **outcome(running, options.eval_batches)}


def _begun(cell: Cell, workload: Workload, options: RunOptions, progress: Progress, folder: Path | None) -> Running:
    def begin() -> Running:
        return Running(cell, workload, method_of(cell.method, cell.variant), ranks.local(options.device))

    running = begin()
    if folder is None or not checkpoint_in(folder).exists():
        return running
    try:
        running.load(folder)
        progress.note(f"going on from step {running.record.step} of {cell.steps}")
        return running
    except Exception as error:  # whatever a method's own load_state_dict raises
        progress.note(f"starting over: the checkpoint in {str(folder)!r} cannot be used ({error})")
        shutil.rmtree(folder, ignore_errors=True)
        return begin()


def _train(running: Running, options: RunOptions, progress: Progress, folder: Path | None, default: Row | None) -> bool:
    """Train to the end; return True if it ended early because the plan is the default's."""
    cell, record = running.cell, running.record
    expected = default["plan"]["digest"] if default and default["error"] is None else None
    batches = running.workload.train_batches(seed=cell.seed, start=record.step)
    while record.step < cell.steps:
        loss = running.advance(lambda: next(batches))
        progress.step(record.step, cell.steps, loss)
        if not math.isfinite(loss):
            return False
        if record.step == running.warmup and expected is not None and digest(running.optimizer.plan) == expected:  # type: ignore[attr-defined]
            return True
        is_due = record.step % options.checkpoint_every == 0 and record.step < cell.steps
        if folder is not None and is_due and ranks.is_first():
            running.save(folder)
    return False
