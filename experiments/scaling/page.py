"""The page of the laws: coefficients, residuals, what was held out, and what they say at other scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from baoc.core.text import human_count
from baoc.planners.scaling import Law, Laws, Scale
from experiments.runs import markdown
from experiments.scaling.data import Comparison, Data
from experiments.scaling.fit import LEAST_POINTS, Fit, log_ratio, saved_law, without, worth_law

ABOUT = """\
The effect table has short runs of small models. Published end-of-run losses say what is left of Muon's gain in long
runs of large ones. The planner carries effects from scratch to the user's scale with these laws. N is the number of
parameters (without embeddings where a source says so), D the number of tokens. Gains are changes of the loss against an
AdamW that was tuned by the same protocol.

- **Worth of steps**: e times the steps lower the loss by `{worth}` percent; {worth_error:.0%} scatter.
- **Steps saved**: AdamW needs `exp(s)` times Muon's steps for Muon's loss, `s = {saved}`;
  {within:.0%} scatter within a study, {between:.0%} between studies
  (by how much the fit misses a study that is held out, if that is more than its likelihood says).
- **Gain of Muon** on hidden matrices: `-s` times the worth of steps.
- **Formats**: a difference between formats in the effect table is the same share of the steps at any scale, so it
  shrinks like the worth of steps. So does the tolerance below which two plans are a tie.
- **Rules without momentum** need `exp({constant:.2f} {slope:+.2f} ln(steps))` times Muon's steps."""
LIMITS = """\
- All of it is language models from scratch. The laws are not used for fine-tuning, for models without normalization
  layers, or with a table of your own.
- Beyond {largest} parameters, everything is extrapolated. Large studies agree that the gain shrinks; that it never
  changes its sign is an assumption of the formula.
- Studies that did not tune AdamW and Muon alike found more ({untuned} the gain).
  They are not part of the fit.
- Rules without momentum: {lags} measurements, one of them published, at 0.5M tokens per step. Other batches may differ.
- Formats of state were compared at small scale only. Published parity of 8-bit with 32-bit Muon up to 2.7B parameters
  (arXiv 2509.23106) is not part of the fit."""
SCALES = ((1e6, 20), (125e6, 20), (125e6, 320), (1e9, 20), (1e9, 160), (7e9, 20), (7e9, 1000), (70e9, 20))
"""Parameters, tokens per parameter."""
BATCH = 524_288


def text(data: Data, laws: Laws, fit: Fit, command: str) -> str:
    """Return the page."""
    about = ABOUT.format(
        worth=_formula(laws.worth),
        saved=_formula(laws.saved),
        worth_error=laws.worth.within,
        within=laws.saved.within,
        between=laws.saved.between,
        constant=laws.no_momentum[0],
        slope=laws.no_momentum[1],
    )
    limits = LIMITS.format(
        largest=human_count(round(laws.parameters[1])), untuned=_untuned(data, fit), lags=len(data.lags)
    )
    parts = ["# How effects change with scale", "", limits, "", about, "", f"Made by `{command}`.", ""]
    parts += ["## What the laws say", "", *_scales(laws), "", "## Held out", "", *_held_out(data, laws), ""]
    parts += [
        "## Every comparison",
        "",
        *_comparisons(data, laws, fit),
        "",
        "## Worth of steps",
        "",
        *_points(data, laws),
    ]
    parts += ["", "## Rules without momentum", "", *_lags(data, laws)]
    return "\n".join([*parts, ""])


def _formula(law: Law) -> str:
    size = "N / 1e9" if law.knee == 0 else f"1 + N / {law.knee:.3g}"
    return f"{math.exp(law.constant):.3g} ({size})^{-law.size:.2f} (D / 20 N)^{-law.length:.2f}"


