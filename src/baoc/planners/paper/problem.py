"""The allocation problem of Eq. 2 for one model: blocks, their metrics, and the cost of each configuration."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from baoc.core.configuration import BUDGET_REFERENCE, CATALOG, EXTENDED, Configuration, parse
from baoc.core.mechanisms.normalised import Normalised
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.spec import Reach, Shape
from baoc.core.text import human_bytes
from baoc.planners import cost, patterns, placement, weights
from baoc.planners.base import AUTO, Budget
from baoc.planners.model_facts import ModelFacts
from baoc.planners.paper import risk as risks
from baoc.planners.paper import times as update_times
from baoc.planners.paper import units as structure
from baoc.planners.paper.metrics import Metrics, MetricSettings
from baoc.planners.paper.refine import refine
from baoc.planners.paper.statistics import GradientStatistics
from baoc.solve import Infeasible, Problem, Solution, frontier, smallest_memory, solve

if TYPE_CHECKING:
    from baoc.planners.paper.planner import PaperPlanner

REFINED = "refined"
GRANULARITIES = (REFINED, *structure.GRANULARITIES)
PAPER: tuple[Configuration, ...] = tuple(
    dict.fromkeys(
        parse(f"{name}-{bits}")
        for name in ("adamw", "adam", "adafactor", "sgdwm", "sgdm", "sgdw", "sgd")
        for bits in (32, 16, 8)
    )
)
"""The paper's 21 configurations, of which 17 are different: stateless SGD is the same at every precision."""
_UNWANTED = 10.0  # risk of anything but AdamW for a block without gradients


