"""Estimate the memory of a training step on every rank, and find the best plan that fits.

This module decides whether a training setup fits on a GPU, with which plan, and what else could be changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from baoc.core.configuration import Configuration, parse
from baoc.core.plan import Plan, PlanError
from baoc.core.roles import Role
from baoc.core.sharding import rows_per_rank
from baoc.core.spec import DEFAULT_WEIGHT
from baoc.core.text import predicted_interval
from baoc.planners.base import AUTO, Budget
from baoc.planners.effect_problem import EffectProblem
from baoc.planners.effect_table import elements
from baoc.planners.effects import EffectPlanner
from baoc.planners.model_facts import ModelFacts
from baoc.planners.placement import plan_traffic
from baoc.planners.total import beside_workspace, parts_of, workspace_bytes
from baoc.planners.weights import effect
from baoc.tools.fit.memory import FitError, Measured, Memory, Setup

UNIFORM = ("adamw-32", "adamw-16", "adamw-8")
"""Uniform configurations to compare with."""
BUS = 25e9
"""Bytes per second between host and GPU in one direction: PCIe 4.0 x16."""
GIVEN = "this budget"
BEST, BEST_OF_ALL, SMALLEST = "best plan that fits", 'best plan, memory="auto"', "smallest plan"


@dataclass(frozen=True)
class Choice:
    """One optimizer configuration.

    Attributes:
        name: What the table calls it.
        plan: The plan.
        state: Bytes of state on the rank that holds the most, without state in host memory.
        workspace: Bytes that an update needs for a moment beyond those of activations, which are freed by then.
        total: Bytes of everything on that rank.
        loss: Predicted change of the loss, in percent of AdamW32's. None if it was not measured.
        interval: Lowest and highest change of the loss (90%).
    """

    name: str
    plan: Plan
    state: int
    workspace: int
    total: int
    loss: float | None
    interval: tuple[float, float] | None = None

    def fits(self, gpu: int | None) -> bool:
        """Return whether it fits into ``gpu`` bytes. Without a limit, everything fits."""
        return gpu is None or self.total <= gpu


@dataclass(frozen=True)
class Change:
    """Another change of the setup, and its memory with the best plan that then fits."""

    what: str
    total: int
    fits: bool
    loss: float | None = None
    interval: tuple[float, float] | None = None
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """The result for one setup. ``chosen`` is the best plan that fits, or the smallest plan if none fits."""

    setup: Setup
    memory: Memory
    gpu: int | None
    chosen: Choice
    choices: tuple[Choice, ...]
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool:
        """Whether the chosen plan fits."""
        return self.chosen.fits(self.gpu)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of weights, their low bits, gradients, state and workspace on a rank."""
        plan = self.chosen.plan.sharded(self.setup.shards)
        return parts_of(plan, self.memory.weights, self.memory.gradients, self.chosen.workspace)

    @property
    def others(self) -> dict[str, int]:
        """Bytes of everything else there."""
        return {name: nbytes for name, nbytes in self.memory.parts.items() if name not in self.parts}

    @property
    def numel(self) -> int:
        """Trained parameters on the rank that holds the most."""
        return numel_per_rank(self.chosen.plan.sharded(self.setup.shards))

    @property
    def per_parameter(self) -> dict[str, float]:
        """Bytes of :attr:`parts` per trained parameter."""
        return {name: nbytes / max(1, self.numel) for name, nbytes in self.parts.items()}


def numel_per_rank(plan: Plan) -> int:
    """Return the parameters of a plan on the rank that holds the most."""
    shapes = ((name, block.parameters[name]) for name, block in plan.by_parameter)
    return sum(math.prod((plan.rows.get(name, shape[0]), *shape[1:])) if shape else 1 for name, shape in shapes)


