"""Which runs each question needs, the most telling first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any

from experiments.rules.recipes import Recipe
from experiments.rules.running import Run

LANGUAGE = ("gpt", "llama")
ADAMW = Recipe(hidden="adamw-32", edges="adamw-32", embedding_lr=1.0, vector_lr=1.0)
STEPS = 1000
DEFAULT = Recipe()


def tuning() -> Iterator[Run]:
    """AdamW32's learning rate, on one seed."""
    for lr in (1.0, 2.0, 0.5, 4.0):
        for sibling in LANGUAGE:
            yield Run(sibling, replace(ADAMW, lr=lr), 0, STEPS)
    for lr in (1.0, 2.0, 0.5):
        yield Run("vit", replace(ADAMW, lr=lr), 0, STEPS)


MEMORY = (
    DEFAULT,
    Recipe(hidden="soap"),
    Recipe(hidden="soap", raw=True, rms=2.0),
    Recipe(look_ahead=0.5),
    Recipe(variance=0.95),
    Recipe(hidden="normuon-8"),
    Recipe(hidden="soap-kl"),
    Recipe(hidden="soap-short"),
    Recipe(hidden="muon-32", edges="adamw-32"),
    Recipe(look_ahead=0.2),
    Recipe(variance=0.999),
    Recipe(edges="adamw-32"),
    Recipe(hidden="soap", raw=True),
    Recipe(hidden="soap", edges="adamw-32"),
)
"""Rules that hold more than the default plan's one byte per parameter, and the default plan."""


def memory() -> Iterator[Run]:
    """One seed of every rule."""
    for recipe in MEMORY:
        for sibling in LANGUAGE:
            yield Run(sibling, recipe, 0, STEPS)


FACTORS: Mapping[str, Mapping[str, Any]] = {
    "cautious weight decay": {"cautious_decay": True},
    "decay independent of the lr schedule": {"constant_decay": True},
    "embeddings x8 instead of x4": {"embedding_lr": 8.0},
    "head x2 instead of x1": {"head_lr": 2.0},
    "momentum 0.98 instead of 0.95": {"momentum": 0.98},
    "momentum falls to 0.85 at the end": {"final_momentum": 0.85},
    "update RMS 0.6 instead of 0.4": {"rms": 1.5},
    "no Nesterov": {"nesterov": False},
}
GENERATORS = ("BCD", "ACD", "ABC", "ABD")
"""Of the last four factors: a 2^(8-4) design of resolution IV, so no pair of factors is mixed with a main effect."""
FACTORIAL_STEPS = 300


def design() -> list[tuple[int, ...]]:
    """Return the levels, -1 or 1, of all factors in every cell.

    >>> cells = design()
    >>> len(cells), len(cells[0]), [sum(column) for column in zip(*cells)] == [0] * 8
    (16, 8, True)
    """
    cells = []
    for base in product((-1, 1), repeat=4):
        named = dict(zip("ABCD", base))
        cells.append((*base, *(prod(named[letter] for letter in word) for word in GENERATORS)))
    return cells


def recipe_at(levels: tuple[int, ...]) -> Recipe:
    """Return the recipe of a cell."""
    changes: dict[str, Any] = {}
    for level, change in zip(levels, FACTORS.values()):
        changes |= change if level > 0 else {}
    return Recipe(**changes)


def factorial(sibling: str) -> Iterator[Run]:
    """All cells on one model."""
    for levels in design():
        yield Run(sibling, recipe_at(levels), 0, FACTORIAL_STEPS)


BALLS = (4.0, 8.0, 2.0)
HEADS = (Recipe(head_lr=2.0), Recipe(head_lr=4.0))
SPLIT = Recipe(split=True)
COEFFICIENTS = (Recipe(coefficients="polar-express"), Recipe(coefficients="muon"))
SINGLE = (
    *(Recipe(**change) for change in FACTORS.values()),
    HEADS[1],
    SPLIT,
    *(Recipe(ball=size) for size in BALLS),
    *COEFFICIENTS,
)
"""One change each."""


def ball() -> Iterator[Run]:
    """Hidden matrices of constant norm, at three relative steps."""
    for size in BALLS:
        for sibling in LANGUAGE:
            yield Run(sibling, Recipe(ball=size), 0, FACTORIAL_STEPS)


OTHER_PLANS = {"spectral": "colnorm", "adamw-8": "adamw-8"}
"""Embeddings and heads by hidden matrices, in a plan without state and one without Muon."""


def heads() -> Iterator[Run]:
    """Faster heads over 1,000 steps, then on three seeds."""
    for sibling in LANGUAGE:
        yield Run(sibling, DEFAULT, 0, STEPS)
        yield Run(sibling, HEADS[0], 0, STEPS)
    for seed in range(3):
        for sibling in LANGUAGE:
            yield Run(sibling, DEFAULT, seed, FACTORIAL_STEPS)
            yield Run(sibling, HEADS[0], seed, FACTORIAL_STEPS)


def other_heads() -> Iterator[Run]:
    """Faster heads in other plans, and still faster ones."""
    for hidden, edges in OTHER_PLANS.items():
        for head_lr in (1.0, 2.0):
            yield Run("gpt", Recipe(hidden=hidden, edges=edges, head_lr=head_lr), 0, FACTORIAL_STEPS)
    for sibling in LANGUAGE:
        yield Run(sibling, HEADS[1], 0, FACTORIAL_STEPS)


def coefficients() -> Iterator[Run]:
    """Coefficients of Newton-Schulz iterations, on three seeds."""
    for seed in range(3):
        for sibling in LANGUAGE:
            for recipe in (DEFAULT, *COEFFICIENTS):
                yield Run(sibling, recipe, seed, FACTORIAL_STEPS)


HIDDEN = ("muon-8", "muon[m=int4]", "spectral", "sinkhorn", "colnorm")
SCALES = ((0.5, 150), (2.0, 150), (0.5, 600), (8.0, 150))
"""Batches relative to a sibling's, and steps: 4 sequences, 16, 64; and 4 sequences for four times the steps."""


def momentum_free(seeds: range = range(3)) -> Iterator[Run]:
    """Rules without momentum against Muon's with 4 and 8 bits."""
    for seed in seeds:
        for batch, steps in SCALES:
            for hidden in HIDDEN:
                yield Run("gpt", Recipe(hidden=hidden, batch=batch), seed, steps)


def split() -> Iterator[Run]:
    """Queries, keys and values of the GPT as three matrices; other siblings have none that are fused."""
    for steps in (FACTORIAL_STEPS, STEPS):
        for seed in range(3):
            for recipe in (DEFAULT, SPLIT):
                yield Run("gpt", recipe, seed, steps)


QUESTIONS: Mapping[str, Callable[[], Iterator[Run]]] = {
    "tuning": tuning,
    "memory": memory,
    "factorial-gpt": partial(factorial, "gpt"),
    "heads": heads,
    "momentum-free": momentum_free,
    "other-heads": other_heads,
    "factorial-llama": partial(factorial, "llama"),
    "ball": ball,
    "coefficients": coefficients,
    "split": split,
}
"""Runs by question."""
