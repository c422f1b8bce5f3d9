"""The page of the ablation."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from baoc.planners import lr_multipliers
from experiments.ablation.catalog import CONFIGURATIONS, OF_BLOCKS, Setting
from experiments.ablation.effects import Effect, Effects
from experiments.ablation.metrics import Values
from experiments.runs import markdown
from experiments.runs.page import estimate

ABOUT = """\
What happens to the loss when one role of a model's parameters, or one single block, gets a cheaper configuration and
all the rest keeps AdamW32. Numbers are differences of the test loss to AdamW32's in percent (less is better), mean ±
standard error of the differences seed by seed, and the number of seeds: runs of one seed begin with the same weights
and see the same batches. All run at the learning rate that is best for AdamW32. Vectors, and embeddings and heads of
fewer than 4,096 elements, keep AdamW32 always. Adafactor's lr is scaled by 0.2 over the RMS of the weights, which
makes its first updates as long as AdamW's usually are. Where training is from scratch, embeddings have {table:g} times
the learning rate, as in a plan ([rates](rates.md)), and so have those that they are compared with."""

ABOUT_METRICS = """\
One hidden matrix at a time is swapped. Metrics are of that matrix, after a warm-up with AdamW32 of a tenth of the run,
and the mean over seeds. Each number is Spearman's correlation, over the blocks of a workload, of a metric with the
measured difference (mean over seeds). The *ceiling* is what a perfect metric would reach: the differences are noisy,
and the square root of their reliability (mean correlation between seeds, stepped up to the mean by Spearman-Brown) is
the most that can be correlated with them. Of {blocks} blocks, a correlation below about {chance:.2f} in size is within
two standard errors of none."""

Measured = Mapping[str, Mapping[str, Values]]
"""Metrics by workload, block and name."""


def text(settings: Sequence[Setting], effects: Effects, measured: Measured, command: Sequence[str]) -> str:
    about = ABOUT.format(table=lr_multipliers.TABLE)
    parts = ["# One thing swapped at a time", "", about, "", f"Made by `{shlex.join(command)}`.", ""]
    parts += _settings_part(settings, effects)
    for role in CONFIGURATIONS:
        parts += _role_part(role, [setting for setting in settings if role in setting.roles], effects)
    parts += _held_out_part(settings, effects)
    for setting in settings:
        if setting.workload in measured:
            parts += _blocks_part(setting, effects, measured[setting.workload])
    return "\n".join([*parts, ""])


def _settings_part(settings: Sequence[Setting], effects: Effects) -> list[str]:
    rows = [
        [
            setting.workload,
            setting.regime,
            "fitted" if setting.is_fitted else "held out",
            str(setting.steps),
            f"x{setting.lr_factor:g}",
            estimate(losses, ".3f"),
            str(len(losses)),
        ]
        for setting in settings
        if (losses := effects.reference(setting))
    ]
    header = ["Workload", "Regime", "Use", "Steps", "lr", "AdamW32's test loss", "n"]
    return ["## Workloads", "", *markdown.table(header, rows)]


def _role_part(role: str, settings: Sequence[Setting], effects: Effects) -> list[str]:
    found = {setting.label: of[role] for setting in settings if (of := effects.by_role(setting)).get(role)}
    if not found:
        return []
    rows = []
    for name in CONFIGURATIONS[role]:
        of_name = {workload: of[name] for workload, of in found.items() if name in of}
        if of_name:
            held = statistics.fmean(effect.bytes_per_parameter for effect in of_name.values())
            cells = [of_name[workload].text if workload in of_name else "-" for workload in found]
            rows.append([f"`{name}`", f"{held:.2f}", *cells])
    base, _, swapped = role.rpartition("; ")
    title = f"## Swapped: {swapped}, where {base} already" if base else f"## Swapped: {role}"
    about = [f"Differences are to runs with `{base}`, and AdamW32 for the rest.", ""] if base else []
    return ["", title, "", *about, *markdown.table(["Configuration", "B/param", *found], rows, numbers=True)]


def _held_out_part(settings: Sequence[Setting], effects: Effects) -> list[str]:
    rows = []
    for setting in settings:
        if setting.is_fitted:
            continue
        for role, of in effects.by_role(setting).items():
            expected = _expected(role, setting, settings, effects)
            both = [name for name in of if name in expected]
            if len(both) > 2:
                ours, theirs = [expected[name] for name in both], [of[name].mean for name in both]
                rank = spearman(ours, theirs)
                off = statistics.fmean(abs(one - other) for one, other in zip(ours, theirs))
                rows.append(
                    [
                        f"{setting.workload}, {role}",
                        str(len(both)),
                        "-" if rank is None else f"{rank:+.2f}",
                        f"{off:.2f}",
                    ]
                )
    if not rows:
        return []
    about = "What the mean over the fitted workloads of the same regime says about those that were held out."
    header = ["Held out", "Configurations", "Spearman", "Mean error (points)"]
    return ["", "## Held out", "", about, "", *markdown.table(header, rows, numbers=True)]


def _expected(role: str, held_out: Setting, settings: Sequence[Setting], effects: Effects) -> dict[str, float]:
    """The mean over fitted settings of the same regime."""
    fitted = [each for each in settings if each.is_fitted and each.regime == held_out.regime and role in each.roles]
    by_name: dict[str, list[float]] = {}
    for setting in fitted:
        for name, effect in effects.by_role(setting)[role].items():
            by_name.setdefault(name, []).append(effect.mean)
    return {name: statistics.fmean(means) for name, means in by_name.items()}


def _blocks_part(setting: Setting, effects: Effects, measured: Mapping[str, Values]) -> list[str]:
    found = {name: _of_blocks(setting, effects, name) for name in OF_BLOCKS}
    found = {name: of for name, of in found.items() if of}
    if not found:
        return []
    blocks = [block for block in setting.blocks if any(block in of for of in found.values())]
    lines = [[f"`{block}`", *(of[block].text if block in of else "-" for of in found.values())] for block in blocks]
    about = ABOUT_METRICS.format(blocks=len(blocks), chance=2 / max(1, len(blocks) - 1) ** 0.5)
    parts = ["", f"## Single blocks: {setting.workload}", ""]
    parts += markdown.table(["Block", *(f"`{name}`" for name in found)], lines, numbers=True)
    parts += ["", about, "", *(_noise(name, of) for name, of in found.items()), ""]
    metrics = next(iter(measured.values()))
    rows = [["*ceiling*", *(_number(_ceiling(of)) for of in found.values())]]
    for metric in metrics:
        cells = []
        for of in found.values():
            means = [effect.mean for effect in of.values()]
            cells.append(_number(spearman([measured[block][metric] for block in of], means)))
        rows.append([metric, *cells])
    return [*parts, *markdown.table(["Metric", *(f"`{name}`" for name in found)], rows, numbers=True)]


def _of_blocks(setting: Setting, effects: Effects, name: str) -> dict[str, Effect]:
    found = {block: effects.of(setting, block, name) for block in setting.blocks}
    return {block: effect for block, effect in found.items() if effect is not None}


def _noise(name: str, of: Mapping[str, Effect]) -> str:
    """How large the effects are beside what seeds make of them."""
    means, errors = [each.mean for each in of.values()], [each.error for each in of.values() if each.error is not None]
    spread = statistics.stdev(means) if len(means) > 1 else 0.0
    if not errors:
        return f"- `{name}`: blocks differ by {spread:.2f} (standard deviation); with one seed the noise is not known."
    noise = statistics.fmean(error**2 for error in errors) ** 0.5
    verdict = (
        "above the noise" if spread > 2 * noise else "hardly above the noise" if spread > noise else "below the noise"
    )
    told = f"blocks differ by {spread:.2f} points (standard deviation)"
    return f"- `{name}`: {told}, {verdict}: a standard error is {noise:.2f}."


def _ceiling(of: Mapping[str, Effect]) -> float | None:
    common = set.intersection(*({*effect.differences} for effect in of.values()))
    return ceiling([[effect.differences[seed] for effect in of.values()] for seed in sorted(common)])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


# ---- rankings ----


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Correlation of the ranks; None where one of them says nothing.

    >>> spearman([1, 2, 3], [10, 20, 15]), spearman([1, 1, 1], [1, 2, 3])
    (0.5, None)
    """
    ours, theirs = _ranks(x), _ranks(y)
    if len(x) < 3 or not (np.ptp(ours) and np.ptp(theirs)):
        return None
    return float(np.corrcoef(ours, theirs)[0, 1])


def reliability(repeats: Sequence[Sequence[float]]) -> float | None:
    """How well the means over repeats would rank like the means over as many others: Spearman-Brown's formula.

    >>> round(reliability([[1, 2, 3, 4], [2, 1, 4, 3]]), 2)  # each ranks like the other by 0.6
    0.75
    """
    found = [spearman(one, other) for one, other in combinations(repeats, 2)]
    pairs = [each for each in found if each is not None]
    if not pairs:
        return None
    count, mean = len(repeats), statistics.fmean(pairs)
    return count * mean / (1 + (count - 1) * mean) if mean > 0 else 0.0


def ceiling(repeats: Sequence[Sequence[float]]) -> float | None:
    """The correlation that a perfect predictor would have with the means over repeats, noisy as they are."""
    found = reliability(repeats)
    return None if found is None else math.sqrt(found)


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """From 0 on; equals share the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[:, None] > array[None, :]).sum(1)
    equal = (array[:, None] == array[None, :]).sum(1)
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = below + (equal - 1) / 2
    return ranks