class Fitter:
    """Finds plans that fit for one model. Reuse it for several setups: planners are cached.

    Args:
        measured: The model.
        planner: Settings of the planner.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     fitter = Fitter(Measured(torch.nn.Linear(1024, 1024), activations=2**20))
        >>> answer = fitter.ask(Setup(reserve=0), gpu=8 * 2**20)
        >>> answer.fits, answer.chosen.state <= 3 * 2**20
        (True, True)
    """

    def __init__(self, measured: Measured, planner: EffectPlanner | None = None) -> None:
        self._measured, self._planner = measured, planner or EffectPlanner()
        self._model = ModelFacts.of(measured.model)
        self._problems: dict[tuple[int, int, bool, bool], EffectProblem] = {}

    def ask(
        self,
        setup: Setup,
        gpu: int | None = None,
        memory: float | int | str | None = None,
        host_memory: float | int | str | None = None,
        *,
        may_release: bool = False,
    ) -> Answer:
        """Find the best plan for a setup and the alternatives to it.

        Args:
            setup: How the model is trained.
            gpu: Bytes of memory of a GPU. None means no limit.
            memory: A budget for optimizer state. None means the best that fits.
            host_memory: A budget for state in host memory.
            may_release: Release gradients if only then a plan fits, or one that is predicted to be better.

        Returns:
            The answer. Its setup says whether gradients are released.

        Raises:
            FitError: If state in host memory is combined with sharding.
        """
        if may_release and not setup.release and self._gains(setup, gpu, memory, host_memory):
            setup = replace(setup, release=True)
        if host_memory is not None and setup.shards > 1:
            raise FitError("state in host memory does not work with sharded parameters. Leave out --fsdp.")
        needed = self._measured.memory(setup)
        if memory is None:
            problem = self._problem(setup)
            plan = self._best_plan(setup, gpu, needed, host_memory)
        else:
            budget = Budget(memory, host_memory)
            problem = self._problem(setup, per_rank=budget.is_per_rank)
            plan = problem.plan(budget)
        others = {BEST_OF_ALL: problem.plan(Budget(AUTO)), SMALLEST: _smallest_plan(problem)}
        same = next((name for name, other in others.items() if other.blocks == plan.blocks), BEST)
        chosen = _choice(same if memory is None else GIVEN, plan, needed, setup)
        choices = [
            *(self._uniform(name, needed, setup) for name in UNIFORM),
            chosen,
            *(_choice(name, other, needed, setup) for name, other in others.items() if other.blocks != plan.blocks),
        ]
        changes = list(self._changes(setup, gpu))
        if setup.shards == 1 and not plan.host_bytes:
            changes.append(self._offloaded(setup, gpu, needed))
        return Answer(setup, needed, gpu, chosen, tuple(choices), tuple(changes))

    def _gains(
        self, setup: Setup, gpu: int | None, memory: float | int | str | None, host: float | int | str | None
    ) -> bool:
        """Return whether released gradients make a plan fit, or a better one."""
        if gpu is None:
            return False
        choices = []
        for other in (setup, replace(setup, release=True)):
            needed = self._measured.memory(other)
            if memory is None:
                plan = self._best_plan(other, gpu, needed, host)
            else:
                plan = self._problem(other).plan(Budget(memory, host))
            choices.append(_choice("", plan, needed, other))
        kept, released = choices
        if kept.fits(gpu) != released.fits(gpu):
            return released.fits(gpu)
        losses = released.loss, kept.loss
        return released.fits(gpu) and None not in losses and losses[0] < losses[1] - self._planner.tolerance  # type: ignore[operator]

    def _best_plan(
        self, setup: Setup, gpu: int | None, needed: Memory, host_memory: float | int | str | None = None
    ) -> Plan:
        """Return the best plan that fits on a GPU beside what else is needed, or the smallest plan."""
        problem = self._problem(setup)
        plan = problem.plan(Budget(AUTO))
        if gpu is None or _choice("", plan, needed, setup).fits(gpu):
            return plan
        room = gpu - needed.total

        def made(free: int, has_workspace: bool) -> Plan:
            problem = self._problem(setup, has_workspace=has_workspace)
            plan = problem.plan(Budget(f"{max(0, room - free)}B", host_memory))
            return plan.sharded(setup.shards) if setup.shards > 1 else plan

        try:
            return beside_workspace(made, lambda plan: _workspace(plan, needed, setup), room)
        except PlanError:  # nothing fits
            return _smallest_plan(problem)

    def _problem(self, setup: Setup, *, per_rank: bool = True, has_workspace: bool = True) -> EffectProblem:
        """Return the problem of a setup, whose budgets are for each rank or for all ranks together."""
        # Each rank updates only its shard, so the update is a smaller part of the step.
        tokens = self._planner.tokens or self._measured.memory(setup).tokens * setup.shards
        shards = setup.shards if per_rank else 1
        is_narrow = setup.precision.weights == 2
        key = tokens, shards, is_narrow, has_workspace
        if key not in self._problems:
            shapes = self._measured.weights.trained
            rows = {name: rows_per_rank(shape[0], shards) for name, shape in shapes.items() if shape}
            narrow = frozenset(shapes) if is_narrow else frozenset[str]()
            model = replace(self._model, shapes=shapes, tokens=tokens, low_precision=narrow)
            model = replace(model, rows=rows if shards > 1 else {}, has_workspace=has_workspace)
            self._problems[key] = self._planner.problem(model, per_rank=shards > 1)
        return self._problems[key]

    def _uniform(self, name: str, needed: Memory, setup: Setup) -> Choice:
        problem = self._problem(setup)
        plan = Plan.uniform(name, problem.model.shapes, {n: problem.model.role(n) for n in problem.model.shapes})
        plan = plan.with_low_bits(problem.model.low_precision, DEFAULT_WEIGHT)
        loss, interval = _uniform_loss(parse(name), problem)
        return replace(_choice(name, plan, needed, setup), loss=loss, interval=interval)

    def _changes(self, setup: Setup, gpu: int | None) -> Iterator[Change]:
        """Yield single changes of the setup. Changes of activations need activations that are counted."""
        others = {
            "--fsdp": replace(setup, fsdp=setup.world_size > 1),
            "--gradients release": replace(setup, release=True),
            "--dtype bf16": replace(setup, dtype="bf16"),
        }
        if self._measured.is_counted(setup):
            others |= {"--checkpointing": replace(setup, checkpointing=True), "--batch 1": replace(setup, batch=1)}
        for what, other in others.items():
            if other != setup:
                memory = self._measured.memory(other)
                choice = _choice(what, self._best_plan(other, gpu, memory), memory, other)
                yield Change(what, choice.total, choice.fits(gpu), choice.loss, choice.interval)

    def _offloaded(self, setup: Setup, gpu: int | None, needed: Memory) -> Change:
        """Return the change to state in host memory: the best plan, with a bus that transfers in both directions."""
        plan = self._best_plan(setup, None, needed).offloaded()
        seconds = max(plan_traffic(plan, setup.precision.weights, setup.precision.gradients)) / BUS
        return Change(
            "state in host memory",
            needed.total,
            gpu is None or needed.total <= gpu,
            plan.settings.get("expected_loss"),
            predicted_interval(plan.settings),
            f"--host-memory {math.ceil(plan.host_bytes / 2**20)}MiB, at least {seconds:.2g} s a step at "
            f"{BUS / 1e9:g} GB/s",
        )


