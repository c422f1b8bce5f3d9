"""Tensors of a model that an ``EffectPlanner`` need not tell apart, and what each configuration costs them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from baoc.core.configuration import CATALOG, EXTENDED, Configuration
from baoc.core.plan import Block, PlanError
from baoc.core.roles import Role, layer_of
from baoc.core.spec import Reach, Shape
from baoc.planners import cost, lr_multipliers, patterns, trust
from baoc.planners.base import AUTO
from baoc.planners.effect_table import UNKNOWN, Effect, EffectTable, elements
from baoc.planners.model_facts import GENERAL, SCRATCH, ModelFacts
from baoc.planners.scaling import EffectsAtScale, Scale
from baoc.planners.simplify import Group
from baoc.solve import ClassProblem, ClassSolution

if TYPE_CHECKING:
    from baoc.planners.effects import EffectPlanner

TOKENS = 4096
"""Of a step, until they were counted: few enough that an expensive update is not chosen by mistake."""
LAST_RESORT = 10.0
"""Percent of the loss that a tensor without state is charged outside of the regime "scratch", whatever its size."""
PLURAL = {
    Role.VECTOR: "vectors",
    Role.MATRIX: "matrices",
    Role.STACK: "stacks",
    Role.CONVOLUTION: "convolutions",
    Role.EMBEDDING: "embeddings",
    Role.HEAD: "heads",
}
SMALL = "small tables"
"""A block of embeddings and heads that are planned like vectors, where no vector is among them."""


class EffectClasses:
    """One model's classes of interchangeable tensors, with what each configuration costs them.

    Args:
        planner: settings.
        model: facts about the model.
        rows: of sharded parameters, those that count; none if bytes of all ranks do.
    """

    def __init__(self, planner: EffectPlanner, model: ModelFacts, rows: Mapping[str, int]) -> None:
        if not any(math.prod(shape) for shape in model.shapes.values()):
            raise PlanError("there is nothing to plan: the model has no parameters, or only empty ones.")
        self.planner, self.model, self._rows = planner, model, rows
        self._table = EffectTable.load(planner.table)
        self.regime = model.regime if planner.regime == AUTO else planner.regime
        self.tokens = planner.tokens or model.tokens or TOKENS
        self.roles = {name: model.planned_role(name) for name in model.shapes}
        self.candidates = self._candidates()
        scale = Scale.of(model.hidden_numel, self.tokens, planner.steps)
        self.effects = EffectsAtScale(self._table, self.regime, scale, is_own=planner.table is not None)
        self.elements = elements((self.roles[name], math.prod(shape)) for name, shape in model.shapes.items())
        self._unsuited_rows: dict[tuple[Shape, Role], patterns.Row] = {}
        self.multipliers = self._lr_multipliers()
        self.not_trusted = trust.untrusted(model, self.regime)
        self.members, self.class_of, self.problem, self.base_time = self._classes()
        self.groups = [self._group(members) for members in self.members]

    def _candidates(self) -> tuple[Configuration, ...]:
        if self.planner.candidates is not None:
            return cast("tuple[Configuration, ...]", self.planner.candidates)
        # vectors have a choice in the regime "general" only
        planned = {n for n in self.model.shapes if self.regime == GENERAL or self.roles[n] is not Role.VECTOR}
        return self._table.distinct({self.model.shapes[name] for name in planned})

    def _classes(self) -> tuple[list[list[str]], dict[str, int], ClassProblem, float]:
        """Group tensors that may share a configuration; within them, tensors of one shape are a class."""
        forbidden, preferred = self._rules()
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name in self.model.shapes:
            key = self.roles[name], forbidden[name].tobytes(), preferred[name].tobytes()
            groups.setdefault(key, []).append(name)
        classes: dict[tuple[object, ...], int] = {}
        class_of: dict[str, int] = {}
        examples: list[str] = []
        counts: list[int] = []
        numel = [sum(math.prod(self.model.shapes[name]) for name in members) for members in groups.values()]
        losses: list[NDArray[np.float64]] = []
        for index, members in enumerate(groups.values()):
            for name in members:
                shape = self.model.shapes[name]
                kind = index, shape, self._rows.get(name), self.model.splits.get(name)
                place = classes.setdefault(kind, len(classes))
                if place == len(counts):
                    counts.append(0)
                    examples.append(name)
                    share = math.prod(shape) / max(1, numel[index])
                    loss = np.array([self.loss(name, c) for c in range(len(self.candidates))])
                    loss -= self.planner.preference * share * preferred[name]
                    loss += self._last_resorts
                    losses.append(np.where(forbidden[name], np.inf, loss))
                counts[place] += 1
                class_of[name] = place
        self._examples = examples
        shapes = self._shapes = [self.model.shapes[name] for name in examples]
        memory = cost.memory([{name: self.model.shapes[name]} for name in examples], self.candidates, self._rows)
        times = cost.step_times(
            shapes,
            counts,
            self.candidates,
            self.tokens,
            self.model.operations_per_byte,
            self.model.device,
            [self.model.splits.get(name) for name in examples],
        )
        limit = None if math.isinf(self.planner.time) else self.planner.time - times.base
        if limit is not None and limit < 0:
            raise PlanError(
                f"time={self.planner.time:g} is less than the forward and backward passes take ({times.base:.3g} of a "
                "step with AdamW16). Give time= more, or math.inf for no limit."
            )
        problem = ClassProblem(np.array(counts), np.array(losses), memory, times.updates, None, limit)
        return list(groups.values()), class_of, problem, times.base

    @functools.cached_property
    def _last_resorts(self) -> NDArray[np.float64]:
        """What keeps plans from rules without state unless training is from scratch, in percent of the loss per tensor.

        Without normalization layers, one small matrix without state can spoil a whole model, for example the first
        layer of a field, so its share of the elements does not count. In fine-tuning, what was measured differs too
        much between models (`docs/fine-tuning.md`).
        """
        has_state = np.array([bool(each.slots) for each in self.candidates])
        return np.where(has_state | (self.regime == SCRATCH), 0.0, LAST_RESORT)

    def _rules(self) -> tuple[dict[str, patterns.Row], dict[str, patterns.Row]]:
        """Which configurations each parameter must not have, and which it is to prefer."""
        names_of = {name: (name, PLURAL[self.roles[name]]) for name in self.model.shapes}
        # a configuration that is no candidate may be forbidden all the same
        forbidden = patterns.chosen(self.planner.forbid, self.candidates, names_of, (*CATALOG, *EXTENDED))
        preferred = patterns.chosen(self.planner.prefer, self.candidates, names_of)
        for name, row in forbidden.items():
            if row.all():
                raise PlanError(f"every configuration is forbidden for parameter {name!r}. Allow at least one.")
            for unwanted in (self._unsuited(name), self._untrusted(name), self._unmeasured(name)):
                if not (row | unwanted).all():
                    row |= unwanted
        return forbidden, preferred

    def _unsuited(self, name: str) -> patterns.Row:
        """Configurations whose rule would fall back to another one."""
        key = self.model.shapes[name], self.roles[name]
        if key not in self._unsuited_rows:
            row = np.array([not each.mechanism.suits(*key) for each in self.candidates], dtype=bool)
            self._unsuited_rows[key] = row
        return self._unsuited_rows[key]

    def _untrusted(self, name: str) -> patterns.Row:
        """Rules that work on whole matrices, for parameters where they are not trusted or have no workspace."""
        is_unwanted = name in self.not_trusted or not self.model.has_workspace
        return np.array([is_unwanted and each.mechanism.reach is Reach.MATRIX for each in self.candidates], dtype=bool)

    def _unmeasured(self, name: str) -> patterns.Row:
        """Configurations without a measured effect. Those that the user names may be chosen all the same."""
        if self.planner.candidates is not None:
            return np.zeros(len(self.candidates), dtype=bool)
        return self._without_effect[self.roles[name]]

    # Not functools.cache: that of a method is kept by its class, and would keep every model that was ever planned for.

    @functools.cached_property
    def _without_effect(self) -> dict[Role, patterns.Row]:
        def row(role: Role) -> list[bool]:
            return [self.effects.effect(role, each) is None for each in self.candidates]

        return {role: np.array(row(role), dtype=bool) for role in set(self.roles.values())}

    def _group(self, names: Sequence[str]) -> Group:
        classes = [self.class_of[name] for name in names]
        weights = np.stack([self.problem.cost, self.problem.memory, self.problem.time])[:, classes]
        if self.problem.time_budget is None:
            weights[2] = 0.0
        return Group(weights, [layer_of(name) for name in names])

    def allowed(self, index: int) -> list[int]:
        place = self.class_of[self.members[index][0]]
        return [int(choice) for choice in np.flatnonzero(np.isfinite(self.problem.cost[place]))]

    def loss(self, name: str, choice: int) -> float:
        role = self.roles[name]
        share = math.prod(self.model.shapes[name]) / max(1, self.elements[role])
        return share * self._effects[role][0][choice]

    @functools.cached_property
    def _effects(self) -> dict[Role, tuple[list[float], list[float]]]:
        """Loss and standard error of all candidates by role, in percent of the loss."""

        def effects(role: Role) -> tuple[list[float], list[float]]:
            found = [self.effects.effect(role, each) or Effect(UNKNOWN, UNKNOWN) for each in self.candidates]
            return [effect.loss for effect in found], [effect.error for effect in found]

        return {role: effects(role) for role in set(self.roles.values())}

    def bytes(self, name: str, choice: int) -> int:
        return int(self.problem.memory[self.class_of[name], choice])

    def time_used(self, blocks: Sequence[Block]) -> float:
        index = {configuration: place for place, configuration in enumerate(self.candidates)}
        return sum(
            float(self.problem.time[self.class_of[name], index[block.configuration]])
            for block in blocks
            for name in block.parameters
        )

    def kind(self, names: Sequence[str]) -> str:
        role = self.roles[names[0]]
        return PLURAL[role] if any(self.model.role(name) is role for name in names) else SMALL

    def _lr_multipliers(self) -> dict[str, float]:
        if not (self.planner.lr_multipliers and self.model.one_lr):
            return dict.fromkeys(self.model.shapes, 1.0)
        roles = {name: (self.model.role(name), shape) for name, shape in self.model.shapes.items()}
        return lr_multipliers.multipliers(roles, self.regime)

    def error(self, solution: ClassSolution) -> float:
        """The standard error of a prediction, in percent of the loss."""
        total = 0.0
        for place, name in enumerate(self._examples):
            share = math.prod(self._shapes[place]) / max(1, self.elements[self.roles[name]])
            errors = self._effects[self.roles[name]][1]
            total += share * sum(n * error for n, error in zip(solution.counts[place].tolist(), errors))
        return total
