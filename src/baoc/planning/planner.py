"""From a profile and a budget to a plan: blocks, risks, costs, then the MILP of Eq. 2."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from baoc.core.configuration import CATALOG, REFERENCE, Configuration, parse
from baoc.core.mechanisms import MECHANISMS
from baoc.core.plan import Block, Plan, PlanError, memory_budget
from baoc.core.roles import canonical_name
from baoc.core.spec import Hyper, Shape
from baoc.core.text import check_names, human_bytes
from baoc.planning import cost, partition
from baoc.planning import risk as risks
from baoc.planning.cost import TimeModel
from baoc.planning.metrics import Metrics
from baoc.profiling.profile import Profile
from baoc.solve import Infeasible, Problem, Solution, frontier, smallest_memory, solve

Patterns = str | Sequence[str] | Mapping[str, "str | Sequence[str]"]
"""Configurations to forbid or prefer, for all blocks or by a pattern on block and parameter names."""

DEFAULT_MEMORY = 0.5
DEFAULT_TIME = 1.3
PREFERENCE = 0.5  # lambda_pref
REFINED = "refined"
_UNWANTED = 10.0  # risk of anything but the reference's mechanism for a block without signal


@dataclass(frozen=True)
class Settings:
    """Everything about a plan but its budgets. The defaults are the paper's, where it has any."""

    risk: str | risks.RiskModel = risks.DEFAULT_RISK
    anchors: risks.Anchors = risks.DEFAULT_ANCHORS
    weights: Mapping[str, float] | None = None
    gamma: float = risks.GAMMA
    granularity: str = REFINED
    min_share: float = partition.MIN_SHARE
    quantile: float = 0.75
    candidates: Sequence[Configuration | str] = CATALOG
    forbid: Patterns = ()
    prefer: Patterns = ()
    preference: float = PREFERENCE
    lr_match: str = "rms"

    def __post_init__(self) -> None:
        if self.lr_match not in ("rms", "none"):
            raise ValueError(f"unknown lr_match {self.lr_match!r}. Choose 'rms' or 'none' (the paper's).")
        if self.granularity not in (REFINED, *partition.GRANULARITIES):
            known = ", ".join((REFINED, *partition.GRANULARITIES))
            raise ValueError(f"unknown granularity {self.granularity!r}. Choose one of {known}.")
        given = (self.candidates,) if isinstance(self.candidates, (str, Configuration)) else self.candidates
        object.__setattr__(self, "candidates", tuple(map(parse, given)))
        if not self.candidates:
            raise ValueError("there are no candidates to plan with. Give at least one configuration.")

    @classmethod
    def of(cls, caller: str, given: Mapping[str, Any]) -> Settings:
        """Settings from keyword arguments; one that is not known is an error in the caller's name."""
        return cls().changed(caller, given)

    def changed(self, caller: str, given: Mapping[str, Any]) -> Settings:
        """These settings with others in their place."""
        check_names(given, caller, (field.name for field in fields(self)))
        return replace(self, **given)

    def risk_settings(self, hyper: Hyper) -> risks.Settings:
        return risks.Settings(self.anchors, self.weights or {}, self.gamma, hyper.weight_decay)