class PaperProblem:
    """All that does not depend on a budget."""

    def __init__(
        self,
        planner: PaperPlanner,
        model: ModelFacts,
        statistics: GradientStatistics | None,
        *,
        per_rank: bool = False,
    ) -> None:
        """Build the problem.

        Args:
            planner: settings.
            model: facts about the model.
            statistics: of its gradients; without them all blocks have the metrics of a typical one.
            per_rank: count the bytes of the rank that holds most of sharded parameters, not of all ranks.

        Raises:
            PlanError: there are no parameters, patterns or times do not suit them, or times are still to be measured.
        """
        if not any(math.prod(shape) for shape in model.shapes.values()):
            raise PlanError("there is nothing to plan: the model has no parameters, or only empty ones.")
        self.planner, self.model, self._statistics = planner, model, statistics
        self.candidates = cast("tuple[Configuration, ...]", planner.candidates)
        self.reference_bytes = model.reference_bytes(per_rank=per_rank)
        self._per_rank, self._rows = per_rank, model.rows if per_rank else {}
        self.times = planner.times
        if self.times == update_times.MEASURE:
            if statistics is not None:
                raise PlanError("times='measure' must be measured first: planner = baoc.plan.measured(planner, model).")
            self.times = update_times.GPU  # the plan of a warm-up
        self._metric_settings, self._risk_settings = planner.metric_settings, risk_settings(planner, model, statistics)
        self.names, self.blocks, units = self._partition()
        self.metrics: list[risks.BlockMetrics] = [self._measured(block) for block in self.blocks]
        self._terms = self._risks()
        self.memory = cost.memory(self.blocks, self.candidates, self._rows)
        self.time = update_times.ratios(self.times, units, self.candidates)

    @functools.cached_property
    def cost(self) -> NDArray[np.float64]:
        """Phi of Eq. 2 with preferences (Sec. 3.2), infinite where a configuration is forbidden."""
        total = np.array([[sum(terms.values()) for terms in row] for row in self._terms])
        if np.isnan(total).any():
            block = self.names[int(np.argmax(np.isnan(total).any(axis=1)))]
            raise PlanError(f"the risks of block {block!r} are not finite: its gradient statistics are out of range.")
        total -= self.planner.preference * self._meant(self._preferred)
        forbidden = self._meant(self._forbidden)
        if forbidden.all(axis=1).any():
            block = self.names[int(np.argmax(forbidden.all(axis=1)))]
            raise PlanError(f"every configuration is forbidden for block {block!r}. Allow at least one.")
        without = forbidden | self._unsuited()
        forbidden = np.where(without.all(axis=1, keepdims=True), forbidden, without)
        return np.where(forbidden, np.inf, total)

    # ---- plans ----

    def plan(self, budget: Budget) -> Plan:
        """Return the plan of least risk within a budget."""
        return weights.planned(self._plan_of, self.model, budget, self.planner.low_bits, weights.have_same_rules)

    def frontier(self, budgets: Sequence[int]) -> list[Plan]:
        """Return the plans for many budgets in bytes; those that no plan fits are left out."""
        return weights.planned_frontier(
            self._frontier, self.model, budgets, self.planner.low_bits, weights.have_same_rules, self._per_rank
        )

    def _plan_of(self, budget: Budget) -> Plan:
        if budget.memory == AUTO:
            return self._plan(self._solve(None), None)
        host, device = budget.host_bytes(self.reference_bytes), budget.device_bytes(self.reference_bytes)
        assert device is not None
        if host:
            return placement.divided(lambda total: self._plan_for(total, budget, host), device, host, self._rows)
        if budget.memory in (0, "0%"):
            device = self.least_bytes()
        return self._plan_for(device, budget, 0)

    def _plan_for(self, nbytes: int, budget: Budget, host: int) -> Plan:
        try:
            solution = self._solve(max(nbytes, -1))
        except Infeasible as error:
            memory = f"{budget.memory!r} and host_memory={budget.host_memory!r}" if host else f"{budget.memory!r}"
            raise self._infeasible(error, memory, nbytes, budget.reserved) from error
        plan = self._plan(solution, nbytes)
        return replace(plan, settings={**plan.settings, "host_memory_budget": host}) if host else plan

    def _frontier(self, budgets: Sequence[int]) -> list[Plan]:
        least = self.least_bytes()
        feasible = [budget for budget in budgets if budget >= least]
        solutions = frontier(self.problem(None), feasible) if feasible else []
        return [self._plan(solution, budget) for solution, budget in zip(solutions, feasible)]

    def least_bytes(self) -> int:
        """Return what the smallest plan holds."""
        try:
            return smallest_memory(self.problem(None))
        except Infeasible as error:
            raise self._infeasible(error, "0.0", 0, 0) from error

    def problem(self, nbytes: int | None) -> Problem:
        """Return Eq. 2 for a memory budget in bytes."""
        return Problem(self.cost, self.memory, self.time, nbytes, self.planner.time)

    def _solve(self, nbytes: int | None) -> Solution:
        return solve(self.problem(nbytes))

    def _plan(self, solution: Solution, nbytes: int | None) -> Plan:
        blocks = [self._block(index, choice) for index, choice in enumerate(solution.choice.tolist())]
        settings: dict[str, Any] = {
            "planner": "paper",
            "regime": self.model.regime,
            "memory_budget": nbytes,
            "time_budget": self.planner.time if math.isfinite(self.planner.time) else None,
            "time": round(float(solution.time_used), 4),
            "times": update_times.plain(self.times),
            "objective": float(solution.objective),
            "bound": float(solution.bound),
            "memory_price": float(solution.memory_price),
            "time_price": float(solution.time_price),
            "lr_match": self.planner.lr_match,
            "warmup_steps": 0 if self._statistics is None else self._statistics.steps,
            "seed": None if self._statistics is None else self._statistics.seed,
        }
        plan = Plan(tuple(blocks), settings | ({"per_rank": True} if self._per_rank else {}))
        return plan.split(self.model.splits)

    def _block(self, index: int, choice: int) -> Block:
        configuration = self.candidates[choice]
        return Block(
            self.names[index],
            configuration,
            self.blocks[index],
            self._lr_multiplier(self.metrics[index], configuration),
            {term: round(value, 6) + 0.0 for term, value in self._terms[index][choice].items()},  # no -0.0
            self._why(index, choice),
        )

    def _lr_multiplier(self, metrics: risks.BlockMetrics, configuration: Configuration) -> float:
        """Ratio of AdamW16's update RMS to this configuration's on the sampled gradients."""
        has_statistics = isinstance(metrics, Metrics) and metrics.has_signal
        if not self.planner.lr_match or not has_statistics or is_as_long_as_adamw(configuration):
            return 1.0
        own = cast(Metrics, metrics).update_rms(configuration)
        return float(f"{cast(Metrics, metrics).update_rms(BUDGET_REFERENCE) / own:.4g}") if own > 0 else 1.0

    def _why(self, index: int, chosen: int) -> str:
        if self._statistics is None:
            return "no gradients seen yet: assumed to be like most blocks"
        if not self.metrics[index].has_signal:
            kept = self.candidates[chosen].mechanism_name == BUDGET_REFERENCE.mechanism_name
            what = "keeps AdamW in its cheapest format that fits" if kept else "got what the budget left"
            return f"no gradient in the warm-up: {what}"
        costs, memory, time = self.cost[index], self.memory[index], self.time[index]
        best = int(np.argmin(costs))
        if best == chosen:
            return "least risk of all"
        larger, slower = memory[best] > memory[chosen], time[best] > time[chosen]
        more = human_bytes(int(memory[best] - memory[chosen]))
        price = f"{more} more" if larger else "more time" if slower else "what other blocks need more"
        return f"{self.candidates[best].alias} risks {costs[chosen] - costs[best]:.3f} less but needs {price}"

    def _infeasible(self, error: Infeasible, memory: str, budget: int, reserved: int) -> PlanError:
        time, least = self.planner.time, error.smallest_memory
        if least is None:
            fastest = float(self.time.min(axis=1, where=np.isfinite(self.cost), initial=np.inf).mean())
            return PlanError(
                f"no plan is within time={time:g} of AdamW16's update time: the fastest needs {fastest:.4g}. Give "
                "time= more, or math.inf for no limit."
            )
        needed = least + reserved
        share = math.ceil(needed / max(1, self.reference_bytes) * 1e4) / 1e2  # rounded up: this budget must fit
        hint = " Give memory= more, or allow configurations with less state."
        if error.smallest_time is not None:  # memory alone is not to blame
            ratio = math.ceil(error.smallest_time * 1e4) / 1e4
            hint = f" It would fit with time={ratio:g} (now {time:g}), or math.inf for no limit."
        return PlanError(
            f"no plan fits memory={memory}: the smallest needs {needed} B, {share:.2f}% of AdamW16's state "
            f"({human_bytes(needed)}; you gave {human_bytes(max(0, budget + reserved))}).{hint}"
        )

    # ---- blocks and risks ----

    def _partition(self) -> tuple[list[str], list[dict[str, Shape]], list[list[dict[str, Shape]]]]:
        """Return names and parameters of the blocks, and of each block's units what one rank holds."""
        shapes, planner = self.model.shapes, self.planner
        units = structure.structural_units(shapes, unit_granularity(planner.granularity))
        groups: Sequence[Sequence[int]] = [(i,) for i in range(len(units))]
        if planner.granularity == REFINED and self._statistics is not None:
            vectors = diagnostics_of(units, self._statistics, self.model, self._metric_settings, self._risk_settings)
            groups = refine(
                units,
                vectors,
                weights=[planner.diagnostic_weights.get(name, 1.0) for name in risks.DIAGNOSTICS],
                min_share=planner.min_share,
                threshold=planner.tau,
                quantile=planner.quantile,
            )
        block_of = {name: block for block, parameters in structure.blocks(units, groups) for name in parameters}
        names_of = {name: (name, unit.name, block_of[name]) for unit in units for name in unit.parameters}
        # a configuration that is no candidate may be forbidden all the same
        self._forbidden = patterns.chosen(planner.forbid, self.candidates, names_of, (*CATALOG, *EXTENDED))
        self._preferred = patterns.chosen(planner.prefer, self.candidates, names_of)
        runs = [run for group in groups for run in self._of_one_rule(group, units)]
        named = structure.blocks(units, runs)
        held = local_shapes(self.model)
        return (
            [name for name, _ in named],
            [{n: shapes[n] for n in parameters} for _, parameters in named],
            [[{n: held[n] for n in units[index].parameters} for index in run] for run in runs],
        )

    def _of_one_rule(self, group: Sequence[int], units: Sequence[structure.Unit]) -> list[list[int]]:
        """Cut a group where patterns tell its units apart, or it might be left with nothing that is allowed."""

        def rule(index: int) -> tuple[bytes, ...]:
            mine = units[index].parameters
            rules = (self._forbidden, self._preferred)
            return tuple(np.any([rows[name] for name in mine], axis=0).tobytes() for rows in rules)

        return [list(run) for _, run in itertools.groupby(group, rule)]

    def _meant(self, rows: Mapping[str, patterns.Row]) -> NDArray[np.bool_]:
        """Which (block, configuration) pairs the patterns name: those of any of a block's parameters."""
        return np.array([np.any([rows[name] for name in block], axis=0) for block in self.blocks], dtype=bool)

    def _unsuited(self) -> NDArray[np.bool_]:
        """Which pairs would fall back to another rule for all of a block, or have no workspace for their own."""
        model, found = self.model, []
        for block in self.blocks:
            for each in self.candidates:
                has_room = model.has_workspace or each.mechanism.reach is not Reach.MATRIX
                suits = any(each.mechanism.suits(shape, model.role(name)) for name, shape in block.items())
                found.append(not (has_room and suits))
        return np.array(found, dtype=bool).reshape(len(self.blocks), len(self.candidates))

    def _measured(self, block: Mapping[str, Shape]) -> risks.BlockMetrics:
        if self._statistics is not None:
            return Metrics(self._statistics, block, self.model.hyper, self._metric_settings)
        prior = risks.Prior()
        has_matrix = any(len(shape) > 1 for shape in block.values())
        return prior if has_matrix else replace(prior, structure_residual=None, has_matrix=False)

    def _risks(self) -> list[list[dict[str, float]]]:
        model, settings = risks.find_risk(self.planner.risk), self._risk_settings
        return [
            [model(m, c, settings) if m.has_signal else _risk_without_signal(c) for c in self.candidates]
            for m in self.metrics
        ]


