"""The page of these experiments, from the stored runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from experiments import paired
from experiments.rules import cells
from experiments.rules.cells import ADAMW, DEFAULT, LANGUAGE
from experiments.rules.recipes import Recipe
from experiments.rules.running import Run
from experiments.rules.siblings import DEPTH, LENGTH, SIBLINGS, WIDTH
from experiments.runs import Store, markdown
from experiments.runs.page import estimate

ABOUT = """\
Prototypes in plain torch around the library's own updates, on siblings of GPT-2 (Alpaca) and Llama (GSM8K) of {depth}
layers and width {width} with {sizes} parameters, sequences of {length} tokens, batches of {batches} sequences, a
warm-up of 30 steps, then a cosine to a tenth, and weight decay 0.1. Embeddings and heads are not tied. *Default* is the
default plan at a quarter of AdamW16's state when these runs were made: `muon-8`, `adamw[m=int8,v=factored]` for
embeddings (lr x4) and heads (lr x1), `adamw-32` for vectors (lr x2). The learning rate is the best of four for AdamW32
over 1,000 steps on one seed: {lrs}. Numbers are test losses, or differences of test losses in percent (less is better):
mean ± standard error over seeds, seed by seed; without ±, one seed."""


class Losses:
    """Test losses of stored runs."""

    def __init__(self, store: Store) -> None:
        self.rows = {row["key"]: row for row in store.rows}

    def of(self, sibling: str, recipe: Recipe, steps: int) -> dict[int, float]:
        """Return losses by seed."""
        rows = {seed: self.rows.get(Run(sibling, recipe, seed, steps).key) for seed in range(10)}
        return {seed: row["test_loss"] for seed, row in rows.items() if row is not None and row["test_loss"]}

    def bytes_of(self, recipe: Recipe, steps: int) -> float | None:
        """Return the bytes per parameter that the GPT's run held; prototypes hold fp32."""
        row = self.rows.get(Run("gpt", recipe, 0, steps).key)
        return None if row is None else row["state_bytes"] / row["parameters"]


def text(store: Store, command: str) -> str:
    """Return all but the reading."""
    losses, all_siblings = Losses(store), [SIBLINGS[name] for name in LANGUAGE]
    about = ABOUT.format(
        depth=DEPTH, width=WIDTH, length=LENGTH,
        sizes=_list(f"{each.parameters:,}" for each in all_siblings),
        batches=_list(str(each.batch) for each in all_siblings),
        lrs=_list(f"{each.lr:g}" for each in all_siblings),
    )  # fmt: skip
    parts = ["# Rules, free changes and momentum", "", about, "", f"Made by `{command}`.", ""]
    parts += ["## Rules that hold more state", "", *memory_table(losses), ""]
    parts += ["## Changes that cost no bytes: a factorial experiment", "", *factorial_table(losses), ""]
    parts += ["## Changes that cost no bytes, one by one", "", *single_table(losses), ""]
    parts += ["## Rules without momentum, by batch size and length", "", *momentum_table(losses), ""]
    return "\n".join(parts)


def memory_table(losses: Losses) -> list[str]:
    """Rules with more state against the default plan."""
    lines = []
    for recipe in (ADAMW, *cells.MEMORY):
        held = losses.bytes_of(recipe, cells.STEPS)
        if held is None:
            continue
        told = []
        for sibling in LANGUAGE:
            found = losses.of(sibling, recipe, cells.STEPS)
            told += [estimate(list(found.values()), ".3f")]
            told += [paired.difference(found, losses.of(sibling, DEFAULT, cells.STEPS)) if recipe != DEFAULT else ""]
        lines.append([f"`{recipe.key}`", f"{held:.1f}", *told])
    header = ["Recipe", "B/param (GPT, prototypes in fp32)", "GPT", "to default (%)", "Llama", "to default (%)"]
    return markdown.table(header, lines, numbers=True)


