"""The paper's planner with one setting changed at a time, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from baoc.planners.base import Planner
from baoc.planners.paper.risk import Anchors
from experiments import methods
from experiments.methods import Method, Settings, budgeted
from experiments.methods.budgeted import Change
from experiments.runs.cell import RunError

REPLANS = 4
"""How often the online variants plan again in a run."""


def _with(**fields: Any) -> Change:
    return _changed(lambda settings: fields)


def _changed(fields: Callable[[Settings], Mapping[str, Any]]) -> Change:
    def change(planner: Planner, settings: Settings) -> Planner:
        return replace(planner, **fields(settings))  # type: ignore[type-var]

    return change


def _replanning(*, inherit: bool) -> Change:
    return _changed(lambda settings: {"replan_every": max(1, settings.steps // (REPLANS + 1)), "inherit": inherit})


DIAGNOSTICS: dict[str, Change] = {
    **{f"s={share:.0%}": _with(sample_ratio=share) for share in (0.01, 0.02, 0.05, 0.1)},
    **{f"gamma={tenths / 10:g}": _with(gamma=tenths / 10) for tenths in range(2, 10)},
    "pref": _with(prefer="adamw*"),
    "no-SGD": _with(forbid="sgd*"),
}
"""The paper's appendix. Its defaults, s = 0.1% and gamma = 0.1, are no variants."""

OPEN: dict[str, Change] = {
    "matched lr": _with(lr_match=True),
    "warm-up within the budget": _with(warmup_base="budget"),
    "repaired risk": _with(risk="update"),
}
"""What the paper leaves open."""

ANCHORS: dict[str, Change] = {
    f"anchors {share:+.0%}": _with(anchors=Anchors().perturbed(share)) for share in (-0.2, -0.1, 0.1, 0.2)
}

PARTITION: dict[str, Change] = {"coarse": _with(granularity="coarse"), "by layer": _with(granularity="layer")}

ONLINE: dict[str, Change] = {"online": _replanning(inherit=False), "online+inherit": _replanning(inherit=True)}

VARIANTS: dict[str, Change] = {**DIAGNOSTICS, **OPEN, **ANCHORS, **PARTITION, **ONLINE}

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
    made = budgeted.baoc_paper_at(float(method.name.partition("@")[2]), VARIANTS[variant])
    return replace(made, label=f"{method.label}, {variant}")