def risk_settings(
    planner: PaperPlanner, model: ModelFacts, statistics: GradientStatistics | None
) -> risks.RiskSettings:
    """Return what risk models are told."""
    return risks.RiskSettings(
        anchors=planner.anchors,
        weights=planner.weights,
        gamma=planner.gamma,
        weight_decay=model.hyper.weight_decay,
        snr=planner.snr,
        beta_m=planner.beta_m if statistics is None else statistics.betas[0],
        epsilon=planner.epsilon,
    )


def unit_granularity(granularity: str) -> structure.Granularity:
    """Return how units are cut: Alg. 2 starts from modules, and without it units are blocks."""
    return "module" if granularity == REFINED else cast(structure.Granularity, granularity)


def local_shapes(model: ModelFacts) -> dict[str, Shape]:
    """Return the shapes that the rank with the most holds."""
    return {
        name: (model.rows[name], *shape[1:]) if name in model.rows else shape for name, shape in model.shapes.items()
    }


def diagnostics_of(
    units: Sequence[structure.Unit],
    statistics: GradientStatistics,
    model: ModelFacts,
    metric_settings: MetricSettings,
    settings: risks.RiskSettings,
) -> NDArray[np.float64]:
    """Return the units' normalized diagnostics for Alg. 2, one row each; NaN where a unit has none."""
    rows = []
    for unit in units:
        metrics = Metrics(statistics, unit.parameters, model.hyper, metric_settings)
        need = risks.needs(metrics, settings)
        residual = np.nan if metrics.structure_residual is None else need.structure
        precision = risks.precision_risk(metrics.precision(8), settings.epsilon)
        row = [need.adaptive, need.momentum, need.decay, residual, precision]
        rows.append(row if metrics.has_signal else [np.nan] * len(row))
    return np.array(rows)