def main_effects(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return every factor's main effect and its standard error, for values in the order of the design.

    The error comes from what main effects leave unexplained, interactions of factors included.

    >>> levels = cells.design()
    >>> effects = main_effects([5.0 + 2.0 * cell[3] for cell in levels])
    >>> [round(effect, 6) + 0.0 for effect, _ in effects]
    [0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0]
    """
    design = cells.design()
    count, mean = len(design), statistics.fmean(values)
    halves = [sum(level * value for level, value in zip(column, values)) / count for column in zip(*design)]
    fitted = [mean + sum(half * level for half, level in zip(halves, cell)) for cell in design]
    freedom = count - 1 - len(halves)
    error = math.sqrt(sum((value - fit) ** 2 for value, fit in zip(values, fitted)) / freedom)
    return [(2 * half, error * math.sqrt(4 / count)) for half in halves]


def factorial_table(losses: Losses) -> list[str]:
    """Main effects in percent of the mean loss."""
    found = {}
    for sibling in LANGUAGE:
        cell_losses = [
            losses.of(sibling, cells.recipe_at(levels), cells.FACTORIAL_STEPS).get(0) for levels in cells.design()
        ]
        complete = [loss for loss in cell_losses if loss is not None]
        if len(complete) == len(cell_losses):
            mean = statistics.fmean(complete)
            found[sibling] = [(100 * effect / mean, 100 * error / mean) for effect, error in main_effects(complete)]
    lines = []
    for index, factor in enumerate(cells.FACTORS):
        effects = [found[sibling][index] if sibling in found else None for sibling in LANGUAGE]
        lines.append([factor, *("-" if each is None else f"{each[0]:+.2f} ± {each[1]:.2f}" for each in effects)])
    about = (
        f"{len(cells.design())} cells, {cells.FACTORIAL_STEPS} steps, one seed: main effects in percent of the loss. "
        "The standard error is of the residuals of the main effects, in which interactions are."
    )
    return [about, "", *markdown.table(["Change", *map(_title, LANGUAGE)], lines, numbers=True)]


def single_table(losses: Losses) -> list[str]:
    """Single changes against the same plan without them."""
    pairs = [(recipe, DEFAULT) for recipe in cells.SINGLE]
    others = [Recipe(hidden=hidden, edges=edges) for hidden, edges in cells.OTHER_PLANS.items()]
    pairs += [(replace(base, head_lr=2.0), base) for base in others]
    lines = []
    for steps in (cells.FACTORIAL_STEPS, cells.STEPS):
        for recipe, base in pairs:
            told = [
                paired.difference(losses.of(sibling, recipe, steps), losses.of(sibling, base, steps))
                for sibling in LANGUAGE
            ]
            if any(each != "-" for each in told):
                lines.append([f"`{recipe.key}`", f"`{base.key}`", str(steps), *told])
    return markdown.table(["Change", "Against", "Steps", *map(_title, LANGUAGE)], lines, numbers=True)


def momentum_table(losses: Losses) -> list[str]:
    """Losses of Muon with int8 momentum, and differences to it."""
    lines = []
    for batch, steps in cells.SCALES:
        base = Recipe(hidden=cells.HIDDEN[0], batch=batch)
        first = losses.of("gpt", base, steps)
        others = [losses.of("gpt", replace(base, hidden=hidden), steps) for hidden in cells.HIDDEN[1:]]
        told = [paired.difference(found, first) for found in others]
        size = f"{round(batch * SIBLINGS['gpt'].batch)} x {LENGTH}"
        lines.append([size, str(steps), estimate(list(first.values()), ".3f"), *told])
    header = ["Batch", "Steps", f"`{cells.HIDDEN[0]}`", *(f"`{hidden}` (%)" for hidden in cells.HIDDEN[1:])]
    return markdown.table(header, lines, numbers=True)


def _list(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"


def _title(name: str) -> str:
    return {"gpt": "GPT", "llama": "Llama", "vit": "ViT"}[name]
