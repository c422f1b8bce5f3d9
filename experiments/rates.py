"""How fast embeddings and vectors should learn beside hidden matrices: the factors of ``baoc.planners.lr_multipliers``.

    python -m experiments.rates --data DIR --jobs 2 --output docs/results/rates

What is finished is kept in OUTPUT/runs.jsonl and not repeated; the page is OUTPUT.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from baoc.planners import lr_multipliers
from experiments import paired
from experiments.runs import Cell, RunOptions, Store, markdown
from experiments.runs.batch import Job
from experiments.runs.page import estimate

EDGES = {"muon-8": "adamw[m=int8,v=factored]", "spectral": "colnorm", "adamw-8": "adamw-8"}
"""What embeddings and heads have, by what hidden weights have: a usual plan, the cheapest, and one without Muon."""
FACTORS: tuple[dict[str, float], ...] = (
    {"embedding": 2.0},
    {"embedding": 4.0},
    {"vector": 2.0},
    {"embedding": lr_multipliers.TABLE, "vector": lr_multipliers.VECTOR},
)
"""Of the learning rate, by role; one where a role is not named."""
ABOUT = """\
The learning rate of one role of parameters times a factor; all others, and all of the first column, have the rate that
is best for AdamW32. Numbers are differences of the test loss to the first column's in percent (less is better), mean ±
standard error over seeds, seed by seed; without ±, one seed. By default, plans for training from scratch have
x{table:g} for embeddings that are tables of at least twice as many rows as columns and x{vector:g} for vectors."""


@dataclass(frozen=True)
class Setting(paired.Setting):
    hidden: tuple[str, ...] = ("muon-8",)

    def cell(self, hidden: str, factors: dict[str, float], seed: int) -> Cell:
        return self.run(method(hidden, factors), seed)


SETTINGS = (
    Setting("gpt-small/alpaca", 250, hidden=tuple(EDGES)),
    Setting("llama-small/gsm8k", 250, hidden=tuple(EDGES)),
    Setting("t5-small/gsm8k", 150, lr_factor=2.0, hidden=("muon-8", "spectral")),
    Setting("vit-small/cifar10", 300),
    Setting("unet-small/cifar10", 80, lr_factor=2.0, batch_size=4),
    Setting("gpt-small/alpaca-gsm8k", 120),
    Setting("vit-small/cifar10-classes", 200, lr_factor=0.5),
    Setting("gpt-small/alpaca", 1000),
)
"""Those of the frontier, and a longer one."""


def method(hidden: str, factors: dict[str, float]) -> str:
    """By role, with all that is not a factor the same.

    >>> method("spectral", {"vector": 2.0})
    'hidden=spectral; embedding=colnorm; head=colnorm; vector=adamw-32 x2'
    """
    chosen = {"embedding": EDGES[hidden], "head": EDGES[hidden], "vector": "adamw-32"}
    scaled = [f"{role}={name}{f' x{factors[role]:g}' if role in factors else ''}" for role, name in chosen.items()]
    return "; ".join([f"hidden={hidden}", *scaled])


def jobs(settings: Sequence[Setting], seeds: int, options: RunOptions) -> list[Job]:
    """Seed by seed."""
    return [
        setting.job(setting.cell(hidden, factors, seed), options)
        for seed in range(seeds)
        for setting in settings
        for hidden in setting.hidden
        for factors in ({}, *FACTORS)
    ]


def page(settings: Sequence[Setting], store: Store, seeds: int, command: str) -> str:
    lines = []
    for hidden in EDGES:
        for setting in settings:
            without, *scaled = (
                paired.losses(store, [setting.cell(hidden, factors, seed) for seed in range(seeds)])
                for factors in ({}, *FACTORS)
            )
            if without:
                told = (paired.difference(losses, without) for losses in scaled)
                loss = estimate(list(without.values()), ".3f")
                lines.append([f"{setting.workload}, {setting.steps} steps", f"`{hidden}`", loss, *told])
    header = ["Workload", "Hidden weights", "Loss", *map(_label, FACTORS)]
    about = ABOUT.format(table=lr_multipliers.TABLE, vector=lr_multipliers.VECTOR)
    parts = ["# Learning rates by role", "", about, "", f"Made by `{command}`.", ""]
    return "\n".join([*parts, *markdown.table(header, lines, numbers=True), ""])


def _label(factors: dict[str, float]) -> str:
    return ", ".join(f"{role}s x{factor:g}" for role, factor in factors.items())


def main(argv: Sequence[str] | None = None) -> None:
    paired.main("rates", __doc__, partial(jobs, SETTINGS), partial(page, SETTINGS), argv)


if __name__ == "__main__":
    main()
