"""BAOC with one setting of its planner changed at a time, by name. Most settings are of the paper's planner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import baoc
from baoc import EffectPlanner, PaperPlanner
from baoc.core.configuration import Configuration
from baoc.core.plan import Plan
from baoc.planners.base import Planner
from baoc.planners.paper.risk import Anchors
from experiments import methods
from experiments.methods import Method, Settings, budgeted
from experiments.methods.budgeted import Change
from experiments.runs.cell import RunError

REPLANS = 4
"""How often the online variants plan again in a run."""


class Restarting(baoc.BAOC):
    """Restarts its state whenever its plan changes. The first plan, after the warm-up, inherits as usual."""

    def set_plan(self, plan: Plan | Configuration | str, *, inherit: bool = True) -> None:
        """As in BAOC, which calls it with every plan that differs from the last."""
        has_planned = bool(self.plan.settings.get("warmup_steps"))
        super().set_plan(plan, inherit=inherit and not has_planned)


@dataclass(frozen=True)
class Variant:
    """A change of the planner, and the class of the optimizer."""

    change: Change
    kind: type[baoc.BAOC] = baoc.BAOC


def _with(**fields: Any) -> Variant:
    return _changed(lambda settings: fields)


def _changed(fields: Callable[[Settings], Mapping[str, Any]], kind: type[baoc.BAOC] = baoc.BAOC) -> Variant:
    def change(planner: Planner, settings: Settings) -> Planner:
        return replace(planner, **fields(settings))  # type: ignore[type-var]

    return Variant(change, kind)


def _warmup(factor: float) -> Variant:
    return _changed(lambda settings: {"warmup": max(1, round(factor * settings.warmup))})


def _replanning(kind: type[baoc.BAOC] = baoc.BAOC) -> Variant:
    return _changed(lambda settings: {"replan_every": max(1, settings.steps // (REPLANS + 1))}, kind)


DIAGNOSTICS: dict[str, Variant] = {
    **{f"anchors {share:+.0%}": _with(anchors=Anchors().perturbed(share)) for share in (-0.2, -0.1, 0.1, 0.2)},
    **{f"samples {share:.0%}": _with(sample_ratio=share) for share in (0.01, 0.05, 0.1)},
    **{f"gamma {gamma:g}": _with(gamma=gamma) for gamma in (0.5, 0.9)},
    "warm-up x0.5": _warmup(0.5),
    "warm-up x2": _warmup(2.0),
    "warm-up within the budget": _with(warmup_base="budget"),
    "matched lr": _with(lr_match=True),
    "repaired risk": _with(risk="update"),
    "measured effects": Variant(lambda planner, settings: EffectPlanner()),
    "time 1.0": _with(time=1.0),
    "any time": _with(time=math.inf),
    "no SGD": _with(forbid="sgd*"),
    "prefers AdamW": _with(prefer="adamw*"),
}
"""The paper's appendix (anchors, samples, gamma, preferences, no SGD), and what the paper leaves open."""

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

_FAMILIES: dict[str, tuple[Callable[..., Method], type[EffectPlanner | PaperPlanner]]] = {
    "baoc": (budgeted.baoc_at, EffectPlanner),
    "baoc-paper": (budgeted.baoc_paper_at, PaperPlanner),
}


def method_of(name: str, variant: str = "") -> Method:
    """Return a method, or BAOC with a variant.

    Raises:
        RunError: the method is not BAOC, or its planner does not have that setting.

    >>> method_of("baoc-paper@0.5", "gamma 0.9").label
    "paper's BAOC 0.5, gamma 0.9"
    >>> method_of("muon", "gamma 0.9")
    Traceback (most recent call last):
    experiments.runs.cell.RunError: 'muon' has no variant 'gamma 0.9': variants change settings of BAOC. Write baoc-paper@0.5, or another share.
    """  # noqa: E501
    method = methods.get(name)
    if not variant:
        return method
    family, _, share = method.name.partition("@")
    if family not in _FAMILIES:
        raise RunError(
            f"{name!r} has no variant {variant!r}: variants change settings of BAOC. Write baoc-paper@0.5, or another "
            "share."
        )
    found, (make, planner) = VARIANTS[variant], _FAMILIES[family]
    try:
        found.change(planner(), Settings())
    except TypeError:
        raise RunError(f"{name!r} has no variant {variant!r}: {planner.__name__} does not have that setting.") from None
    return replace(make(float(share), found.change, found.kind), label=f"{method.label}, {variant}")
