"""BAOC with one setting changed at a time, by name. Most settings are of the paper's space."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import baoc
from baoc.core.configuration import Configuration
from baoc.core.plan import Plan
from baoc.planning.risk import Anchors
from experiments import methods
from experiments.methods import Method, Settings, budgeted
from experiments.runs.cell import RunError

REPLANS = 4
"""How often the online variants plan anew in a run."""


class Restarting(baoc.BAOC):
    """Forgets its state whenever it plans anew. The first plan, after the warm-up, inherits as it always does."""

    def set_plan(self, plan: Plan | Configuration | str, *, inherit: bool = True) -> None:
        """As in BAOC, which comes here with every plan that it makes."""
        has_planned = bool(self.plan.settings.get("warmup_steps"))
        super().set_plan(plan, inherit=inherit and not has_planned)


@dataclass(frozen=True)
class Variant:
    """What is changed of BAOC's arguments, which may depend on the run's settings."""

    changed: Callable[[Settings], Mapping[str, Any]]
    kind: type[baoc.BAOC] = baoc.BAOC


def _with(**arguments: Any) -> Variant:
    return Variant(lambda settings: arguments)


def _warmup(factor: float) -> Variant:
    return Variant(lambda settings: {"warmup": max(1, round(factor * settings.warmup))})


def _replanning(kind: type[baoc.BAOC] = baoc.BAOC) -> Variant:
    return Variant(lambda settings: {"replan_every": max(1, settings.steps // (REPLANS + 1))}, kind)


DIAGNOSTICS: dict[str, Variant] = {
    **{f"anchors {share:+.0%}": _with(anchors=Anchors().perturbed(share)) for share in (-0.2, -0.1, 0.1, 0.2)},
    **{f"samples {share:.0%}": _with(sample_ratio=share) for share in (0.01, 0.05, 0.1)},
    **{f"gamma {gamma:g}": _with(gamma=gamma) for gamma in (0.5, 0.9)},
    "warm-up x0.5": _warmup(0.5),
    "warm-up x2": _warmup(2.0),
    "warm-up on AdamW16": _with(warmup_base="adamw-16"),
    "lr as given": _with(lr_match="none"),
    "repaired risk": _with(risk="update"),
    "measured effects": _with(space="measured"),
    "time 1.0": _with(time=1.0),
    "any time": _with(time=math.inf),
    "no SGD": _with(forbid="sgd*"),
    "prefers AdamW": _with(prefer="adamw*"),
}
"""The paper's appendix (anchors, samples, gamma, preferences, no SGD), and what else we settled differently."""

PARTITION: dict[str, Variant] = {
    **{f"by {name}": _with(granularity=name) for name in ("tensor", "module", "layer")},
    "coarse": _with(granularity="coarse"),
    "quantile 0.5": _with(quantile=0.5),
    "quantile 0.9": _with(quantile=0.9),
    "blocks of 1%": _with(min_share=0.01),
}

ONLINE: dict[str, Variant] = {
    "online, restarting": _replanning(Restarting),
    "online, inheriting": _replanning(),
}

VARIANTS: dict[str, Variant] = {**DIAGNOSTICS, **PARTITION, **ONLINE}


_FAMILIES = {"baoc": budgeted.baoc_at, "baoc-paper": budgeted.baoc_paper_at}


def method_of(name: str, variant: str = "") -> Method:
    """A method, or BAOC with a variant.

    >>> method_of("baoc-paper@0.5", "gamma 0.9").label
    "the paper's BAOC 0.5, gamma 0.9"
    >>> method_of("muon", "gamma 0.9")
    Traceback (most recent call last):
    experiments.runs.cell.RunError: 'muon' has no variant 'gamma 0.9': this experiment changes settings of BAOC. Write baoc@0.5, or another share.
    """  # noqa: E501
    method = methods.get(name)
    if not variant:
        return method
    family, _, share = method.name.partition("@")
    if family not in _FAMILIES:
        raise RunError(
            f"{name!r} has no variant {variant!r}: this experiment changes settings of BAOC. "
            "Write baoc@0.5, or another share."
        )
    found = VARIANTS[variant]
    return replace(_FAMILIES[family](float(share), found.kind, found.changed), label=f"{method.label}, {variant}")