def unit_diagnostics(statistics: GradientStatistics, model: ModelFacts, planner: PaperPlanner) -> NDArray[np.float64]:
    """Return the normalized diagnostics of a model's structural units, (units, 5)."""
    settings = risk_settings(planner, model, statistics)
    units = structure.structural_units(statistics.shapes)
    return diagnostics_of(units, statistics, model, planner.metric_settings, settings)


def change_of(
    now: NDArray[np.float64], last: Sequence[Sequence[float]] | None, statistics: GradientStatistics
) -> float:
    """Return by how much diagnostics differ from earlier ones, on average over all parameters."""
    before = np.array([] if last is None else last, dtype=np.float64)
    if before.shape != now.shape:
        return math.inf
    difference = np.abs(now - before)
    sizes = [[float(unit.numel)] for unit in structure.structural_units(statistics.shapes)]
    weights = np.array(sizes) * np.isfinite(difference)
    return float(np.nansum(weights * difference) / max(1.0, weights.sum()))


def is_as_long_as_adamw(configuration: Configuration) -> bool:
    """Whether updates at AdamW's learning rate have AdamW's length by construction."""
    mechanism = configuration.mechanism
    return (mechanism.adaptive and mechanism.momentum) or isinstance(mechanism, Normalised)


def _risk_without_signal(configuration: Configuration) -> dict[str, float]:
    switches = configuration.switches
    kept = configuration.mechanism_name == BUDGET_REFERENCE.mechanism_name and not switches.factored
    return {"aggressive": switches.bits / 1000 if kept else _UNWANTED + risks.aggressiveness(configuration)}
