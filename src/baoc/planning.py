"""What a run of ``BAOC`` plans with: settings, what is known about the model, and what its planner has learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from baoc.core.plan import Block, Plan
from baoc.core.roles import role_of
from baoc.core.spec import Hyper
from baoc.core.splits import Splits, matched
from baoc.optim import groups
from baoc.optim.members import Members
from baoc.plan import measured_times
from baoc.planners.base import Budget, Memory, Planner, Progress, Session, check_planner, plain_settings
from baoc.planners.model_facts import ModelFacts
from baoc.planners.paper.planner import PaperSession
from baoc.planners.paper.statistics import GradientStatistics
from baoc.planners.total import Tensors, Total, beside_workspace


@dataclass(frozen=True)
class Settings:
    """What a script asks for: a budget and a planner."""

    budget: Budget
    planner: Planner

    def changed(
        self, memory: Memory | None = None, host_memory: Memory | None = None, planner: Planner | None = None
    ) -> Settings:
        """Return other settings; ``None`` keeps what there is."""
        given: dict[str, Any] = {"memory": memory, "host_memory": host_memory}
        budget = dataclasses.replace(self.budget, **{key: value for key, value in given.items() if value is not None})
        return Settings(budget, self.planner if planner is None else check_planner(planner))

    def plain(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        own = {"memory": self.budget.memory, "host_memory": self.budget.host_memory}
        return own | plain_settings(self.planner)


@dataclass(frozen=True)
class Run:
    """What a run has besides state and plan. A change makes another one, so what fails changes nothing.

    Args:
        settings: a script's, unless ``replan`` changed them.
        facts: about the model.
        planned: names of the parameters that plans are made for: all but those of groups with a configuration.
        session: what the planner has learned.
        progress: when the last plan was made.
        is_stale: whether the plan is not that of the settings, so that the next step must plan.
        total: the budget for everything, of which that for state is a part.
    """

    settings: Settings
    facts: ModelFacts
    planned: Sequence[str]
    session: Session
    progress: Progress = field(default_factory=Progress)
    is_stale: bool = False
    total: Total | None = None

    @classmethod
    def started(
        cls, settings: Settings, facts: ModelFacts, planned: Sequence[str], members: Members, total: Total | None
    ) -> Run:
        """Return a run of which no step was made."""
        if total is not None:
            settings = settings.changed(memory=left_for_state(total, members))
        session = settings.planner.start(_of(members, planned), model_of(facts, planned, members))
        return cls(settings, facts, planned, session, total=total)

    def changed(self, **changes: Any) -> Run:
        """Return the run with other values."""
        return dataclasses.replace(self, **changes)

    def restarted(self, members: Members) -> Run:
        """Return the run with a planner that has learned nothing."""
        return self.changed(session=self.settings.planner.start(self.params(members), self.model(members)))

    def renamed(self, names: Mapping[str, str]) -> Run:
        """Return the run with other parameter names. Parameters without a new name have left."""
        if isinstance(self.session, PaperSession):
            self.session.forget_names()
        planned = [names[name] for name in self.planned if name in names]
        return self.changed(planned=planned, facts=self.facts.renamed(names))

    def with_parameters(self, new: Sequence[str], splits: Splits, members: Members) -> Run:
        """Return the run with plans for new parameters too."""
        shapes = {name: shape for name, shape in members.shapes.items() if name in new}
        roles = {name: role_of(shape, name) for name, shape in shapes.items()}
        facts = dataclasses.replace(
            self.facts,
            roles={**self.facts.roles, **roles},
            splits={**self.facts.splits, **matched(splits, shapes)},
        )
        run = self.changed(planned=[*self.planned, *new], facts=facts)
        return run.restarted(members) if run.is_warming_up else run

    @property
    def is_warming_up(self) -> bool:
        """Whether the planner is still to make the plan that training goes on with."""
        is_open = self.progress.planned_at is None or self.progress.failed
        return is_open and self.settings.planner.reads_gradients and self.session.is_watching

    # ---- plans ----

    def first_plan(self, members: Members) -> Plan:
        """Return the plan before any gradient."""
        return self._within_budget(members, self.settings.planner.initial_plan, self.session.nbytes)

    def plan(self, members: Members, statistics: GradientStatistics | None = None) -> Plan:
        """Return the plan for what is known now, or for statistics from elsewhere."""
        params, session = self.params(members), self.session
        measured: dict[str, Any] = {}
        if isinstance(session, PaperSession) and session.needs_times:
            first, planner = next(iter(params.values())), self.settings.planner
            dtype = first.dtype if first.dtype.is_floating_point else torch.float32
            times = measured_times(planner, self.model(members), first.device, dtype)  # type: ignore[arg-type]
            measured["times"] = times
        return self._within_budget(
            members, lambda model, budget: session.plan(params, model, budget, statistics, **measured)
        )

    def fits(self, members: Members, plan: Plan) -> bool:
        """Return whether a plan is within the budget."""
        budget = self.settings.budget
        allowed = budget.device_bytes(self.model(members).reference_bytes(per_rank=budget.is_per_rank))
        workspace = self.total.workspace(plan) if self.total is not None and self._is_of_total(members) else 0
        return allowed is None or self._device_bytes(members, plan) + workspace <= allowed

    @property
    def restarts(self) -> bool:
        """Whether state starts anew with another plan. The first one always takes over the state of the warm-up."""
        return self.progress.planned_at is not None and not getattr(self.settings.planner, "inherit", True)

    def _within_budget(self, members: Members, make: Callable[[ModelFacts, Budget], Plan], held: int = 0) -> Plan:
        """Plan within the budget, besides ``held`` bytes of the planner: with a total one, also its workspace."""
        model, later = self.model(members), self._later_blocks(members)
        reserved = self._device_bytes(members, Plan(later)) + held
        budget = dataclasses.replace(self.settings.budget, reserved=reserved, planner_bytes=held)

        def made(free: int, has_workspace: bool) -> Plan:
            facts = dataclasses.replace(model, has_workspace=has_workspace)
            plan = make(facts, dataclasses.replace(budget, reserved=reserved + free))
            blocks = (*plan.blocks, *later)
            assigned = [(name, shape, block) for block in blocks for name, shape in block.parameters.items()]
            advice = {} if self.total is None else {"advice": list(self.total.advice)}
            return dataclasses.replace(groups.plan_of(assigned, {**plan.settings, **advice}), rows=members.rows)

        if self.total is None or not self._is_of_total(members):
            return made(0, True)
        return beside_workspace(made, self.total.workspace, self.total.room - held)

    def _later_blocks(self, members: Members) -> tuple[Block, ...]:
        """Blocks of parameters that are not planned: they keep their configuration."""
        planned, blocks = set(self.planned), members.plan.blocks
        parts = [{n: s for n, s in block.parameters.items() if n not in planned} for block in blocks]
        return tuple(dataclasses.replace(block, parameters=part) for block, part in zip(blocks, parts) if part)

    def _device_bytes(self, members: Members, plan: Plan) -> int:
        """Bytes that the budget is for."""
        plan = dataclasses.replace(plan, rows=members.rows)
        return plan.device_bytes_per_rank if self.settings.budget.is_per_rank else plan.device_bytes

    # ---- what planners are told ----

    def params(self, members: Members) -> dict[str, Tensor]:
        """Return the parameters that plans are made for."""
        return _of(members, self.planned)

    def model(self, members: Members) -> ModelFacts:
        """Return what is known about the model now."""
        return model_of(self.facts, self.planned, members)

    # ---- a budget for everything ----

    def _is_of_total(self, members: Members) -> bool:
        """Return whether the budget is what a total one leaves; ``replan(memory=...)`` may have set another."""
        return self.total is not None and self.settings.budget.memory == left_for_state(self.total, members)

    def with_new_tensors(self, members: Members) -> Run:
        """Return the run in which weights and gradients of another group count."""
        if self.total is None:
            return self
        total = dataclasses.replace(self.total, tensors=tensors_in(members, self.total.tensors.frozen))
        run = self.changed(total=total)
        if not self._is_of_total(members):
            return run
        return run.changed(settings=self.settings.changed(memory=left_for_state(total, members)))


def left_for_state(total: Total, members: Members) -> str:
    """Return what a total budget leaves for state."""
    return total.memory(is_sharded=bool(members.ranks))


def tensors_in(members: Members, frozen: int) -> Tensors:
    """Return the tensors that a total budget is for, with ``frozen`` bytes of other weights."""
    return Tensors.of(members.shapes, members.dtypes, members.rows, frozen)


def model_of(facts: ModelFacts, planned: Iterable[str], members: Members) -> ModelFacts:
    """Return facts about a model with what may change while it trains."""
    known = set(planned)
    shapes = {name: shape for name, shape in members.shapes.items() if name in known}
    hyper, one_lr = typical_hyper(members.groups)
    narrow = members.low_precision & known
    return dataclasses.replace(
        facts, shapes=shapes, hyper=hyper, one_lr=one_lr, rows=members.rows, low_precision=narrow
    )


def typical_hyper(param_groups: Sequence[groups.Group]) -> tuple[Hyper, bool]:
    """Return hyper-parameters that stand for all groups, and whether these have one learning rate.

    They are those of the first group with the largest decay of all: what decay risks counts if any group has some.
    """
    hypers = [groups.hyper(group, f"param group {index}") for index, group in enumerate(param_groups)]
    decay = max(hyper.weight_decay for hyper in hypers)
    return dataclasses.replace(hypers[0], weight_decay=decay), len({hyper.lr for hyper in hypers}) <= 1


def _of(members: Members, names: Iterable[str]) -> dict[str, Tensor]:
    known = set(names)
    return {member.name: member.param for member in members.all if member.name in known}