def _choice(name: str, plan: Plan, needed: Memory, setup: Setup) -> Choice:
    here = plan.sharded(setup.shards)
    state, workspace = here.device_bytes_per_rank, _workspace(here, needed, setup)
    total, loss = needed.total + workspace + state, plan.settings.get("expected_loss")
    return Choice(name, plan, state, workspace, total, loss, predicted_interval(plan.settings))


def _workspace(plan: Plan, needed: Memory, setup: Setup) -> int:
    return workspace_bytes(plan, needed.activations or 0, is_released=setup.release)


def _smallest_plan(problem: EffectProblem) -> Plan:
    return problem.plan(Budget(0.0))


def _uniform_loss(
    configuration: Configuration, problem: EffectProblem
) -> tuple[float | None, tuple[float, float] | None]:
    """Return the loss of one configuration for all parameters, and its interval. Vectors count as fp32."""
    sizes = [(problem.model.planned_role(name), math.prod(shape)) for name, shape in problem.model.shapes.items()]
    totals = elements(sizes)
    loss = low = high = 0.0
    for role, numel in sizes:
        if role is Role.VECTOR:
            continue
        if (found := problem.effects.effect(role, configuration)) is None:
            return None, None
        share = numel / max(1, totals[role])
        loss, low, high = loss + share * found.loss, low + share * found.low, high + share * found.high
    model = problem.model
    weights = effect(problem.regime, model.hyper.lr, DEFAULT_WEIGHT).loss if model.low_precision else 0.0
    return loss + weights, (low + weights, high + weights)