def _scales(laws: Laws) -> list[str]:
    rows = []
    for parameters, ratio in SCALES:
        tokens = ratio * parameters
        scale = Scale(parameters, tokens, tokens / BATCH)
        mean, low, high = laws.gain(scale)
        where = [human_count(round(parameters)), f"{ratio:g}", f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"]
        rows.append(
            [*where, f"{mean + laws.lag(scale):+.2f}", f"{laws.worth_of(scale):.1f}", f"{laws.carried(scale):.2f}"]
        )
    header = [
        "N",
        "D/N",
        "Muon (%)",
        "No momentum, 0.5M tokens per step (%)",
        "Worth of e x steps (%)",
        "Formats: left",
    ]
    return [*markdown.table(header, rows, numbers=True), "", "Batches of 0.5M tokens; 90% intervals."]


def _comparisons(data: Data, laws: Laws, fit: Fit) -> list[str]:
    rows = []
    for each in sorted(data.comparisons, key=lambda one: (not one.is_tuned, one.study, one.parameters, one.tokens)):
        mean, low, high = _predicted(each, laws)
        factor = fit.offsets.get(each.study, 1.0)
        residual = "left out" if each.percent >= 0 else f"{math.log(each.percent / (mean * factor)):+.2f}"
        place = [each.study, human_count(round(each.parameters)), f"{each.ratio:.0f}", f"{each.percent:+.2f}"]
        rows.append([*place, f"{mean:+.2f} ({low:+.2f} to {high:+.2f})", f"{mean * factor:+.2f}", residual])
    header = ["Study", "N", "D/N", "Measured (%)", "Law (%)", "With the study's effect (%)", "ln(measured / fitted)"]
    return markdown.table(header, rows)


def _untuned(data: Data, fit: Fit) -> str:
    studies = dict.fromkeys(each.study for each in data.comparisons if not each.is_tuned)
    return ", ".join(f"{study} {fit.offsets[study]:.1f} times" for study in studies)


def _held_out(data: Data, laws: Laws) -> list[str]:
    largest = 1e9
    parts = [(f"models above {human_count(round(largest))}", [c for c in data.comparisons if c.parameters >= largest])]
    parts += [(study, [c for c in data.comparisons if c.study == study]) for study in dict.fromkeys(_studies(data))]
    rows = []
    for name, held in parts:
        rest = without(data, above=largest) if name.startswith("models above") else without(data, study=name)
        tuned = [each for each in held if each.is_tuned]
        if not tuned or len(rest.points) < LEAST_POINTS:
            continue
        worth = worth_law(rest.points)
        saved = replace(saved_law(rest.comparisons, worth).law, between=laws.saved.between)
        refitted = Laws(
            worth, saved, laws.no_momentum, 0, 0,
            (1.0, laws.parameters[1]), 0.0, laws.table, laws.largest,
        )  # fmt: skip
        found = [_predicted(each, refitted) for each in tuned]
        inside = sum(low <= each.percent <= high for each, (_, low, high) in zip(tuned, found))
        means = [f"{fmean(each.percent for each in tuned):+.2f}", f"{fmean(mean for mean, _, _ in found):+.2f}"]
        rows.append([name, str(len(tuned)), *means, f"{inside} of {len(tuned)}"])
    header = ["Held out", "Comparisons", "Measured, mean (%)", "Predicted, mean (%)", "Inside the 90% interval"]
    return [
        "Fits without the rows that they are compared with. Only equally tuned rows count.",
        "",
        *markdown.table(header, rows),
    ]


def _studies(data: Data) -> Sequence[str]:
    return [each.study for each in data.comparisons]


def _predicted(each: Comparison, laws: Laws) -> tuple[float, float, float]:
    return laws.gain(Scale(each.parameters, each.tokens, 1.0))


def _points(data: Data, laws: Laws) -> list[str]:
    rows = [
        [
            *(point.study, human_count(round(point.parameters)), f"{point.tokens / point.parameters:.0f}"),
            *(f"{point.worth:.2f}", f"{laws.worth.mean(point.parameters, point.tokens):.2f}"),
        ]
        for point in data.points
    ]
    return markdown.table(["Study", "N", "D/N", "Measured (%)", "Law (%)"], rows)


def _lags(data: Data, laws: Laws) -> list[str]:
    constant, slope = laws.no_momentum
    rows = []
    for lag in sorted(data.lags, key=lambda one: one.steps):
        law = math.exp(max(0.0, constant + slope * math.log(lag.steps)))
        measured = math.exp(log_ratio(lag, laws.worth))
        rows.append(
            [lag.study, human_count(round(lag.parameters)), f"{lag.steps:.0f}", f"{measured:.2f}", f"{law:.2f}"]
        )
    return markdown.table(["Study", "N", "Steps", "Times Muon's steps", "Law"], rows)
