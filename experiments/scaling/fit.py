"""The fit: least squares for the worth of steps, and a random effect by study for the steps that Muon saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baoc.planners.scaling import TOKENS_PER_PARAMETER, Law, Laws, Scale
from experiments.scaling.data import Comparison, Data, Lag, Point

KNEES = tuple(10 ** (exponent / 10) for exponent in range(50, 82))
"""Of the law of saved steps, in parameters: below the smallest published model, so that the slope that is extrapolated
is that of all published rows."""
LEAST_POINTS = 4
"""Of AdamW's curves, to fit the worth of steps."""
RATIOS = (0.0, *(10 ** (exponent / 10) for exponent in range(-30, 31)))
"""Of the variance between studies to that within."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """The law of saved steps and what else its fit found."""

    law: Law
    offsets: dict[str, float]
    """Factor on the gain by study: the random effect, or the geometric mean where AdamW was not tuned alike."""


def worth_law(points: Sequence[Point]) -> Law:
    """Return the percent of the loss that e times the steps are worth, by ordinary least squares of its logarithm."""
    rows = np.array([Law(0, 0, 0).features(point.parameters, point.tokens) for point in points])
    values = np.log([point.worth for point in points])
    found, *_ = np.linalg.lstsq(rows, values, rcond=None)
    residuals = values - rows @ found
    variance = float(residuals @ residuals) / max(1, len(points) - 3)
    return _law(found, variance * np.linalg.pinv(rows.T @ rows), 0.0, 0.0, math.sqrt(variance))


def saved_law(comparisons: Sequence[Comparison], worth: Law) -> Fit:
    """Return the law of saved steps by restricted maximum likelihood, searching its knee and the variance ratio.

    Only studies that tuned both count. Rows where Muon was not better have no logarithm: they are left out, and the
    page lists them.
    """
    used = [each for each in comparisons if each.is_tuned and each.percent < 0]
    values = np.log([_saved(each, worth) for each in used])
    studies = sorted({each.study for each in used})
    groups = np.array([[float(each.study == study) for study in studies] for each in used])
    best: tuple[float, float, float] = (-math.inf, KNEES[0], 0.0)
    for knee in KNEES:
        rows = _features(used, knee)
        for ratio in RATIOS:
            best = max(best, (_likelihood(rows, values, groups, ratio)[0], knee, ratio))
    _, knee, ratio = best
    rows = _features(used, knee)
    _, found, covariance, variance = _likelihood(rows, values, groups, ratio)
    shift = ratio * groups.T @ np.linalg.solve(np.eye(len(used)) + ratio * groups @ groups.T, values - rows @ found)
    law = _law(found, covariance, knee, math.sqrt(ratio * variance), math.sqrt(variance))
    offsets = dict(zip(studies, np.exp(shift).tolist()))
    for study in sorted({each.study for each in comparisons if not each.is_tuned}):
        rest = [each for each in comparisons if each.study == study and each.percent < 0]
        logs = [math.log(_saved(each, worth) / law.mean(each.parameters, each.tokens)) for each in rest]
        offsets[study] = math.exp(sum(logs) / len(logs))
    return Fit(law, offsets)


def _saved(each: Comparison, worth: Law) -> float:
    """Return the logarithm of the steps that Muon saves."""
    return -each.percent / worth.mean(each.parameters, each.tokens)


def _features(comparisons: Sequence[Comparison], knee: float) -> Floats:
    law = Law(0, 0, 0, knee)
    return np.array([law.features(each.parameters, each.tokens) for each in comparisons])


def _likelihood(rows: Floats, values: Floats, groups: Floats, ratio: float) -> tuple[float, Floats, Floats, float]:
    """Return the restricted log-likelihood, coefficients, their covariance, and the variance within studies."""
    inverse = np.linalg.inv(np.eye(len(values)) + ratio * groups @ groups.T)
    information = rows.T @ inverse @ rows
    found = np.linalg.solve(information, rows.T @ inverse @ values)
    residuals = values - rows @ found
    free = len(values) - rows.shape[1]
    variance = float(residuals @ inverse @ residuals) / free
    logs = np.linalg.slogdet(information)[1] - np.linalg.slogdet(inverse)[1] + free * math.log(variance)
    return -0.5 * float(logs), found, variance * np.linalg.inv(information), variance


def no_momentum(lags: Sequence[Lag], worth: Law) -> tuple[float, float]:
    """Return constant and slope of the lag of a rule without momentum, by the logarithm of its steps."""
    rows = [(math.log(lag.steps), log_ratio(lag, worth)) for lag in lags]
    if len(rows) == 1:
        return rows[0][1], 0.0
    slope, constant = np.polyfit(*zip(*rows), 1)
    return float(constant), max(0.0, float(slope))


def log_ratio(lag: Lag, worth: Law) -> float:
    """Return the lag as a logarithm of a ratio of steps."""
    if lag.log_ratio is not None:
        return lag.log_ratio
    assert lag.percent is not None
    return lag.percent / worth.mean(lag.parameters, lag.tokens)


def fitted(data: Data, table: Scale, largest: dict[str, float]) -> tuple[Laws, Fit]:
    """Return all laws, rounded as they ship.

    Args:
        data: what they are fitted to.
        table: a typical run of the effect table.
        largest: parameters of the largest model in the effect table, by regime.
    """
    worth = _rounded(worth_law(data.points))
    fit = saved_law(data.comparisons, worth)
    between = round(max(fit.law.between, held_out_error(data)), 4)
    tuned = [each for each in data.comparisons if each.is_tuned]
    sizes = [each.parameters for each in tuned]
    shortest = min([*(each.ratio for each in tuned), TOKENS_PER_PARAMETER])
    constant, slope = no_momentum(data.lags, worth)
    laws = Laws(
        worth,
        replace(_rounded(fit.law), between=between),
        (round(constant, 4), round(slope, 4)),
        comparisons=len(tuned),
        studies=len({each.study for each in tuned}),
        parameters=(min(sizes), max(sizes)),
        shortest=round(shortest, 4),
        table=table,
        largest=largest,
    )
    return laws, fit


def held_out_error(data: Data) -> float:
    """Return by how much a law misses studies that it was not fitted to: the root mean square of the logarithm.

    Few studies say little about how far studies are apart, and likelihood may say that they are not.
    """
    errors = []
    for study in dict.fromkeys(each.study for each in data.comparisons if each.is_tuned):
        rest = without(data, study=study)
        if len(rest.points) < LEAST_POINTS:
            continue  # this study has the curves
        worth = worth_law(rest.points)
        law = saved_law(rest.comparisons, worth).law
        held = [each for each in data.comparisons if each.study == study and each.percent < 0]
        logs = [math.log(_saved(each, worth) / law.mean(each.parameters, each.tokens)) for each in held]
        errors.append(sum(logs) / max(1, len(logs)))
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else 0.0


def _law(found: Floats, covariance: Floats, knee: float, between: float, within: float) -> Law:
    cells = tuple(tuple(float(cell) for cell in row) for row in covariance)
    return Law(*(float(each) for each in found), knee, cells, between, within)


def _rounded(law: Law) -> Law:
    cells = tuple(tuple(round(cell, 6) for cell in row) for row in law.covariance)
    numbers = (round(each, 4) for each in (law.constant, law.size, law.length))
    return Law(*numbers, float(round(law.knee)), cells, round(law.between, 4), round(law.within, 4))


def without(data: Data, *, study: str | None = None, above: float | None = None) -> Data:
    """Return the data without a study, or without models above a size.

    Args:
        data: everything.
        study: is left out.
        above: of this many parameters and more.
    """

    def stays(each: Comparison | Point) -> bool:
        return each.study != study and (above is None or each.parameters < above)

    return Data(
        [each for each in data.comparisons if stays(each)],
        [each for each in data.points if stays(each)],
        [each for each in data.lags if each.study != study],
    )
