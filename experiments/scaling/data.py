"""What the laws are fitted to: published end-of-run losses of AdamW and Muon, and the ladder."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

from baoc import parse
from baoc.core.roles import Role
from baoc.planners.effect_table import EffectTable
from baoc.planners.model_facts import SCRATCH
from baoc.planners.scaling import Scale
from experiments.ladder.catalog import LADDER, Rung
from experiments.ladder.page import changes, test_losses
from experiments.ladder.running import BASELINE, Found, Ladder, climbed, opened
from experiments.workloads import Options

PUBLISHED = Path(__file__).with_name("published.csv")
LADDER_STUDY = "our ladder"
CURVES = "Fantastic optimizers"
"""The published study with tuned runs of several lengths at each size."""


@dataclass(frozen=True)
class Comparison:
    """Muon on hidden matrices beside AdamW, both at the end of a run."""

    study: str
    is_tuned: bool
    """Both were tuned by one protocol at each size."""
    parameters: float
    tokens: float
    percent: float
    """Change of the loss; negative: Muon's is lower."""

    @property
    def ratio(self) -> float:
        """Tokens per parameter."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Point:
    """A point of AdamW's curve: percent of the loss that e times the steps are worth."""

    study: str
    parameters: float
    tokens: float
    worth: float


@dataclass(frozen=True)
class Lag:
    """A rule without momentum beside Muon: ln of the steps that it needs for the loss of Muon, by its own steps."""

    study: str
    steps: float
    parameters: float
    tokens: float
    percent: float | None = None
    """Loss beyond Muon's after as many steps, if that was measured."""
    log_ratio: float | None = None
    """ln of the ratio of steps to one loss, if that was measured."""


TRACK_3 = Lag(
    "modded-nanogpt track 3, results 12 and 22", 8225, 162_500_000, 8225 * 524_288, None, math.log(8225 / 3325)
)
"""Muon without momentum needs 8,225 steps to a loss of 3.28 where Muon needs 3,325, n = 4 (KellerJordan/modded-nanogpt,
records/track_3_optimization). Its 162.5M parameters include embeddings and head."""


@dataclass(frozen=True)
class Data:
    """Everything that is fitted."""

    comparisons: list[Comparison]
    points: list[Point]
    lags: list[Lag]


def read(ladder: Path, table: Scale) -> Data:
    """Return published rows and finished runs of the ladder.

    Args:
        ladder: OUTPUT of ``python -m experiments ladder``.
        table: a typical run of the effect table.
    """
    comparisons, curves = _published()
    points = [point for (study, parameters), curve in curves.items() for point in _points(study, parameters, curve)]
    lags = [TRACK_3, _table_lag(table)]
    runs = Ladder(opened(ladder), Options())
    found = climbed(runs, LADDER)
    muon = changes(runs, found, "muon-8")
    for rung, percent in muon.items():
        comparisons.append(Comparison(LADDER_STUDY, True, rung.parameters, _tokens(rung), percent))
    for rung, percent in changes(runs, found, "spectral").items():
        if rung in muon:
            lag = percent - muon[rung]
            lags.append(Lag(LADDER_STUDY, rung.steps, rung.parameters, _tokens(rung), lag))
    for parameters, curve in _ladder_curves(runs, found).items():
        points += _points(LADDER_STUDY, parameters, curve)
    return Data(comparisons, points, lags)


def _table_lag(table: Scale) -> Lag:
    """Return what the effect table says of hidden matrices without momentum beside Muon."""
    known = EffectTable.load().effects[SCRATCH][Role.MATRIX]
    percent = known[parse("spectral")].loss - known[parse("muon-8")].loss
    return Lag("the effect table", table.steps, table.parameters, table.tokens, percent)


def _published() -> tuple[list[Comparison], dict[tuple[str, float], dict[float, float]]]:
    comparisons: list[Comparison] = []
    curves: dict[tuple[str, float], dict[float, float]] = {}
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            parameters, tokens, adamw, muon = (
                float(row[name]) for name in ("parameters", "tokens", "adamw_loss", "muon_loss")
            )
            percent = 100 * (muon / adamw - 1)
            comparisons.append(Comparison(row["study"], row["equally_tuned"] == "yes", parameters, tokens, percent))
            if row["study"] == CURVES:
                curves.setdefault((row["study"], parameters), {})[tokens] = adamw
    return comparisons, curves


def _ladder_curves(runs: Ladder, found: Found) -> dict[float, dict[float, float]]:
    """Return the losses of the tuned AdamW32 by size and tokens, for batches of one size."""
    curves: dict[float, dict[float, float]] = {}
    smallest = min(rung.batch for rung in found)
    for rung, made in found.items():
        if rung.batch == smallest and BASELINE in made and (losses := test_losses(runs, rung, *made[BASELINE])):
            curves.setdefault(rung.parameters, {})[_tokens(rung)] = mean(losses.values())
    return curves


def _tokens(rung: Rung) -> float:
    return rung.ratio * rung.parameters


def _points(study: str, parameters: float, curve: dict[float, float]) -> list[Point]:
    """Return the slopes between neighbors of a curve."""
    found = []
    lengths = sorted(curve)
    for short, long in pairwise(lengths):
        worth = 100 * math.log(curve[short] / curve[long]) / math.log(long / short)
        if worth > 0:
            found.append(Point(study, parameters, math.sqrt(short * long), worth))
    return found
