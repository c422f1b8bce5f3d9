"""The paper's planner with one setting changed at a time, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import baoc
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


def _replanning(kind: type[baoc.BAOC] = baoc.BAOC) -> Variant:
    return _changed(lambda settings: {"replan_every": max(1, settings.steps // (REPLANS + 1))}, kind)


DIAGNOSTICS: dict[str, Variant] = {
    **{f"s={share:.0%}": _with(sample_ratio=share) for share in (0.01, 0.02, 0.05, 0.1)},
    **{f"gamma={tenths / 10:g}": _with(gamma=tenths / 10) for tenths in range(2, 10)},
    "pref": _with(prefer="adamw*"),
    "no-SGD": _with(forbid="sgd*"),
}
"""The paper's appendix. Its defaults, s = 0.1% and gamma = 0.1, are no variants."""

OPEN: dict[str, Variant] = {
    "matched lr": _with(lr_match=True),
    "warm-up within the budget": _with(warmup_base="budget"),
    "repaired risk": _with(risk="update"),
}
"""What the paper leaves open."""

ANCHORS: dict[str, Variant] = {
    f"anchors {share:+.0%}": _with(anchors=Anchors().perturbed(share)) for share in (-0.2, -0.1, 0.1, 0.2)
}

PARTITION: dict[str, Variant] = {"coarse": _with(granularity="coarse"), "by layer": _with(granularity="layer")}

ONLINE: dict[str, Variant] = {"online": _replanning(Restarting), "online+inherit": _replanning()}

VARIANTS: dict[str, Variant] = {**DIAGNOSTICS, **OPEN, **ANCHORS, **PARTITION, **ONLINE}

FAMILY = "baoc-paper"
"""The methods that have variants."""


def has_variants(method: str) -> bool:
    """Whether a method is the paper's planner at some budget."""
    return method.startswith(f"{FAMILY}@")


def method_of(name: str, variant: str = "") -> Method:
    """Return a method, or a variant of the paper's BAOC.

    Raises:
        RunError: the method is not the paper's BAOC.

    >>> method_of("baoc-paper@0.5", "gamma=0.9").label
    'BAOC (paper) 0.5, gamma=0.9'
    >>> method_of("muon", "gamma=0.9")
    Traceback (most recent call last):
    experiments.runs.cell.RunError: 'muon' has no variant 'gamma=0.9': variants change settings of the paper's planner. Write baoc-paper@0.5, or another share.
    """  # noqa: E501
    method = methods.get(name)
    if not variant:
        return method
    if not has_variants(method.name):
        raise RunError(
            f"{name!r} has no variant {variant!r}: variants change settings of the paper's planner. Write "
            f"{FAMILY}@0.5, or another share."
        )
    found = VARIANTS[variant]
    made = budgeted.baoc_paper_at(float(method.name.partition("@")[2]), found.change, found.kind)
    return replace(made, label=f"{method.label}, {variant}")
