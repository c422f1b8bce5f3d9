"""How fast momentum may rise: ``momentum_rise`` of the normalised mechanisms, over runs of several lengths.

    python -m experiments.momentum --data DIR --jobs 2 --output docs/results/momentum

What is finished is kept in OUTPUT/runs.jsonl and not repeated; the page is OUTPUT.md.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baoc.core.mechanisms.normalised import MOMENTUM_RISE
from experiments import workloads
from experiments.runs import Cell, Row, RunOptions, Store, markdown
from experiments.runs.batch import Job, run_all
from experiments.runs.page import estimate, write_page

CONFIGURATION = "muon-8 else adamw[m=int8,v=factored]"
RISES = (0, 10, 20, 40)
ABOUT = """\
Momentum of step t is `min(nesterov_momentum, t / (t + momentum_rise))`, and {default:g} is the default. *Loss without*
is the test loss with `{configuration}` and a momentum of 0.95 from the first step on, `momentum_rise=0`; other columns
are differences to that in percent (less is better), mean ± standard error over seeds, seed by seed. The learning rate
is the best for AdamW32; a cell without ± is of one seed."""


@dataclass(frozen=True)
class Setting:
    workload: str
    steps: int
    lr_factor: float = 1.0
    batch_size: int | None = None

    def cell(self, rise: float, seed: int) -> Cell:
        return Cell(self.workload, f"{CONFIGURATION}; momentum_rise={rise:g}", seed, self.lr_factor, self.steps)


SETTINGS = (
    Setting("gpt-small/alpaca", 250),
    Setting("llama-small/gsm8k", 250),
    Setting("t5-small/gsm8k", 150, lr_factor=2.0),
    Setting("vit-small/cifar10", 300),
    Setting("unet-small/cifar10", 80, lr_factor=2.0, batch_size=4),
)
"""Those of the frontier that begin from scratch."""


def jobs(settings: Sequence[Setting], seeds: int, options: RunOptions) -> list[Job]:
    """Seed by seed."""
    return [
        Job(
            setting.cell(rise, seed),
            replace(options, workload=replace(options.workload, batch_size=setting.batch_size)),
        )
        for seed in range(seeds)
        for setting in settings
        for rise in RISES
    ]


def page(settings: Sequence[Setting], store: Store, seeds: int, command: str) -> str:
    lines = []
    for setting in settings:
        found = {rise: _losses([store.find(setting.cell(rise, seed)) for seed in range(seeds)]) for rise in RISES}
        without = found[RISES[0]]
        differences = (
            [100 * (loss / without[seed] - 1) for seed, loss in losses.items() if seed in without]
            for losses in found.values()
        )
        told = (estimate(each, "+.2f") for each in differences)
        lines.append([setting.workload, str(setting.steps), estimate(list(without.values()), ".3f"), *list(told)[1:]])
    header = ["Workload", "Steps", "Loss without", *(f"{rise:g}" for rise in RISES[1:])]
    about = ABOUT.format(default=MOMENTUM_RISE.default, configuration=CONFIGURATION)
    parts = ["# How fast momentum rises", "", about, "", f"Made by `{command}`.", ""]
    return "\n".join([*parts, *markdown.table(header, lines, numbers=True), ""])


def _losses(rows: Sequence[Row | None]) -> dict[int, float]:
    """By seed, of those that were trained to the end."""
    return {seed: row["test_loss"] for seed, row in enumerate(rows) if row is not None and row["error"] is None}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--data", help="has alpaca/, gsm8k/ and cifar10/ (default: $BAOC_DATA, or the hub)")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the runs; the page is OUTPUT.md")
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make the page of what is there")
    arguments = parser.parse_args(argv)
    options = RunOptions(workloads.Options(data=arguments.data), eval_batches=20)
    with Store(arguments.output).writing("momentum") as store:
        if not arguments.tables_only:
            run_all(jobs(SETTINGS, arguments.seeds, options), store, arguments.jobs)
        words = ["--seeds", str(arguments.seeds), "--output", str(arguments.output)]
        command = shlex.join(["python", "-m", "experiments.momentum", *words])
        print(write_page(arguments.output, page(SETTINGS, store, arguments.seeds, command)), file=sys.stderr)


if __name__ == "__main__":
    main()
