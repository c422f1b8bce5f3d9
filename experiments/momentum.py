"""How fast momentum may rise: ``momentum_rise`` of the normalised mechanisms, over runs of several lengths.

    python -m experiments.momentum --data DIR --jobs 2 --output docs/results/momentum

What is finished is kept in OUTPUT/runs.jsonl and not repeated; the page is OUTPUT.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from baoc.core.mechanisms.normalised import MOMENTUM_RISE
from experiments import paired
from experiments.runs import Cell, RunOptions, Store, markdown
from experiments.runs.batch import Job
from experiments.runs.page import estimate

CONFIGURATION = "muon-8 else adamw[m=int8,v=factored]"
RISES = (0, 10, 20, 40)
ABOUT = """\
Momentum of step t is `min(nesterov_momentum, t / (t + momentum_rise))`, and {default:g} is the default. *Loss without*
is the test loss with `{configuration}` and a momentum of 0.95 from the first step on, `momentum_rise=0`; other columns
are differences to that in percent (less is better), mean ± standard error over seeds, seed by seed. The learning rate
is the best for AdamW32; a cell without ± is of one seed."""


@dataclass(frozen=True)
class Setting(paired.Setting):
    def cell(self, rise: float, seed: int) -> Cell:
        return self.run(f"{CONFIGURATION}; momentum_rise={rise:g}", seed)


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
        setting.job(setting.cell(rise, seed), options)
        for seed in range(seeds)
        for setting in settings
        for rise in RISES
    ]


def page(settings: Sequence[Setting], store: Store, seeds: int, command: str) -> str:
    lines = []
    for setting in settings:
        without, *rising = (paired.losses(store, [setting.cell(rise, seed) for seed in range(seeds)]) for rise in RISES)
        told = (paired.difference(losses, without) for losses in rising)
        lines.append([setting.workload, str(setting.steps), estimate(list(without.values()), ".3f"), *told])
    header = ["Workload", "Steps", "Loss without", *(f"{rise:g}" for rise in RISES[1:])]
    about = ABOUT.format(default=MOMENTUM_RISE.default, configuration=CONFIGURATION)
    parts = ["# How fast momentum rises", "", about, "", f"Made by `{command}`.", ""]
    return "\n".join([*parts, *markdown.table(header, lines, numbers=True), ""])


def main(argv: Sequence[str] | None = None) -> None:
    paired.main("momentum", __doc__, partial(jobs, SETTINGS), partial(page, SETTINGS), argv)


if __name__ == "__main__":
    main()