class Planner:
    """Holds what does not depend on the budget, so that every further budget costs milliseconds."""

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        profile: Profile | None,
        hyper: Hyper,
        times: TimeModel,
        settings: Settings | None = None,
    ) -> None:
        """Without a profile all blocks have the prior's metrics: the plan for a warm-up, or for a dry run."""
        self.settings = settings or Settings()
        if not any(math.prod(shape) for shape in shapes.values()):
            raise PlanError("there is nothing to plan: the model has no parameters, or only empty ones.")
        self._shapes = {canonical_name(name): shape for name, shape in shapes.items()}
        self._profile = None if profile is None else profile.with_names(canonical_name)
        self._hyper = hyper
        self.names, self.blocks = self._partition()
        self.metrics: list[risks.BlockMetrics] = [self._measured(block) for block in self.blocks]
        self._terms = self._risks()
        self.memory = cost.memory(self.blocks, self.candidates)
        self.time = times.ratios(self.blocks, self.candidates)

    @property
    def candidates(self) -> tuple[Configuration, ...]:
        return cast(tuple[Configuration, ...], self.settings.candidates)

    @property
    def reference_bytes(self) -> int:
        return sum(REFERENCE.state_bytes(shape) for shape in self._shapes.values())

    def plan(self, memory: float | int | str = DEFAULT_MEMORY, time: float = DEFAULT_TIME) -> Plan:
        """The plan of least risk within the budgets."""
        check_time(time)
        budget = memory_budget(memory, self.reference_bytes)
        try:
            solution = solve(self.problem(budget, time))
        except Infeasible as error:
            raise self._infeasible(error, memory, budget, time) from error
        return self._plan(solution, budget, time)

    def frontier(self, memories: Sequence[float | int | str], time: float = DEFAULT_TIME) -> list[Plan]:
        """The plans of many memory budgets; those that cannot be met are left out."""
        budgets = [memory_budget(memory, self.reference_bytes) for memory in memories]
        try:
            least = smallest_memory(self.problem(None, time))
        except Infeasible:
            return []
        feasible = [budget for budget in budgets if budget >= least]
        solutions = frontier(self.problem(None, time), feasible) if feasible else []
        return [self._plan(solution, budget, time) for solution, budget in zip(solutions, feasible)]

    def problem(self, budget: int | None, time: float) -> Problem:
        return Problem(self.cost, self.memory, self.time, budget, time)

    @functools.cached_property
    def cost(self) -> NDArray[np.float64]:
        """Phi of Eq. 2 with preferences (Sec. 3.2), infinite where a configuration is forbidden."""
        total = np.array([[sum(terms.values()) for terms in row] for row in self._terms])
        total -= self.settings.preference * self._chosen(self.settings.prefer)
        forbidden = self._chosen(self.settings.forbid)
        if forbidden.all(axis=1).any():
            block = self.names[int(np.argmax(forbidden.all(axis=1)))]
            raise PlanError(f"every configuration is forbidden for block {block!r}. Allow it at least one.")
        return np.where(forbidden, np.inf, total)

    def _partition(self) -> tuple[list[str], list[dict[str, Shape]]]:
        granularity = self.settings.granularity
        structure = "module" if granularity == REFINED else cast(partition.Granularity, granularity)
        units = partition.structural_units(self._shapes, structure)
        groups: Sequence[Sequence[int]] = [(i,) for i in range(len(units))]
        if granularity == REFINED and self._profile is not None:
            vectors = unit_vectors(units, self._profile, self._hyper, self.settings.anchors)
            groups = partition.refine(
                units, vectors, min_share=self.settings.min_share, quantile=self.settings.quantile
            )
        named = partition.blocks(units, groups)
        return [name for name, _ in named], [{n: self._shapes[n] for n in parameters} for _, parameters in named]

    def _measured(self, block: Mapping[str, Shape]) -> risks.BlockMetrics:
        if self._profile is not None:
            return Metrics(self._profile, block, self._hyper)
        has_matrix = any(len(shape) > 1 for shape in block.values())
        return risks.Prior() if has_matrix else replace(risks.Prior(), structure_residual=None)

    def _risks(self) -> list[list[dict[str, float]]]:
        model = risks.find(self.settings.risk)
        settings = self.settings.risk_settings(self._hyper)
        return [
            [model(m, c, settings) if m.has_signal else _risk_without_signal(c) for c in self.candidates]
            for m in self.metrics
        ]

    def _chosen(self, patterns: Patterns) -> NDArray[np.bool_]:
        """Which (block, configuration) pairs the patterns name."""
        rules = patterns if isinstance(patterns, Mapping) else {"*": patterns}
        chosen = np.zeros((len(self.blocks), len(self.candidates)), dtype=bool)
        for where, what in rules.items():
            wanted = [what] if isinstance(what, str) else list(what)
            for pattern in wanted:
                columns = [_names_configuration(pattern, c) for c in self.candidates]
                if not any(columns):
                    raise PlanError(
                        f"{pattern!r} names no candidate configuration. Write one, or a pattern like 'sgd*'."
                    )
                rows = [_glob(where, name) or any(_glob(where, n) for n in block) for name, block in self._named()]
                if not any(rows):
                    raise PlanError(
                        f"{where!r} names no block and no parameter. Blocks: {', '.join(self.names[:8])} ..."
                    )
                chosen |= np.outer(rows, columns)
        return chosen

    def _named(self) -> list[tuple[str, dict[str, Shape]]]:
        return list(zip(self.names, self.blocks))

    def _plan(self, solution: Solution, budget: int, time: float) -> Plan:
        blocks = []
        for i, (name, parameters) in enumerate(self._named()):
            index = int(solution.choice[i])
            configuration = self.candidates[index]
            blocks.append(
                Block(
                    name,
                    configuration,
                    parameters,
                    self._lr_scale(self.metrics[i], configuration),
                    {term: round(value, 6) for term, value in self._terms[i][index].items()},
                    self._why(i, index),
                )
            )
        settings = {
            "memory_budget": budget,
            "time_budget": time if math.isfinite(time) else None,
            "time": round(float(solution.time_used), 4),
            "objective": float(solution.objective),
            "bound": float(solution.bound),
            "gap": float(solution.gap),
            "memory_price": float(solution.memory_price),
            "time_price": float(solution.time_price),
            "warmup_steps": 0 if self._profile is None else self._profile.steps,
            "seed": None if self._profile is None else self._profile.seed,
        }
        return Plan(tuple(blocks), settings)

    def _lr_scale(self, metrics: risks.BlockMetrics, configuration: Configuration) -> float:
        """Ratio of the reference's update RMS to this configuration's on the sampled gradients."""
        adam_like = configuration.mechanism.adaptive and configuration.mechanism.momentum
        if adam_like or self.settings.lr_match == "none" or not isinstance(metrics, Metrics) or not metrics.has_signal:
            return 1.0
        own = metrics.update_rms(configuration)
        return float(f"{metrics.update_rms(REFERENCE) / own:.4g}") if own > 0 else 1.0

    def _why(self, block: int, chosen: int) -> str:
        if self._profile is None:
            return "no gradients seen yet: assumed to be like most blocks"
        if not self.metrics[block].has_signal:
            kept = self.candidates[chosen].mechanism_name == REFERENCE.mechanism_name
            what = "keeps AdamW's mechanism in its cheapest format that fits" if kept else "got what the budget left"
            return f"no gradient in the warm-up: {what}"
        costs = self.cost[block]
        best = int(np.argmin(costs))
        if best == chosen:
            return "least risk of all"
        more = human_bytes(int(self.memory[block, best] - self.memory[block, chosen]))
        slower = self.time[block, best] > self.time[block, chosen]
        larger = self.memory[block, best] > self.memory[block, chosen]
        price = f"{more} more" if larger else "more time" if slower else "what other blocks need more"
        return f"{self.candidates[best].alias} risks {costs[chosen] - costs[best]:.3f} less but needs {price}"

    def _infeasible(self, error: Infeasible, memory: object, budget: int, time: float) -> PlanError:
        least = error.smallest_memory
        if least is None:
            fastest = float(self.time.min(axis=1, where=np.isfinite(self.cost), initial=np.inf).mean())
            return PlanError(f"no plan is within {time} of AdamW16's update time: the fastest needs {fastest:.4g}.")
        share = math.ceil(least / max(1, self.reference_bytes) * 1e4) / 1e2  # rounded up: this one must fit
        hint = ""
        if isinstance(memory, int) and memory in (1, 2):
            hint = f" An int is read as bytes: write {memory}.0 for a share."
        return PlanError(
            f"no plan fits {human_bytes(budget)} ({memory!r}) within {time} of AdamW16's update time: the smallest "
            f"that does needs {least} B, {share:.2f}% of AdamW16's state.{hint}"
        )


