"""The format of slot ``w``, the low bits of 16-bit parameters, as part of a plan.

A planner chooses rules and state formats for what is left of a budget after the low bits. 8 bits are the default. Where
a budget has no room for them, or where rules and state formats would lose more than stochastic rounding does, the plan
has ``w=sr``, which takes no bytes. What the formats cost was measured: see ``docs/results/weights.md``.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from baoc.core.codecs import CODECS
from baoc.core.plan import Plan, PlanError
from baoc.core.spec import DEFAULT_WEIGHT, SMALLEST_WEIGHT, WEIGHT
from baoc.planners.base import AUTO, Budget
from baoc.planners.effect_table import Effect
from baoc.planners.model_facts import SCRATCH, ModelFacts

LOW_BITS = (AUTO, *WEIGHT.codecs)
"""What the setting ``low_bits`` of a planner may be."""
EXPECTED = "expected_loss"
Allows = Callable[[Plan, Plan], bool]
"""Whether a plan with 8 bits is to be chosen rather than one with stochastic rounding."""


def planned(make: Callable[[Budget], Plan], model: ModelFacts, budget: Budget, low_bits: str, allows: Allows) -> Plan:
    """Return a plan with a format for the low bits of 16-bit parameters.

    Args:
        make: plans everything else within a budget.
        model: facts about the model.
        budget: for state, low bits included.
        low_bits: the setting of the planner: a format, or "auto".
        allows: tells which of two plans to choose.

    Raises:
        PlanError: no plan fits.
    """
    if not model.low_precision:
        return make(budget)

    def plan_with(weight: str) -> Plan:
        taken = low_bits_bytes(model, weight, per_rank=budget.is_per_rank)
        inner = replace(budget, reserved=budget.reserved + taken)
        if budget.memory in (0, "0%") and taken:
            raise PlanError(f"w={weight} takes {taken} B, but memory={budget.memory!r} asks for the smallest plan.")
        plan = with_effect(make(inner).with_low_bits(model.low_precision, weight), model, weight)
        if budget.host_memory is not None:
            host = replace(plan, rows=model.rows).host_bytes_per_rank if budget.is_per_rank else plan.host_bytes
            if host > budget.host_bytes(model.reference_bytes(per_rank=budget.is_per_rank)):
                raise PlanError(f"w={weight} does not fit into host_memory={budget.host_memory!r}.")
        if taken and plan.settings.get("memory_budget") is not None:
            plan = replace(plan, settings={**plan.settings, "memory_budget": plan.settings["memory_budget"] + taken})
        return plan

    if low_bits != AUTO:
        return plan_with(low_bits)
    smallest = plan_with(SMALLEST_WEIGHT)
    try:
        default = plan_with(DEFAULT_WEIGHT)
    except PlanError:  # there is no room for them
        return smallest
    return default if allows(default, smallest) else smallest


def have_same_rules(one: Plan, other: Plan) -> bool:
    """Return whether two plans of the same parameters differ in formats only."""
    return all(
        block.configuration.mechanism_name == other.block_of(name).configuration.mechanism_name
        for name, block in one.by_parameter
    )


def planned_frontier(
    make: Callable[[Sequence[int]], list[Plan]],
    model: ModelFacts,
    budgets: Sequence[int],
    low_bits: str,
    allows: Allows,
    per_rank: bool,
) -> list[Plan]:
    """Return the plans for many budgets in bytes, each as :func:`planned` chooses it."""
    if not model.low_precision:
        return make(budgets)

    def plans_with(weight: str) -> dict[int, Plan]:
        taken = low_bits_bytes(model, weight, per_rank=per_rank)
        plans = make([budget - taken for budget in budgets if budget >= taken])
        found = {}
        for plan in plans:
            total = plan.settings["memory_budget"] + taken
            plan = with_effect(plan.with_low_bits(model.low_precision, weight), model, weight)
            found[total] = replace(plan, settings={**plan.settings, "memory_budget": total})
        return found

    if low_bits != AUTO:
        return [plan for _, plan in sorted(plans_with(low_bits).items())]
    smallest, default = plans_with(SMALLEST_WEIGHT), plans_with(DEFAULT_WEIGHT)
    return [
        default[total] if total in default and allows(default[total], plan) else plan
        for total, plan in sorted(smallest.items())
    ]


def low_bits_bytes(model: ModelFacts, weight: str, *, per_rank: bool) -> int:
    """Return the bytes of slot ``w`` for all 16-bit parameters, on all ranks or on the one that holds most."""
    rows = model.rows if per_rank else {}
    shapes = {name: model.shapes[name] for name in model.low_precision if name in model.shapes}
    formats = (CODECS[weight].at(shape, WEIGHT, rows.get(name)) for name, shape in shapes.items())
    return sum(buffer.nbytes for stored in formats for buffer in stored.buffers)


def with_effect(plan: Plan, model: ModelFacts, weight: str) -> Plan:
    """Return a plan whose predicted loss includes what a format of ``w`` costs."""
    if EXPECTED not in plan.settings:
        return plan
    numel = sum(math.prod(shape) for shape in model.shapes.values())
    narrow = sum(math.prod(model.shapes[name]) for name in model.low_precision if name in model.shapes)
    found = effect(plan.settings.get("regime", SCRATCH), model.hyper.lr, weight)
    cost = found.loss * narrow / max(1, numel)
    more: dict[str, Any] = {"low_bits": weight, "low_bits_loss": round(cost, 4)}
    for name in (EXPECTED, "objective", "bound"):
        more[name] = round(plan.settings[name] + cost, 6)
    return replace(plan, settings={**plan.settings, **more})


def effect(regime: str, lr: float, weight: str) -> Effect:
    """Return what a format costs against fp32 weights, in percent of the loss.

    It is what was measured at the learning rate that is nearest. A difference below its standard error counts as none,
    and so does a gain. A format costs at most what one with fewer bits costs: anything else is noise.

    Args:
        regime: as in :class:`ModelFacts`. For "general" it is that of training from scratch.
        lr: learning rate.
        weight: the format.

    Example:
        >>> effect("scratch", 1e-3, "none").loss > effect("scratch", 1e-3, "8").loss
        True
    """
    found = [_nearest(regime, lr, each) for each in WEIGHT.codecs[WEIGHT.codecs.index(weight) :]]
    losses = (row["loss"] if row["loss"] > (row["error"] or 0.0) else 0.0 for row in found)
    return Effect(min(losses), found[0]["error"] or 0.0, found[0]["runs"])


def _nearest(regime: str, lr: float, weight: str) -> dict[str, Any]:
    rows = [row for row in _measured() if row["weights"] == weight]
    mine = [row for row in rows if row["regime"] == regime] or [row for row in rows if row["regime"] == SCRATCH]
    return min(mine, key=lambda row: abs(math.log(row["lr"] / max(lr, 1e-12))))


@functools.cache
def _measured() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(resources.files("baoc.planners").joinpath("weights.json").read_text())
    return found
