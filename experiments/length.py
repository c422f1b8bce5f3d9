"""How long Muon's updates should be: a length that follows the signal against a constant one.

    python -m experiments.length --data DIR --jobs 2 --output docs/results/length

What is finished is kept in OUTPUT/runs.jsonl and not repeated; the page is OUTPUT.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from experiments import paired
from experiments.paired import Setting
from experiments.runs import RunOptions, Store, markdown
from experiments.runs.batch import Job
from experiments.runs.page import estimate

MUON = "muon-8 else adamw[m=int8,v=factored]"
BASELINE = "adamw32"
CAPS = (1, 0.7, 0.5, 0.45)
METHODS = {
    "constant": f"{MUON}; update_rms=1e9; max_update_rms=0.4",
    **{f"at most {cap:g}": f"{MUON}; max_update_rms={cap:g}" for cap in CAPS},
}
ABOUT = """\
Test loss of `{muon}` against AdamW32's at the same learning rate, in percent (less is better): mean ± standard error
over seeds, seed by seed; a cell without ± is of one seed. *Constant* updates all have an RMS of 0.4 lr. The others
follow the signal: their RMS is in proportion to that of the momentum over the root of the running mean square of the
gradient (`update_rms`), up to a limit (`max_update_rms`). *lr* is relative to the best one for AdamW32. Models have
about a million parameters."""

SETTINGS = (
    Setting("gpt-small/alpaca", 250),
    Setting("llama-small/gsm8k", 250),
    Setting("t5-small/gsm8k", 150, lr_factor=2.0),
    Setting("vit-small/cifar10", 300),
    Setting("unet-small/cifar10", 80, lr_factor=2.0, batch_size=4),
    Setting("gpt-small/alpaca-gsm8k", 120),
    Setting("vit-small/cifar10-classes", 200, lr_factor=0.5),
)
"""Those of the frontier, at the learning rate that is best for AdamW32 there."""
FINE_TUNING = ("gpt-small/alpaca-gsm8k", "vit-small/cifar10-classes")
SHARES = {1.0: "1", 1 / 3: "1/3", 0.1: "1/10"}
"""Learning rates of fine-tuning, relative to the best: many people use smaller ones."""


def cases(settings: Sequence[Setting]) -> list[tuple[Setting, str]]:
    """Settings with their learning rate, and what the page calls it."""
    return [
        (replace(setting, lr_factor=setting.lr_factor * share), name)
        for setting in settings
        for share, name in SHARES.items()
        if share == 1 or setting.workload in FINE_TUNING
    ]


def jobs(settings: Sequence[Setting], seeds: int, options: RunOptions) -> list[Job]:
    """Seed by seed."""
    return [
        setting.job(setting.run(method, seed), options)
        for seed in range(seeds)
        for setting, _ in cases(settings)
        for method in (BASELINE, *METHODS.values())
    ]


def page(settings: Sequence[Setting], store: Store, seeds: int, command: str) -> str:
    lines = []
    for setting, lr in cases(settings):
        base, *ours = (
            paired.losses(store, [setting.run(method, seed) for seed in range(seeds)])
            for method in (BASELINE, *METHODS.values())
        )
        told = [paired.difference(losses, base) for losses in ours]
        lines.append([setting.workload, str(setting.steps), lr, estimate(list(base.values()), ".3f"), *told])
    header = ["Workload", "Steps", "lr", "AdamW32's loss", *(name.capitalize() for name in METHODS)]
    parts = ["# How long updates are", "", ABOUT.format(muon=MUON), "", f"Made by `{command}`.", ""]
    return "\n".join([*parts, *markdown.table(header, lines, numbers=True), ""])


def main(argv: Sequence[str] | None = None) -> None:
    paired.main("length", __doc__, partial(jobs, SETTINGS), partial(page, SETTINGS), argv)


if __name__ == "__main__":
    main()
