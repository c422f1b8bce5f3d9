"""Fit an effect table to measured differences.

Single runs are noisy, and not every precision of every rule is run. Two facts need no run: the effect of AdamW32 is 0,
because all runs are compared with it, and more state of the same kind is at least as good.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from baoc.core.configuration import Configuration, parse
from baoc.core.roles import Role
from baoc.planners.effect_table import Effect, EffectTable

LADDERS: tuple[tuple[str, ...], ...] = (
    ("adamw-32", "adamw-16", "adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "colnorm"),
    ("adamw-32", "adamw[m=int8-any,v=int8-any]", "adamw[m=int8-any,v=factored]", "adamw[m=int4,v=factored]"),
    ("adamw-32", "adamw[m=int8,v=row-mean]", "adamw[m=int4,v=row-mean]"),
    ("muon-32", "muon-16", "muon-8", "muon[m=int8-any]", "muon-4", "spectral"),
    ("normuon-32", "normuon-16", "normuon-8", "normuon-4"),
)
"""In each, a configuration holds more state of the same kind than the next one."""
LOSS_REFERENCE = "adamw-32"
_ANY_SIZE = {
    "adamw-8": "adamw[m=int8-any,v=int8-any]",
    "adamw[m=int8,v=factored]": "adamw[m=int8-any,v=factored]",
    "muon-8": "muon[m=int8-any]",
}
DERIVED = {
    "adamw-16": LOSS_REFERENCE,
    **{f"{name}-{bits}": f"{name}-8" for name in ("muon", "normuon") for bits in (32, 16)},
    **_ANY_SIZE,
    **{any_size: large for large, any_size in _ANY_SIZE.items()},
}
"""Configurations that need not be run, and the ones whose effect they have."""
STEP = 0.002
"""Percent by which more state is taken to be better where runs show no difference."""
_FIXED, _DERIVED = 1e9, 1e-9  # weights beside numbers of runs


@dataclass(frozen=True)
class Difference:
    """The difference of one run to AdamW32 with the same seed and batches."""

    regime: str
    role: Role
    configuration: Configuration
    workload: str
    percent: float  # of AdamW32's test loss


def table_of(differences: Iterable[Difference], provenance: str = "") -> EffectTable:
    """Return the table for some differences: means over workloads of means over runs, with ladders in order."""
    found: dict[str, dict[Role, dict[Configuration, dict[str, list[float]]]]] = {}
    for each in differences:
        roles = found.setdefault(each.regime, {})
        roles.setdefault(each.role, {}).setdefault(each.configuration, {}).setdefault(each.workload, []).append(
            each.percent
        )
    effects = {
        regime: {role: completed({c: effect_of(runs) for c, runs in known.items()}) for role, known in roles.items()}
        for regime, roles in found.items()
    }
    return EffectTable(effects, provenance)


def effect_of(by_workload: Mapping[str, Sequence[float]]) -> Effect:
    """Return the mean over workloads and its standard error, or that over runs if there is one workload.

    Args:
        by_workload: differences in percent, by workload.

    Example:
        >>> effect_of({"gpt": [1.0, 2.0], "vit": [3.5]})
        Effect(loss=2.5, error=1.0, runs=3, workloads=2)
    """
    means = [statistics.fmean(runs) for runs in by_workload.values()]
    runs = [value for values in by_workload.values() for value in values]
    spread = means if len(means) > 1 else runs
    error = statistics.stdev(spread) / math.sqrt(len(spread)) if len(spread) > 1 else 0.0
    return Effect(statistics.fmean(means), error, len(runs), len(means))


def completed(measured: Mapping[Configuration, Effect]) -> dict[Configuration, Effect]:
    """Return effects with AdamW32, with configurations that need no run, and with ladders in order.

    >>> known = completed({parse("muon-8"): Effect(-9.0, runs=3), parse("spectral"): Effect(-9.2, runs=3)})
    >>> {configuration.alias: round(effect.loss, 2) for configuration, effect in known.items()}
    {'adamw-32': 0.0, 'adamw-16': 0.0, 'muon-32': -9.1, 'muon-16': -9.1, 'muon-8': -9.1, 'spectral': -9.09}
    """
    known = {parse(LOSS_REFERENCE): Effect(0.0), **measured}
    sources = {parse(spelling): parse(source) for spelling, source in DERIVED.items()}
    derived = {each: source for each, source in sources.items() if source in known and each not in known}
    known |= {each: Effect(known[source].loss) for each, source in derived.items()}
    order: dict[Configuration, None] = {}
    for ladder in LADDERS:
        rungs = [parse(spelling) for spelling in ladder if parse(spelling) in known]
        known |= zip(rungs, _in_order([known[rung] for rung in rungs], is_fixed=ladder[0] == LOSS_REFERENCE))
        order |= dict.fromkeys(rungs)
    for each, source in derived.items():  # runs of the source; above they must not count twice
        known[each] = replace(known[source], loss=known[each].loss)
    return {configuration: known[configuration] for configuration in {**order, **known}}


def _in_order(rungs: Sequence[Effect], is_fixed: bool) -> list[Effect]:
    """Return effects whose losses never fall: neighbors in the wrong order share their mean (pool adjacent violators).

    Args:
        rungs: effects of a ladder, from most state to least.
        is_fixed: the first one is the reference and does not change.
    """
    pools: list[tuple[float, float, int]] = []  # loss, weight, rungs
    for index, rung in enumerate(rungs):
        pools.append((rung.loss, _FIXED if is_fixed and index == 0 else max(_DERIVED, rung.runs), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (loss, weight, count), (other, other_weight, others) = pools[-2:]
            both = loss if weight >= _FIXED else (loss * weight + other * other_weight) / (weight + other_weight)
            pools[-2:] = [(both, weight + other_weight, count + others)]
    losses = [loss for loss, _, count in pools for _ in range(count)]
    return [replace(rung, loss=loss + STEP * index) for index, (rung, loss) in enumerate(zip(rungs, losses))]
