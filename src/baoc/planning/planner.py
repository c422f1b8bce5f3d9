"""From choices and a budget to a plan: the MILP of Eq. 2."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from baoc.core.budget import is_per_rank, memory_budget
from baoc.core.configuration import REFERENCE, Configuration
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.roles import Role
from baoc.core.spec import Shape
from baoc.core.text import human_bytes
from baoc.planning import placement, rates
from baoc.planning import risk as risks
from baoc.planning.choices import PLURAL, SMALL, Choices, is_as_long_as_adamw
from baoc.planning.metrics import Metrics
from baoc.planning.settings import AUTO
from baoc.planning.space import PER_ROLE
from baoc.solve import Infeasible, Problem, Solution, frontier, smallest_memory, solve

DEFAULT_MEMORY = 0.5
_RELATIVE_GAP, _MOST_STATES = 1e-6, 2**21  # a second at the most


class Planner(Choices):
    """Choices, and the best of them within any budgets: each costs milliseconds, since all else is there."""

    @functools.cached_property
    def _good(self) -> dict[float, int]:
        """What ``memory="auto"`` is, by the time budget."""
        return {}

    def plan(
        self,
        memory: float | int | str = DEFAULT_MEMORY,
        time: float | None = None,
        *,
        host_memory: float | int | str | None = None,
        taken: int = 0,
    ) -> Plan:
        """The plan of least risk within the budgets.

        ``memory`` is a share, a size or bytes; 0.0 is the cheapest plan there is, and ``"auto"`` the smallest whose
        risk is within the tolerance of the best. ``taken`` bytes of it are needed for something else. With a
        ``host_memory``, what is chosen is chosen for both together, ``memory`` bounds what is on the device, and 0.0
        is nothing there.
        """
        time = self.time_budget(time)
        if host_memory is not None and self.host_budget(host_memory):
            check_budgets(memory, host_memory)
            return self._divided_plan(memory, host_memory, time, taken)
        budget = self.budget(memory, time, taken=taken)
        try:
            solution = self._solve(budget - taken, time)
        except Infeasible as error:
            raise self._infeasible(error, memory, budget, time, taken) from error
        return self._plan(solution, budget - taken, time)

    def _divided_plan(self, memory: float | int | str, host_memory: float | int | str, time: float, taken: int) -> Plan:
        device, host = self.budget(memory, time, divided=True) - taken, self.host_budget(host_memory)

        def plan_for(total: int) -> Plan:
            try:
                solution = self._solve(total if device >= 0 else -1, time)
            except Infeasible as error:
                if error.smallest_memory is None:
                    raise self._infeasible(error, memory, device, time) from error
                needed = f"{error.smallest_memory} B ({human_bytes(error.smallest_memory)})"
                whole = "" if total == device + host else " on one side, for it could not be divided"
                raise PlanError(
                    f"no plan fits memory={memory!r} and host_memory={host_memory!r}: the smallest needs {needed}"
                    f"{whole}; you gave {human_bytes(device + taken)} and {human_bytes(host)}."
                ) from error
            plan = self._plan(solution, device, time)
            return replace(plan, settings={**plan.settings, "host_memory_budget": host})

        return placement.divided(plan_for, device, host, self._rows)

    def host_budget(self, host_memory: float | int | str | None) -> int:
        """Bytes of a budget for host memory; none is none."""
        return 0 if host_memory is None else memory_budget(host_memory, self.reference_bytes, "host_memory")

    def time_budget(self, time: float | None) -> float:
        """The one that is asked for, or the space's own."""
        if time is None:
            return self.settings.defaults.time
        check_time(time)
        return time

    def budget(
        self, memory: float | int | str, time: float | None = None, *, taken: int = 0, divided: bool = False
    ) -> int:
        """Bytes of a memory budget as a person gives it. One that follows from plans grows by what else is taken.

        ``divided``: it stands beside one for host memory, so that 0.0 means no more than it says.
        """
        time = self.time_budget(time)
        if memory == AUTO:
            return self._smallest_good(time) + taken
        budget = memory_budget(memory, self.reference_bytes)
        return self.least_bytes(time) + taken if budget == 0 and not divided else budget

    def least_bytes(self, time: float | None = None) -> int:
        """What the cheapest plan holds."""
        time = self.time_budget(time)
        try:
            return smallest_memory(self.problem(None, time))
        except Infeasible as error:
            raise self._infeasible(error, 0.0, 0, time) from error

    def _smallest_good(self, time: float) -> int:
        """The least memory whose plan is within the tolerance of the best: the curve falls, so halving finds it."""
        if time in self._good:
            return self._good[time]
        low, high = self.least_bytes(time), int(self.memory.max(axis=1).sum())
        aim = self._solve(None, time).objective + self.settings.tolerance + 1e-9
        step = max(1, self.reference_bytes >> 10)  # finer than anybody would ask for
        while high - low > step:
            middle = (low + high) // 2
            low, high = (low, middle) if self._solve(middle, time).objective <= aim else (middle, high)
        self._good[time] = high
        return high

    def _solve(self, budget: int | None, time: float) -> Solution:
        """Exactly, or for measured effects as far as they are known: layers that are all alike make proofs long."""
        if self.settings.chosen_risk != risks.MEASURED:
            return solve(self.problem(budget, time))
        return solve(self.problem(budget, time), relative_gap=_RELATIVE_GAP, most_states=_MOST_STATES)

    def frontier(self, memories: Sequence[float | int | str], time: float | None = None) -> list[Plan]:
        """The plans of many memory budgets; those that cannot be met are left out."""
        time = self.time_budget(time)
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

    def _plan(self, solution: Solution, budget: int, time: float) -> Plan:
        chosen = solution.choice.tolist()
        if self.settings.chosen_granularity == PER_ROLE:
            groups = self._alike(chosen)
        else:
            groups = {name: [index] for index, name in enumerate(self.names)}
        blocks = [self._block(name, members, chosen[members[0]]) for name, members in groups.items()]
        settings = {
            "space": self.settings.space,
            "regime": self.regime,
            "tokens": self.tokens,
            "operations_per_byte": self.facts.operations_per_byte,
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
        if self.settings.chosen_risk == risks.MEASURED:
            settings |= self._expectation(blocks)
        return Plan(tuple(blocks), settings)

    def _alike(self, chosen: Sequence[int]) -> dict[str, list[int]]:
        """Blocks of one role, rate and choice under a name for them all: a person reads a few lines, not hundreds."""
        groups: dict[tuple[str, float, int], list[int]] = {}
        for index, (block, choice) in enumerate(zip(self.blocks, chosen)):
            key = self._kind(block), self._lr_factors[next(iter(block))], choice
            groups.setdefault(key, []).append(index)
        choices, numbers = Counter(kind for kind, *_ in groups), Counter[str]()
        named: dict[str, list[int]] = {}
        for (kind, *_), members in groups.items():
            numbers[kind] += 1
            named[f"{kind}/{numbers[kind]}" if choices[kind] > 1 else kind] = members
        return named

    def _kind(self, block: Mapping[str, Shape]) -> str:
        """What a block of one role is called."""
        role = self._roles[next(iter(block))]
        has_it = any(self.facts.role(name, shape) is role for name, shape in block.items())
        return PLURAL[role] if has_it else SMALL

    def _block(self, name: str, members: Sequence[int], choice: int) -> Block:
        configuration = self.candidates[choice]
        risk: dict[str, float] = {}
        for member in members:
            for term, value in self._terms[member][choice].items():
                risk[term] = risk.get(term, 0.0) + value
        return Block(
            name,
            configuration,
            {parameter: shape for member in members for parameter, shape in self.blocks[member].items()},
            self._lr_factor(members) * self._lr_scale(self.metrics[members[0]], configuration),
            {term: round(value, 6) for term, value in risk.items()},
            self._why(members, choice),
        )

    def _expectation(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """What the measured effects say of the plan, how far workloads were apart, and from how many runs."""
        table = risks.Table.load(self.settings.table)
        elements: dict[tuple[Role, Configuration], int] = {}
        for block in blocks:
            for name, shape in block.parameters.items():
                key = self._roles[name], block.configuration
                elements[key] = elements.get(key, 0) + math.prod(shape)
        found = {key: effect for key in elements if (effect := table.effect(self.regime, *key)) is not None}
        spread = sum(
            elements[role, configuration] / max(1, self._elements[role]) * effect.spread
            for (role, configuration), effect in found.items()
        )
        return {
            "expected_loss": round(sum(sum(block.risk.values()) for block in blocks), 4),
            "expected_spread": round(spread, 4),
            "expected_from_runs": sum(effect.runs for effect in found.values()),
        }

    def _lr_factor(self, members: Sequence[int]) -> float:
        """That of the roles of some blocks' parameters; where these differ, as when whole layers are blocks, none."""
        factors = {self._lr_factors[name] for member in members for name in self.blocks[member]}
        return factors.pop() if len(factors) == 1 else 1.0

    def _lr_scale(self, metrics: risks.BlockMetrics, configuration: Configuration) -> float:
        """Ratio of the reference's update RMS to this configuration's on the sampled gradients."""
        if (
            is_as_long_as_adamw(configuration)
            or self.settings.chosen_lr_match == rates.AS_GIVEN
            or not isinstance(metrics, Metrics)
            or not metrics.has_signal
        ):
            return 1.0
        own = metrics.update_rms(configuration)
        return float(f"{metrics.update_rms(REFERENCE) / own:.4g}") if own > 0 else 1.0

    def _why(self, members: Sequence[int], chosen: int) -> str:
        if self._profile is None and self.settings.chosen_risk != risks.MEASURED:
            return "no gradients seen yet: assumed to be like most blocks"
        if not self._can_judge(self.metrics[members[0]]):
            kept = self.candidates[chosen].mechanism_name == REFERENCE.mechanism_name
            what = "keeps AdamW's mechanism in its cheapest format that fits" if kept else "got what the budget left"
            return f"no gradient in the warm-up: {what}"
        costs, memory, time = (each[list(members)].sum(axis=0) for each in (self.cost, self.memory, self.time))
        best = int(np.argmin(costs))
        is_loss = self.settings.chosen_risk == risks.MEASURED
        if best == chosen:
            return "least loss of all" if is_loss else "least risk of all"
        more = human_bytes(int(memory[best] - memory[chosen]))
        larger, slower = memory[best] > memory[chosen], time[best] > time[chosen]
        price = f"{more} more" if larger else "more time" if slower else "what other blocks need more"
        less = costs[chosen] - costs[best]
        by = f"{less:.2f}%" if less >= 0.005 else "less than 0.01%"
        what = f"would end {by} lower" if is_loss else f"risks {less:.3f} less"
        return f"{self.candidates[best].alias} {what} but needs {price}"

    def _infeasible(self, error: Infeasible, memory: object, budget: int, time: float, taken: int = 0) -> PlanError:
        """What is wrong in the numbers that were given, and whether memory or time is to blame."""
        least = error.smallest_memory
        if least is None:
            fastest = float(self.time.min(axis=1, where=np.isfinite(self.cost), initial=np.inf).mean())
            return PlanError(
                f"no plan is within time={time:g} of AdamW16's {self._time_of} time: the fastest needs {fastest:.4g}. "
                "Give time= more, or math.inf for no limit."
            )
        needed = least + taken
        share = math.ceil(needed / max(1, self.reference_bytes) * 1e4) / 1e2  # rounded up: this one must fit
        hint = ""
        if isinstance(memory, int) and memory in (1, 2):
            hint = f" An int is read as bytes: write {memory}.0 for a share."
        elif error.smallest_time is not None:  # memory alone is not to blame
            hint = (
                f" It would fit if time={time:g} (of AdamW16's {self._time_of} time) were "
                f"{math.ceil(error.smallest_time * 1e4) / 1e4:g}, or math.inf for no limit."
            )
        return PlanError(
            f"no plan fits memory={memory!r}: the smallest that does needs {needed} B, {share:.2f}% of AdamW16's state "
            f"({human_bytes(needed)}; you gave {human_bytes(budget)}).{hint}"
        )

    @property
    def _time_of(self) -> str:
        return self.settings.defaults.time_is_of


def check_budgets(memory: float | int | str, host_memory: float | int | str | None = None) -> None:
    """Raise unless memory budgets are such, and go together."""
    if memory != AUTO:
        memory_budget(memory, 1)
    if host_memory is None:
        return
    memory_budget(host_memory, 1, "host_memory")
    if memory == AUTO:
        raise PlanError(
            f"memory='auto' leaves open what the device may hold, and host_memory={host_memory!r} is for what it may "
            "not. Give memory= a size or a share, or leave host_memory= out."
        )
    if is_per_rank(memory) != is_per_rank(host_memory):
        raise PlanError(
            f"memory={memory!r} and host_memory={host_memory!r}: one is of a rank, the other of all. Write '/rank' "
            "behind both, or behind neither."
        )


def check_time(time: object) -> None:
    """Raise unless a time budget is one; infinity lifts it."""
    if not isinstance(time, (int, float)) or isinstance(time, bool) or not time > 0:
        raise PlanError(
            f"the time budget {time!r} is not a ratio to AdamW16's time: it must be a number above 0, like 1.3, or "
            "math.inf for none."
        )
