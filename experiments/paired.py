"""Small experiments whose runs are compared seed by seed: one command each, which goes on where it was stopped."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from experiments import workloads
from experiments.runs import Cell, RunOptions, Store
from experiments.runs.batch import Job, run_all
from experiments.runs.page import estimate, write_page


@dataclass(frozen=True)
class Setting:
    """A workload, at the learning rate that is best for AdamW32."""

    workload: str
    steps: int
    lr_factor: float = 1.0
    batch_size: int | None = None

    def run(self, method: str, seed: int) -> Cell:
        return Cell(self.workload, method, seed, self.lr_factor, self.steps)

    def job(self, cell: Cell, options: RunOptions) -> Job:
        return Job(cell, replace(options, workload=replace(options.workload, batch_size=self.batch_size)))


Jobs = Callable[[int, RunOptions], Sequence[Job]]
"""Of so many seeds."""
Page = Callable[[Store, int, str], str]
"""Of what is stored, for so many seeds, with the command that makes it."""


def losses(store: Store, cells: Iterable[Cell]) -> dict[int, float]:
    """Test losses by seed, of those cells that were trained to the end."""
    rows = {cell.seed: store.find(cell) for cell in cells}
    return {seed: row["test_loss"] for seed, row in rows.items() if row is not None and row["error"] is None}


def difference(found: Mapping[int, float], without: Mapping[int, float]) -> str:
    """Of losses to others in percent: mean and standard error over the seeds that both have.

    >>> difference({0: 4.5, 1: 4.4, 2: 4.0}, {0: 5.0, 1: 5.0})
    '-11.00 ± 1.00'
    """
    return estimate([100 * (loss / without[seed] - 1) for seed, loss in found.items() if seed in without], "+.2f")


def main(name: str, about: str | None, jobs: Jobs, page: Page, argv: Sequence[str] | None = None) -> None:
    """The command of an experiment, ``python -m experiments.NAME``."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--data", help="has alpaca/, gsm8k/ and cifar10/ (default: $BAOC_DATA, or the hub)")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the runs; the page is OUTPUT.md")
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make the page of what is there")
    arguments = parser.parse_args(argv)
    options = RunOptions(workloads.Options(data=arguments.data), eval_batches=20)
    with Store(arguments.output).writing(name) as store:
        if not arguments.tables_only:
            run_all(jobs(arguments.seeds, options), store, arguments.jobs)
        words = ["--seeds", str(arguments.seeds), "--output", str(arguments.output)]
        command = shlex.join(["python", "-m", f"experiments.{name}", *words])
        print(write_page(arguments.output, page(store, arguments.seeds, command)), file=sys.stderr)
