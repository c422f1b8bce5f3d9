"""A ladder of runs: one family of models on one corpus, at several sizes, lengths and batches."""

from __future__ import annotations

from experiments.ladder.catalog import RECIPES, Climb, Recipe, Rung
from experiments.ladder.running import run

__all__ = ["RECIPES", "Climb", "Recipe", "Rung", "run"]
