"""The order of the runs: AdamW32 is tuned on the smallest rung; then every recipe climbs the ladder."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from experiments.ladder.catalog import (
    BETA2,
    DECAY,
    EVAL_TOKENS,
    FIRST,
    LADDER,
    MOST,
    PLAIN,
    RECIPES,
    SAME_LR,
    Climb,
    Recipe,
    Rung,
    with_settings,
)
from experiments.runs import Row, RunOptions, Store
from experiments.runs.batch import Job, run_all
from experiments.workloads import Options

NAME, BASELINE, UNTUNED = "ladder", "AdamW32", "AdamW32, plain"
START = 1.0
"""The learning rate that is tried first on the first rung, as a factor on the workload's."""
FACTOR = 2.0
Found = dict[Rung, dict[str, tuple[Recipe, float]]]
"""Recipes and their best learning rates, by rung and name."""


@dataclass
class Ladder:
    """Finished runs by batch, and the way to get those that are missing."""

    stores: dict[str, Store]
    options: Options
    stream: TextIO | None = None
    """Where progress goes; None: nothing is trained, and what is missing is not there."""

    def loss(self, rung: Rung, recipe: Recipe, lr_factor: float, seed: int = 0, split: str = "validation") -> float:
        """Return the loss of a run, after training it if need be; infinite if it diverged or is not there."""
        row = self.row(rung, recipe, lr_factor, seed)
        value = None if row is None else row.get(f"{split}_loss")
        return math.inf if value is None else value

    def row(self, rung: Rung, recipe: Recipe, lr_factor: float, seed: int = 0) -> Row | None:
        cell, store = rung.cell(recipe, lr_factor, seed), self.stores[rung.folder]
        if self.stream is not None:
            options = RunOptions(
                replace(self.options, batch_size=rung.sequences),
                eval_batches=EVAL_TOKENS // rung.batch,
                checkpoint_every=500,
            )
            run_all([Job(cell, options)], store, 1, self.stream, rung.label)
        return store.find(cell)

    def best_lr(self, rung: Rung, recipe: Recipe, start: float, tries: int = MOST) -> float:
        """Return the best learning rate of a grid that is extended until the best one is inside it, or tries are up."""
        tried = {start: self.loss(rung, recipe, start)}
        for _ in range(tries - 1):
            best = min(tried, key=lambda factor: (tried[factor], factor))
            beside = [factor for factor in (best * FACTOR, best / FACTOR) if factor not in tried]
            if not beside or math.isinf(tried[best]):
                return best
            tried[beside[0]] = self.loss(rung, recipe, beside[0])
        return min(tried, key=lambda factor: (tried[factor], factor))

    def tuned(self) -> tuple[Recipe, float]:
        """Return AdamW32's best settings on the first rung, one after another, and its learning rate."""
        best, lr = PLAIN, self.best_lr(FIRST, PLAIN, START)
        alternatives: Sequence[Iterable[Recipe]] = (
            [replace(best, beta2=beta2) for beta2 in BETA2],
            [replace(best, decay=decay) for decay in DECAY],
            [replace(best, multipliers=True)],
        )
        for field, options in zip(("beta2", "decay", "multipliers"), alternatives):
            for option in options:
                candidate = replace(best, **{field: getattr(option, field)})
                if self.loss(FIRST, candidate, lr) < self.loss(FIRST, best, lr):
                    best = candidate
        return best, self.best_lr(FIRST, best, lr)


def opened(output: Path, stack: ExitStack | None = None) -> dict[str, Store]:
    """Return the stores of all batches; with a stack, open for writing."""
    stores = {climb.rung.folder: Store(output / climb.rung.folder) for climb in LADDER}
    if stack is None:
        return stores
    return {name: stack.enter_context(store.writing(NAME)) for name, store in stores.items()}


def run(output: Path, options: Options, ladder: Sequence[Climb] = LADDER, stream: TextIO | None = None) -> None:
    """Train what is missing, in the order of a ladder.

    Args:
        output: a folder for the runs.
        options: where the corpus is.
        ladder: or only its first climbs.
        stream: where progress goes.
    """
    with ExitStack() as stack:
        climbed(Ladder(opened(output, stack), options, stream or sys.stderr), ladder)


def climbed(ladder: Ladder, climbs: Sequence[Climb]) -> Found:
    """Return the recipes of some climbs with their best learning rates, after training what is missing.

    A search starts from the best learning rate of the last rung with as many steps, or else of the first rung. There,
    AdamW32 also runs without the settings that were tuned.
    """
    best, lr = ladder.tuned()
    found: Found = {FIRST: {BASELINE: (best, lr), UNTUNED: (PLAIN, ladder.best_lr(FIRST, PLAIN, START))}}
    for climb in climbs:
        rung, here = climb.rung, found.setdefault(climb.rung, {})
        for name in climb.recipes:
            recipe = with_settings(RECIPES[name], best, multipliers=best.multipliers)
            if name in SAME_LR:
                factor = here[SAME_LR[name]][1]
            else:
                factor = ladder.best_lr(rung, recipe, _start(found, rung, name, lr), climb.tries)
            for seed in range(climb.seeds):
                ladder.row(rung, recipe, factor, seed)
            here[name] = recipe, factor
    return found


def _start(found: Found, rung: Rung, name: str, default: float) -> float:
    """Return the learning rate that a search begins with."""
    known = [(other, made[name][1]) for other, made in found.items() if name in made and other is not rung]
    alike = [factor for other, factor in known if other.steps == rung.steps]
    first = [factor for other, factor in known if other == FIRST]
    return (alike or first or [default])[-1]
