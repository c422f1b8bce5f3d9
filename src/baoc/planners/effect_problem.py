"""The problem of an ``EffectPlanner`` for one model, and its plans for any budget."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from baoc.core.configuration import Configuration
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.roles import Role, layer_of
from baoc.core.spec import SMALLEST_WEIGHT
from baoc.core.text import REGIME_TEXTS, human_bytes
from baoc.planners import placement, trust, weights
from baoc.planners.base import (
    Budget,
    Memory,
)
from baoc.planners.effect_classes import EffectClasses
from baoc.planners.effect_table import TERM
from baoc.planners.model_facts import GENERAL, ModelFacts
from baoc.planners.simplify import Run, Target, simplest
from baoc.solve import (
    ClassSolution,
    Infeasible,
    class_frontier,
    smallest_class_memory,
    solve_classes,
)

if TYPE_CHECKING:
    from baoc.planners.effects import EffectPlanner

FEW = 32
"""Tensors of a small model."""


class EffectProblem:
    """What does not depend on the budget, and plans for any budget."""

    def __init__(self, planner: EffectPlanner, model: ModelFacts, per_rank: bool) -> None:
        self.planner, self.model = planner, model
        self._rows = model.rows if per_rank else {}
        self._classes = classes = EffectClasses(planner, model, self._rows)
        self.regime, self.tokens = classes.regime, classes.tokens
        self.candidates, self.effects = classes.candidates, classes.effects
        self.tolerance = planner.tolerance * self.effects.carried
        """A tie, in percent of the loss: the same share of the steps at any scale."""
        self.reference_bytes = model.reference_bytes(per_rank=per_rank)
        self._per_rank = per_rank

    # ---- plans ----

    def plan(self, budget: Budget) -> Plan:
        """Return the plan for a budget."""
        return weights.planned(self._plan_for, self.model, budget, self._low_bits, self._allows)

    def frontier(self, budgets: Sequence[int]) -> list[Plan]:
        """Return the plans for many budgets in bytes, in ascending order; those that no plan fits are left out."""
        return weights.planned_frontier(
            self._frontier, self.model, budgets, self._low_bits, self._allows, self._per_rank
        )

    def _allows(self, with_bits: Plan, without: Plan) -> bool:
        """Return whether low bits leave enough for the rest: the prediction is as good within the tolerance."""
        return bool(with_bits.settings["objective"] <= without.settings["objective"] + self.planner.tolerance)

    @property
    def _low_bits(self) -> str:
        """The format of slot ``w``. Candidates that name one are taken as they are."""
        named = any(candidate.weight for candidate in self.candidates)
        return SMALLEST_WEIGHT if named else self.planner.low_bits

    def _plan_for(self, budget: Budget) -> Plan:
        host = budget.host_bytes(self.reference_bytes)
        device = budget.device_bytes(self.reference_bytes)
        if host and device is not None:
            room = device  # known to be a number within the function

            def plan_for(total: int) -> Plan:
                return self._plan_within(total if room >= 0 else -1, budget, divided=True)

            return placement.divided(plan_for, room, host, self._rows)
        if device is not None and device <= 0 and budget.memory in (0, "0%"):
            device = self.least_bytes()  # "as little as possible"
        return self._plan_within(device, budget)

    def _frontier(self, budgets: Sequence[int]) -> list[Plan]:
        least = self.least_bytes()
        feasible = [budget for budget in budgets if budget >= least]
        solutions = class_frontier(self._classes.problem, feasible, within=self._within) if feasible else []
        plans: list[Plan] = []
        for budget, solution in sorted(zip(feasible, solutions), key=lambda pair: pair[0]):
            plan = self._plan(solution, budget)
            if plans and plan.settings["objective"] > plans[-1].settings["objective"]:
                # a simpler plan within the tolerance: the one for less memory is better, and fits too
                plan = replace(plans[-1], settings={**plans[-1].settings, "memory_budget": budget})
            plans.append(plan)
        return plans

    def least_bytes(self) -> int:
        """Return what the smallest plan holds."""
        try:
            return smallest_class_memory(self._classes.problem)
        except Infeasible as error:
            raise self._infeasible(error, 0.0, 0, 0) from error

    def _plan_within(self, nbytes: int | None, budget: Budget, *, divided: bool = False) -> Plan:
        try:
            solution = solve_classes(replace(self._classes.problem, memory_budget=nbytes), within=self._within)
        except Infeasible as error:
            memory: Any = budget.memory
            if divided:
                memory = f"{budget.memory!r} and host_memory={budget.host_memory!r}"
            raise self._infeasible(error, memory, nbytes or 0, budget.reserved, raw=divided) from error
        plan = self._plan(solution, nbytes)
        if divided:
            host = budget.host_bytes(self.reference_bytes)
            plan = replace(plan, settings={**plan.settings, "host_memory_budget": host})
        return plan

    @property
    def _is_delicate(self) -> bool:
        """Whether a plan must not give up more than the tolerance to be simpler.

        Without normalization layers every tensor matters, and a plan for few tensors is short in any case.
        """
        return self.regime == GENERAL and len(self.model.shapes) <= FEW

    @property
    def _within(self) -> float:
        """How close to the optimum of the class problem a solution must be proven to be, in percent of the loss."""
        return self.tolerance / 4

    def _is_spare(self, loss: float) -> bool:
        """Return whether more memory would not improve a loss by more than the tolerance."""
        most = loss - self.tolerance
        if not self._bounds.bound < most <= self._bounds.objective:
            return most <= self._bounds.bound  # saves the search
        return most <= self._least_loss

    @functools.cached_property
    def _bounds(self) -> ClassSolution:
        """Bounds of the least loss, without a search."""
        return solve_classes(self._classes.problem, within=math.inf)

    @functools.cached_property
    def _least_loss(self) -> float:
        """Of any plan, whatever it holds."""
        return float(solve_classes(self._classes.problem, within=self._within).objective)

    def _plan(self, solution: ClassSolution, nbytes: int | None) -> Plan:
        spare = nbytes is None or self._is_spare(float(solution.objective))
        # without normalization layers, no cheaper state is known to be as good on any model
        tolerance = 0.0 if self.regime == GENERAL and spare else self.tolerance
        target = Target(
            least=float(solution.objective),
            tolerance=tolerance,
            error=max(tolerance, self._classes.error(solution)),
            memory=math.inf if nbytes is None else nbytes,
            time=math.inf if self._classes.problem.time_budget is None else self._classes.problem.time_budget,
            spare=spare,
            both=solution.memory_price > 0 and solution.time_price > 0,
        )
        found = simplest(self._classes.groups, target)
        if found is not None and self._is_delicate and found[1] > target.least + tolerance:
            found = None
        runs, loss = found or (self._optimum(solution), float(solution.objective))
        limit = _binding(target.spare, solution)
        blocks = [block for index, mine in enumerate(runs) for block in self._blocks(index, mine, limit)]
        place = {name: index for index, name in enumerate(self.model.shapes)}
        blocks.sort(key=lambda block: min(map(place.__getitem__, block.parameters)))  # as in a resumed run
        settings = {
            "planner": "effects",
            "regime": self.regime,
            "tokens": self.tokens,
            "planned_tokens": round(self.effects.scale.tokens),
            "operations_per_byte": self.model.operations_per_byte,
            "device": self.model.device,
            "memory_budget": nbytes,
            "time_budget": self.planner.time if math.isfinite(self.planner.time) else None,
            "time": round(self._classes.base_time + self._classes.time_used(blocks), 4),
            "objective": loss,
            "bound": float(solution.bound),
            "given_up": round(max(0.0, loss - float(solution.objective)), 4),
            "memory_price": float(solution.memory_price),
            "time_price": float(solution.time_price),
        }
        per_rank = {"per_rank": True} if self._per_rank else {}
        plan = Plan(_numbered(blocks), settings | per_rank | self._prediction(blocks))
        return plan.split(self.model.splits)

    def _optimum(self, solution: ClassSolution) -> list[tuple[Run, ...]]:
        """The best assignment itself. Of tensors of one class, the first get the configurations that cost less."""
        by_cost = np.argsort(self._classes.problem.cost, axis=1, kind="stable")
        ordered = [np.repeat(order, counts[order]).tolist() for order, counts in zip(by_cost, solution.counts)]
        left = [iter(choices) for choices in ordered]
        return [
            tuple(Run(next(left[self._classes.class_of[name]]), 1) for name in members)
            for members in self._classes.members
        ]

    def _blocks(self, index: int, runs: Sequence[Run], limit: str) -> list[Block]:
        """The blocks of a group: one per configuration and learning-rate multiplier."""
        choices = [run.configuration for run in runs for _ in range(run.tensors)]
        chosen: dict[int, list[str]] = {}
        for name, choice in zip(self._classes.members[index], choices):
            chosen.setdefault(choice, []).append(name)
        blocks = []
        for choice, mine in chosen.items():
            if len(chosen) == 1:
                why = self._why_uniform(index, choice)
            else:
                place = f"{layer_of(mine[0])} to {layer_of(mine[-1])}"
                why = f"{place}: the {limit} budget does not fit one configuration that is as good for all layers"
            for factor in dict.fromkeys(self._classes.multipliers[name] for name in mine):
                some = [name for name in mine if self._classes.multipliers[name] == factor]
                blocks.append(self._block(some, choice, factor, why))
        return blocks

    def _block(self, names: Sequence[str], choice: int, factor: float, why: str) -> Block:
        return Block(
            self._classes.kind(names),
            self.candidates[choice],
            {name: self.model.shapes[name] for name in names},
            factor,
            {TERM: round(sum(self._classes.loss(name, choice) for name in names), 6)},
            why,
        )

    def _why_uniform(self, index: int, choice: int) -> str:
        totals = {
            c: sum(self._classes.loss(name, c) for name in self._classes.members[index])
            for c in self._classes.allowed(index)
        }
        best = min(totals, key=totals.__getitem__)
        if self._classes.members[index][0] in self._classes.not_trusted:
            return trust.WHY
        if totals[choice] <= totals[best]:
            return f"least predicted loss ({REGIME_TEXTS[self.regime]})"
        less = f"{totals[choice] - totals[best]:.2f}%"
        if totals[choice] - totals[best] <= self.tolerance:
            return f"as good as {self.candidates[best].alias} within {self.tolerance:.2g}%, in fewer bytes"
        memory = [sum(self._classes.bytes(name, c) for name in self._classes.members[index]) for c in (best, choice)]
        price = f"{human_bytes(memory[0] - memory[1])} more" if memory[0] > memory[1] else "more time"
        return f"{self.candidates[best].alias} is predicted to end {less} lower but needs {price}"

    def _prediction(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """What is predicted of the plan, in which interval, and where that comes from."""
        numel: dict[tuple[Role, Configuration], int] = {}
        for block in blocks:
            for name, shape in block.parameters.items():
                key = self._classes.roles[name], block.configuration
                numel[key] = numel.get(key, 0) + math.prod(shape)
        expected = sum(sum(block.risk.values()) for block in blocks)
        low = high = expected
        runs = 0
        for (role, configuration), count in numel.items():
            if (effect := self.effects.effect(role, configuration)) is not None:
                share = count / max(1, self._classes.elements[role])
                low += share * (effect.low - effect.loss)
                high += share * (effect.high - effect.loss)
                runs += effect.runs
        uses_law = any(self.effects.uses_law(*key) for key in numel)
        return {
            "expected_loss": round(expected, 4),
            "expected_low": round(low, 4),
            "expected_high": round(high, 4),
            "expected_from_runs": runs,
            "expected_source": self.effects.source(runs, uses_law=uses_law),
        }

    def _infeasible(
        self, error: Infeasible, memory: Memory, budget: int, reserved: int, *, raw: bool = False
    ) -> PlanError:
        """Say what is wrong in the user's numbers, and whether memory or time is to blame."""
        time, least = self.planner.time, error.smallest_memory
        if least is None:
            finite = np.where(np.isfinite(self._classes.problem.cost), self._classes.problem.time, np.inf)
            fastest = self._classes.base_time + float((finite.min(axis=1) * self._classes.problem.counts).sum())
            return PlanError(
                f"no plan is within time={time:g} of AdamW16's step time: the fastest needs {fastest:.4g}. Give time= "
                "more, or math.inf for no limit."
            )
        needed, given = least + reserved, max(0, budget + reserved)
        share = math.ceil(needed / max(1, self.reference_bytes) * 1e4) / 1e2  # rounded up: this budget must fit
        hint = ""
        if error.smallest_time is not None:  # memory alone is not to blame
            ratio = math.ceil((self._classes.base_time + error.smallest_time) * 1e4) / 1e4
            hint = f" It would fit with time={ratio:g} (now {time:g}), or math.inf for no limit."
        what = memory if raw else repr(memory)
        return PlanError(
            f"no plan fits memory={what}: the smallest needs {needed} B, {share:.2f}% of AdamW16's state "
            f"({human_bytes(needed)}; you gave {human_bytes(given)}).{hint}"
        )


def _numbered(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Blocks of one name get numbers."""
    names = [block.name for block in blocks]
    seen: dict[str, int] = {}
    named = []
    for block in blocks:
        seen[block.name] = seen.get(block.name, 0) + 1
        is_one_of_many = names.count(block.name) > 1
        named.append(replace(block, name=f"{block.name}/{seen[block.name]}") if is_one_of_many else block)
    return tuple(named)


def _binding(spare: bool, solution: ClassSolution) -> str:
    """Which budget keeps a plan from being better."""
    memory, time = not spare and solution.memory_price > 0, solution.time_price > 0
    return "memory and time" if memory and time else "time" if time else "memory"