def check_time(time: object) -> None:
    """Raise unless a time budget is one; infinity lifts it."""
    if not isinstance(time, (int, float)) or isinstance(time, bool) or not time > 0:
        raise PlanError(
            f"the time budget {time!r} is not a ratio to AdamW16's update time: it must be a number above 0, like "
            f"{DEFAULT_TIME}, or math.inf for none."
        )


def unit_vectors(
    units: Sequence[partition.Unit], profile: Profile, hyper: Hyper, anchors: risks.Anchors
) -> NDArray[np.float64]:
    """The units' normalised diagnostics for Alg. 2, one row each; NaN where a unit has none."""
    rows = []
    for unit in units:
        metrics = Metrics(profile, unit.parameters, hyper)
        need = risks.needs(metrics, anchors)
        structure = np.nan if metrics.structure_residual is None else need.structure
        row = [need.adaptive, need.momentum, need.decay, structure, risks.precision_risk(metrics.precision(8))]
        rows.append(row if metrics.has_signal else [np.nan] * len(row))
    return np.array(rows)


def _risk_without_signal(configuration: Configuration) -> dict[str, float]:
    switches = configuration.switches
    kept = configuration.mechanism_name == REFERENCE.mechanism_name and not switches.factored
    return {"aggressive": switches.bits / 1000 if kept else _UNWANTED + risks.aggressiveness(configuration)}


def _names_configuration(pattern: str, configuration: Configuration) -> bool:
    if pattern in MECHANISMS:  # a bare name means the whole family
        return configuration.mechanism_name == pattern
    try:
        return parse(pattern) == configuration
    except ValueError:
        return _glob(pattern, str(configuration)) or _glob(pattern, configuration.alias)


def _glob(pattern: str, text: str) -> bool:
    """``*`` matches anything, all else itself: configurations are spelled with brackets."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None
