"""From a profile and a budget to a plan: blocks, risks, costs, then the MILP of Eq. 2."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from baoc.core.configuration import BEYOND, CATALOG, REFERENCE, Configuration
from baoc.core.mechanisms.normalised import Normalised
from baoc.core.plan import Block, Plan, PlanError, memory_budget
from baoc.core.roles import Role, canonical_name
from baoc.core.spec import SMALL_NUMEL, Hyper, Shape
from baoc.core.text import human_bytes
from baoc.planning import cost, partition, patterns
from baoc.planning import risk as risks
from baoc.planning.metrics import Metrics
from baoc.planning.partition.units import unique
from baoc.planning.settings import AUTO, Settings
from baoc.planning.space import PER_ROLE, REFINED
from baoc.profiling.facts import Facts
from baoc.profiling.profile import Profile
from baoc.solve import Infeasible, Problem, Solution, frontier, smallest_memory, solve

DEFAULT_MEMORY = 0.5
TOKENS = 4096
"""Of a step, until some were counted: few enough that an expensive update is not chosen by mistake."""
_RELATIVE_GAP, _MOST_STATES = 1e-6, 2**21  # a second at the most
_UNWANTED = 10.0  # risk of anything but the reference's mechanism for a block without signal
_PLURAL = {
    Role.VECTOR: "vectors",
    Role.MATRIX: "matrices",
    Role.STACK: "stacks",
    Role.CONVOLUTION: "convolutions",
    Role.EMBEDDING: "embeddings",
    Role.HEAD: "heads",
}


class Planner:
    """Holds what does not depend on the budget, so that every further budget costs milliseconds."""

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        profile: Profile | None,
        hyper: Hyper,
        settings: Settings | None = None,
        facts: Facts | None = None,
        rows: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Without a profile all blocks have the prior's metrics: the plan for a warm-up, or for a dry run. ``facts``
        are the profile's, if none are given. With the ``rows`` that one rank has of sharded parameters, all bytes are
        that rank's, budgets too.
        """
        self.settings = settings or Settings()
        if not any(math.prod(shape) for shape in shapes.values()):
            raise PlanError("there is nothing to plan: the model has no parameters, or only empty ones.")
        self._shapes = {canonical_name(name): shape for name, shape in shapes.items()}
        self._profile = None if profile is None else profile.with_names(canonical_name)
        self._hyper = hyper
        self.facts = facts or (Facts() if self._profile is None else self._profile.facts)
        self.regime = self.facts.regime if self.settings.regime == AUTO else self.settings.regime
        self.tokens = self.settings.tokens or self.facts.tokens or TOKENS
        self.candidates = self.settings.chosen_candidates
        self._roles = {name: _planned_role(self.facts.role(name, shape), shape) for name, shape in self._shapes.items()}
        self._elements = risks.elements((self._roles[name], math.prod(shape)) for name, shape in self._shapes.items())
        self.names, self.blocks = self._partition()
        self.metrics: list[risks.BlockMetrics] = [self._measured(block) for block in self.blocks]
        self._terms = self._risks()
        self._rows = {canonical_name(name): count for name, count in rows.items()}
        self.memory = cost.memory(self.blocks, self.candidates, self._rows)
        self.time = self._times()
        self._good: dict[float, int] = {}  # what memory="auto" is, by the time budget

    @property
    def reference_bytes(self) -> int:
        return sum(REFERENCE.state_bytes(shape, rows=self._rows.get(n)) for n, shape in self._shapes.items())

    def plan(self, memory: float | int | str = DEFAULT_MEMORY, time: float | None = None, *, taken: int = 0) -> Plan:
        """The plan of least risk within the budgets.

        ``memory`` is a share, a size or bytes; 0.0 is the cheapest plan there is, and ``"auto"`` the smallest whose
        risk is within the tolerance of the best. ``taken`` bytes of it are needed for something else.
        """
        time = self.time_budget(time)
        budget = self.budget(memory, time, taken=taken)
        try:
            solution = self._solve(budget - taken, time)
        except Infeasible as error:
            raise self._infeasible(error, memory, budget, time, taken) from error
        return self._plan(solution, budget - taken, time)

    def time_budget(self, time: float | None) -> float:
        """The one that is asked for, or the space's own."""
        if time is None:
            return self.settings.defaults.time
        check_time(time)
        return time

    def budget(self, memory: float | int | str, time: float | None = None, *, taken: int = 0) -> int:
        """Bytes of a memory budget as a person gives it. One that follows from plans grows by what else is taken."""
        time = self.time_budget(time)
        if memory == AUTO:
            return self._smallest_good(time) + taken
        budget = memory_budget(memory, self.reference_bytes)
        return self.least_bytes(time) + taken if budget == 0 else budget

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

    @functools.cached_property
    def cost(self) -> NDArray[np.float64]:
        """Phi of Eq. 2 with preferences (Sec. 3.2), infinite where a configuration is forbidden."""
        total = np.array([[sum(terms.values()) for terms in row] for row in self._terms])
        if np.isnan(total).any():
            block = self.names[int(np.argmax(np.isnan(total).any(axis=1)))]
            raise PlanError(f"the risks of block {block!r} are not numbers: its profile holds what is beyond range.")
        total -= self.settings.preference * self._meant(self._preferred)
        forbidden = self._meant(self._forbidden)
        if forbidden.all(axis=1).any():
            block = self.names[int(np.argmax(forbidden.all(axis=1)))]
            raise PlanError(f"every configuration is forbidden for block {block!r}. Allow it at least one.")
        for unwanted in (self._unsuited(), self._unmeasured()):
            without = forbidden | unwanted
            nothing_left = without.all(axis=1, keepdims=True)
            forbidden = np.where(nothing_left, forbidden, without)
        return np.where(forbidden, np.inf, total)

    def _resolve_patterns(self, names_of: Mapping[str, Sequence[str]]) -> None:
        # a configuration that is no candidate anyway may be forbidden
        self._forbidden = patterns.chosen(self.settings.forbid, self.candidates, names_of, (*CATALOG, *BEYOND))
        self._preferred = patterns.chosen(self.settings.prefer, self.candidates, names_of)

    def _meant(self, rows: Mapping[str, patterns.Row]) -> NDArray[np.bool_]:
        """Which (block, configuration) pairs the patterns name: those of any of a block's parameters."""
        return np.array([np.any([rows[name] for name in block], axis=0) for block in self.blocks], dtype=bool)

    def _unsuited(self) -> NDArray[np.bool_]:
        """Which pairs would not be what they say: a mechanism that falls back to another for all of a block."""
        found = [
            [
                not any(c.mechanism.suits(shape, self._roles[name]) for name, shape in block.items())
                for c in self.candidates
            ]
            for block in self.blocks
        ]
        return np.array(found, dtype=bool).reshape(len(self.blocks), len(self.candidates))

    def _unmeasured(self) -> NDArray[np.bool_]:
        """Which pairs nobody has measured, where measurements are what a plan is made by. Candidates that a person
        names are a last resort all the same.
        """
        if self.settings.chosen_risk != risks.MEASURED or self.settings.candidates is not None:
            return np.zeros((len(self.blocks), len(self.candidates)), dtype=bool)
        table = risks.Table.load(self.settings.table)
        found = [
            [any(table.effect(self.regime, role, c) is None for role in metrics.roles) for c in self.candidates]
            for metrics in self.metrics
        ]
        return np.array(found, dtype=bool).reshape(len(self.blocks), len(self.candidates))

    def _partition(self) -> tuple[list[str], list[dict[str, Shape]]]:
        granularity = self.settings.chosen_granularity
        if granularity == PER_ROLE:
            return self._by_role()
        structure = "module" if granularity == REFINED else cast(partition.Granularity, granularity)
        units = partition.structural_units(self._shapes, structure)
        groups: Sequence[Sequence[int]] = [(i,) for i in range(len(units))]
        if granularity == REFINED and self._profile is not None:
            vectors = unit_vectors(units, self._profile, self._hyper, self.settings.anchors)
            groups = partition.refine(
                units, vectors, min_share=self.settings.min_share, quantile=self.settings.quantile
            )
        block_of = {name: block for block, parameters in partition.blocks(units, groups) for name in parameters}
        self._resolve_patterns({name: (name, unit.name, block_of[name]) for unit in units for name in unit.parameters})
        named = partition.blocks(units, [run for group in groups for run in self._of_one_rule(group, units)])
        return [name for name, _ in named], [{n: self._shapes[n] for n in parameters} for _, parameters in named]

    def _of_one_rule(self, group: Sequence[int], units: Sequence[partition.Unit]) -> list[list[int]]:
        """A group cut where patterns tell its units apart, or it might be left with nothing that is allowed."""

        def rule(index: int) -> tuple[bytes, ...]:
            mine = units[index].parameters
            rules = (self._forbidden, self._preferred)
            return tuple(np.any([rows[name] for name in mine], axis=0).tobytes() for rows in rules)

        return [list(run) for _, run in itertools.groupby(group, rule)]

    def _by_role(self) -> tuple[list[str], list[dict[str, Shape]]]:
        """Every matrix for itself, so that any budget can be spent, and all vectors together."""
        vectors = {name: shape for name, shape in self._shapes.items() if self._roles[name] is Role.VECTOR}
        others = {name: shape for name, shape in self._shapes.items() if name not in vectors}
        self._resolve_patterns({name: (name, _PLURAL[self._roles[name]]) for name in self._shapes})
        blocks = [*({name: shape} for name, shape in others.items()), *([vectors] if vectors else [])]
        return unique([*others, *([_PLURAL[Role.VECTOR]] if vectors else [])]), blocks

    def _times(self) -> NDArray[np.float64]:
        if self.settings.defaults.time_is_of == "update":
            return cost.update_ratios(self.blocks, self.candidates)
        return cost.step_ratios(self.blocks, self.candidates, self.tokens, self.facts.operations_per_byte)

    def _measured(self, block: Mapping[str, Shape]) -> risks.BlockMetrics:
        mine = [(self._roles[name], math.prod(shape)) for name, shape in block.items()]
        shares = risks.role_shares(mine, of=self._elements)
        if self._profile is not None and self._needs_metrics:
            return Metrics(self._profile, block, self._hyper, roles=shares)
        prior = risks.Prior(roles=shares)
        return prior if any(len(shape) > 1 for shape in block.values()) else replace(prior, structure_residual=None)

    @property
    def _needs_metrics(self) -> bool:
        """Whether gradients say anything about risks or learning rates."""
        return self.settings.chosen_risk != risks.MEASURED or not all(map(_is_as_long_as_adamw, self.candidates))

    def _risks(self) -> list[list[dict[str, float]]]:
        model = risks.find(self.settings.chosen_risk)
        settings = self.settings.risk_settings(self._hyper, self.regime)
        return [
            [model(m, c, settings) if self._can_judge(m) else _risk_without_signal(c) for c in self.candidates]
            for m in self.metrics
        ]

    def _can_judge(self, metrics: risks.BlockMetrics) -> bool:
        return metrics.has_signal or self.settings.chosen_risk == risks.MEASURED

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
        """Blocks of one role with one choice, under a name for them all: a person reads a few lines, not hundreds."""
        groups: dict[tuple[Role, int], list[int]] = {}
        for index, (block, choice) in enumerate(zip(self.blocks, chosen)):
            groups.setdefault((self._roles[next(iter(block))], choice), []).append(index)
        choices, numbers = Counter(role for role, _ in groups), Counter[Role]()
        named: dict[str, list[int]] = {}
        for (role, _), members in groups.items():
            numbers[role] += 1
            named[f"{_PLURAL[role]}/{numbers[role]}" if choices[role] > 1 else _PLURAL[role]] = members
        return named

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
            self._lr_scale(self.metrics[members[0]], configuration),
            {term: round(value, 6) for term, value in risk.items()},
            self._why(members, choice),
        )

    def _expectation(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """What the measured effects say of the plan, and how many runs they come from."""
        table = risks.Table.load(self.settings.table)
        used = {(self._roles[name], block.configuration) for block in blocks for name in block.parameters}
        effects = [table.effect(self.regime, role, configuration) for role, configuration in used]
        found = [effect for effect in effects if effect is not None]
        return {
            "expected_loss": round(sum(sum(block.risk.values()) for block in blocks), 4),
            "expected_from_runs": sum(effect.runs for effect in found),
        }

    def _lr_scale(self, metrics: risks.BlockMetrics, configuration: Configuration) -> float:
        """Ratio of the reference's update RMS to this configuration's on the sampled gradients."""
        if (
            _is_as_long_as_adamw(configuration)
            or self.settings.lr_match == "none"
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
        what = f"would end {less:.2g}% lower" if is_loss else f"risks {less:.3f} less"
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


def check_time(time: object) -> None:
    """Raise unless a time budget is one; infinity lifts it."""
    if not isinstance(time, (int, float)) or isinstance(time, bool) or not time > 0:
        raise PlanError(
            f"the time budget {time!r} is not a ratio to AdamW16's time: it must be a number above 0, like 1.3, or "
            "math.inf for none."
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


def _is_as_long_as_adamw(configuration: Configuration) -> bool:
    """Whether updates at AdamW's learning rate have AdamW's length by construction."""
    mechanism = configuration.mechanism
    return (mechanism.adaptive and mechanism.momentum) or isinstance(mechanism, Normalised)


def _planned_role(role: Role, shape: Shape) -> Role:
    """Small embeddings and heads have fp32 state in every configuration: they are no more than vectors."""
    is_small = role in (Role.EMBEDDING, Role.HEAD) and math.prod(shape) < SMALL_NUMEL
    return Role.VECTOR if is_small else role


def _risk_without_signal(configuration: Configuration) -> dict[str, float]:
    switches = configuration.switches
    kept = configuration.mechanism_name == REFERENCE.mechanism_name and not switches.factored
    return {"aggressive": switches.bits / 1000 if kept else _UNWANTED + risks.aggressiveness(configuration)}
