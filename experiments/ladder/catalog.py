"""What the ladder is made of: rungs (size, length, batch) and recipes (what optimizes, with which settings)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baoc.planners import lr_multipliers
from experiments.runs import Cell
from experiments.workloads.enwik8 import LENGTH, WIDTHS, hidden_parameters

BETA2 = (0.95, 0.98, 0.999)
DECAY = (0.0, 0.1, 0.5)
"""Weight decay times the learning rate is this times the workload's learning rate, whatever the learning rate is."""
EVAL_TOKENS = 2**16


@dataclass(frozen=True, order=True)
class Rung:
    """A size, a length and a batch.

    >>> Rung("0.2m", 20, 2048).steps
    1920
    """

    size: str
    ratio: float
    """Tokens per non-embedding parameter."""
    batch: int
    """Tokens in a step."""

    @property
    def parameters(self) -> int:
        return hidden_parameters(WIDTHS[self.size])

    @property
    def steps(self) -> int:
        return round(self.ratio * self.parameters / self.batch)

    @property
    def sequences(self) -> int:
        return self.batch // LENGTH

    @property
    def folder(self) -> str:
        """Runs of one batch are in one folder."""
        return f"{self.batch // 1024}k"

    @property
    def label(self) -> str:
        return f"{self.size.upper()}, D/N {self.ratio:g}, {self.folder}"

    def cell(self, recipe: Recipe, lr_factor: float, seed: int = 0) -> Cell:
        return Cell(f"llama-{self.size}/enwik8", recipe.spelling(lr_factor), seed, lr_factor, self.steps)


@dataclass(frozen=True)
class Recipe:
    """Configurations of hidden weights and of embeddings and head, with the settings that AdamW is tuned over."""

    hidden: str
    edges: str = "adamw-32"
    multipliers: bool = False
    """Embeddings and vectors learn faster, as in plans (``baoc.planners.lr_multipliers``)."""
    beta2: float = 0.999
    decay: float = 0.1

    def spelling(self, lr_factor: float) -> str:
        """Return the method's name.

        >>> Recipe("muon-8", multipliers=True, beta2=0.95).spelling(0.5)
        'hidden=muon-8; embedding=adamw-32 x4; head=adamw-32; vector=adamw-32 x2; betas=(0.9, 0.95); weight_decay=0.2'
        """
        table, vector = (
            (f" x{lr_multipliers.TABLE:g}", f" x{lr_multipliers.VECTOR:g}") if self.multipliers else ("", "")
        )
        roles = f"hidden={self.hidden}; embedding={self.edges}{table}; head={self.edges}; vector=adamw-32{vector}"
        return f"{roles}; betas=(0.9, {self.beta2:g}); weight_decay={self.decay / lr_factor:g}"


PLAIN = Recipe("adamw-32")
FACTORED = "adamw[m=int8,v=factored]"
RECIPES = {
    "AdamW32": PLAIN,
    "muon-8": Recipe("muon-8", FACTORED),
    "muon[m=int4]": Recipe("muon-4", "adamw[m=int4,v=factored]"),
    "adamw[m=int8,v=factored]": Recipe(FACTORED, FACTORED),
    "spectral": Recipe("spectral", FACTORED),
}
"""What plans choose, beside AdamW32; settings are AdamW32's best."""
SAME_LR = {"adamw[m=int8,v=factored]": "AdamW32", "muon[m=int4]": "muon-8"}
"""Recipes that differ from another one in formats only use its best learning rate instead of a search of their own."""
FIRST = Rung("0.05m", 20, 2048)
"""Where AdamW32 is tuned."""
MOST = 7
"""Learning rates that a search tries at most."""
MOST_SEEDS = 2
FORMATS = ("muon[m=int4]", "adamw[m=int8,v=factored]")
RULES = ("AdamW32", "muon-8", "spectral")


@dataclass(frozen=True)
class Climb:
    """Recipes on a rung, and how hard they are tuned there."""

    rung: Rung
    recipes: tuple[str, ...]
    tries: int = 3
    """Learning rates; the first one is the best of a rung with as many steps."""
    seeds: int = 1
    """Runs with the best learning rate."""


LADDER = (
    Climb(FIRST, RULES[:2]),
    Climb(Rung("0.05m", 5, 2048), RULES[:2], tries=4),
    Climb(Rung("0.2m", 5, 2048), RULES[:2], tries=2),
    Climb(FIRST, RULES[2:], tries=2),
    Climb(Rung("0.05m", 5, 2048), RULES[2:], tries=1),
    Climb(Rung("0.05m", 80, 2048), RULES, tries=1),
    Climb(Rung("0.2m", 5, 2048), RULES[2:], tries=1),
    Climb(FIRST, FORMATS),
    Climb(Rung("0.05m", 5, 2048), FORMATS),
    Climb(Rung("0.2m", 20, 2048), RULES[:2], tries=1),
    Climb(Rung("0.8m", 5, 2048), RULES[:2], tries=1),
    Climb(Rung("0.05m", 80, 2048), FORMATS),
    Climb(Rung("0.2m", 5, 2048), FORMATS),
    Climb(Rung("0.2m", 80, 2048), RULES[:2], tries=1),
    Climb(Rung("0.2m", 20, 2048), (*RULES[2:], *FORMATS), tries=1),
    Climb(Rung("0.8m", 5, 2048), RULES[2:], tries=1),
    Climb(Rung("0.8m", 20, 2048), RULES[:2], tries=1),
    Climb(Rung("0.05m", 320, 2048), RULES, tries=2),
    Climb(Rung("0.2m", 20, 8192), RULES, tries=2),
    Climb(Rung("0.2m", 80, 2048), RULES[2:], tries=1),
    Climb(Rung("0.8m", 20, 8192), RULES, tries=2),
    Climb(Rung("3m", 5, 8192), RULES, tries=2),
    Climb(Rung("3m", 20, 8192), RULES, tries=1),
    Climb(Rung("0.8m", 80, 8192), RULES, tries=1),
)
"""The most telling first."""


def with_settings(recipe: Recipe, best: Recipe, *, multipliers: bool) -> Recipe:
    """Return a recipe with AdamW32's best betas and decay."""
    return replace(recipe, beta2=best.beta2, decay=best.decay, multipliers=multipliers)
