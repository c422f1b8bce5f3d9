"""Does it fit, with which plan, and what else could be done."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch  # noqa: F401 - the docstring example needs it
from torch import nn  # noqa: F401

from baoc.core.configuration import Configuration, parse
from baoc.core.plan import Plan, PlanError
from baoc.core.roles import Role
from baoc.core.spec import Hyper, Shape
from baoc.fit.memory import FitError, Measured, Memory, Setup
from baoc.planning import risk as risks
from baoc.planning.placement import plan_traffic
from baoc.planning.planner import Planner
from baoc.planning.settings import AUTO, Settings
from baoc.profiling.facts import Facts
from baoc.report.frontier import smallest_budget

UNIFORM = ("adamw-32", "adamw-16", "adamw-8")
"""What people have today, to compare with."""
BUS = 25e9
"""Bytes per second between host and GPU, one way: PCIe 4 with sixteen lanes."""
BEST, GIVEN = "best plan that fits", "this budget"
_TRIES = 12


@dataclass(frozen=True)
class Choice:
    """One way to configure the optimizer."""

    name: str
    plan: Plan
    state: int  # bytes on the fullest rank, without those in host memory
    total: int  # with all else that the rank holds
    loss: float | None  # expected change in percent of AdamW32's; None if nobody measured it

    def fits(self, gpu: int | None) -> bool:
        return gpu is None or self.total <= gpu


@dataclass(frozen=True)
class Change:
    """Something else to change, and the memory it would take with the best plan that then fits."""

    what: str
    total: int
    fits: bool
    loss: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """All that is known about one setup."""

    setup: Setup
    memory: Memory
    gpu: int | None
    chosen: Choice
    """The best that fits; where nothing does, the smallest there is."""
    choices: tuple[Choice, ...]
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool:
        return self.chosen.fits(self.gpu)


class Fitter:
    """Answers for one model; what it learns of the model is kept.

    >>> with torch.device("meta"):
    ...     fitter = Fitter(Measured(nn.Linear(1024, 1024), activations=2**20))
    >>> answer = fitter.ask(Setup(reserve=0), gpu=8 * 2**20)
    >>> answer.fits, answer.chosen.state <= 3 * 2**20
    (True, True)
    """

    def __init__(self, measured: Measured, settings: Settings | None = None) -> None:
        self._measured, self._settings = measured, settings or Settings()
        self._facts = Facts.of(measured.model)
        self._planners: dict[int, Planner] = {}  # by tokens

    def ask(
        self,
        setup: Setup,
        gpu: int | None = None,
        memory: float | int | str | None = None,
        host_memory: float | int | str | None = None,
    ) -> Answer:
        """Whether the setup fits into ``gpu`` bytes, with the best plan or with that of a ``memory`` budget; and with
        some of its state in host memory, if that has a budget.
        """
        if host_memory is not None and setup.shards > 1:
            raise FitError("state in host memory is for parameters that are not sharded: leave out --fsdp.")
        planner, needed = self._planner(setup), self._measured.memory(setup)
        if memory is None:
            plan = _best_plan(planner, None if gpu is None else gpu - needed.total, setup.shards, host_memory)
        else:
            plan = planner.plan(memory, host_memory=host_memory)
        chosen = _choice(BEST if memory is None else GIVEN, plan, needed, setup)
        choices = [
            *(self._uniform(name, needed, setup) for name in UNIFORM),
            chosen,
            _choice('memory="auto"', planner.plan(AUTO), needed, setup),
            _choice("smallest plan", _smallest_plan(planner), needed, setup),
        ]
        changes = list(self._changes(setup, gpu))
        if setup.shards == 1 and not plan.host_bytes:
            changes.append(self._offloaded(setup, gpu, needed))
        return Answer(setup, needed, gpu, chosen, tuple(choices), tuple(changes))

    def _planner(self, setup: Setup) -> Planner:
        # every rank updates its shard only, so a step is longer beside its update by as many tokens
        tokens = self._settings.tokens or self._measured.memory(setup).tokens * setup.shards
        if tokens not in self._planners:
            settings = replace(self._settings, tokens=tokens)
            shapes = self._measured.weights.trained
            self._planners[tokens] = Planner(shapes, None, Hyper(lr=1e-3), settings, self._facts)
        return self._planners[tokens]

    def _uniform(self, name: str, needed: Memory, setup: Setup) -> Choice:
        plan = Plan.uniform(name, self._measured.weights.trained, self._facts.roles)
        loss = _uniform_loss(parse(name), self._measured.weights.trained, self._facts, self._settings)
        return replace(_choice(name, plan, needed, setup), loss=loss)

    def _changes(self, setup: Setup, gpu: int | None) -> Iterator[Change]:
        """What else could be changed, one at a time; what would change activations, only where those are counted."""
        others = {"--fsdp": replace(setup, fsdp=setup.world_size > 1)}
        if self._measured.is_counted(setup):
            others |= {"--checkpointing": replace(setup, checkpointing=True), "--batch 1": replace(setup, batch=1)}
        for what, other in others.items():
            if other != setup:
                memory = self._measured.memory(other)
                room = None if gpu is None else gpu - memory.total
                choice = _choice(what, _best_plan(self._planner(other), room, other.shards), memory, other)
                yield Change(what, choice.total, choice.fits(gpu), choice.loss)

    def _offloaded(self, setup: Setup, gpu: int | None, needed: Memory) -> Change:
        """State in host memory: the best plan there is, and a bus that works both ways at once."""
        plan = _best_plan(self._planner(setup), None, setup.shards).offloaded()
        seconds = max(plan_traffic(plan, setup.precision.weights, setup.precision.gradients)) / BUS
        return Change(
            "state in host memory",
            needed.total,
            gpu is None or needed.total <= gpu,
            plan.settings.get("expected_loss"),
            f"--host-memory {math.ceil(plan.host_bytes / 2**20)}MiB, at least {seconds:.2g} s a step at "
            f"{BUS / 1e9:g} GB/s",
        )


def _choice(name: str, plan: Plan, needed: Memory, setup: Setup) -> Choice:
    state = plan.sharded(setup.shards).device_bytes_per_rank
    return Choice(name, plan, state, needed.total + state, plan.settings.get("expected_loss"))


def _best_plan(planner: Planner, room: int | None, shards: int, host_memory: float | int | str | None = None) -> Plan:
    """The plan of least risk whose fullest rank holds at most ``room`` bytes; the smallest one if none does."""
    everything = 2 * planner.reference_bytes  # AdamW32: more than any plan needs
    if room is None or room * shards >= everything:
        plan = planner.plan(everything)
        if room is None or plan.sharded(shards).state_bytes_per_rank <= room:
            return plan
    smallest = _smallest_plan(planner)
    if host_memory is not None:
        with contextlib.suppress(PlanError):
            return planner.plan(f"{max(0, room)}B", host_memory=host_memory)
    if smallest.sharded(shards).state_bytes_per_rank > room:
        return smallest
    budget = min(everything, room * shards)
    for _ in range(_TRIES):  # ranks hold somewhat more than their share: rows do not divide, and some sums are on all
        if budget < smallest.state_bytes:
            break
        plan = planner.plan(budget)
        used = plan.sharded(shards).state_bytes_per_rank
        if used <= room:
            return plan
        budget = int(budget * room / used) - 1
    return smallest


def _smallest_plan(planner: Planner) -> Plan:
    return planner.plan(smallest_budget(planner))


def _uniform_loss(
    configuration: Configuration, shapes: Mapping[str, Shape], facts: Facts, settings: Settings
) -> float | None:
    """What the measured effects say of one configuration for all; vectors have fp32 state in it, or nearly so."""
    sizes = [(facts.role(name, shape), math.prod(shape)) for name, shape in shapes.items()]
    shares = risks.role_shares(sizes, of=risks.elements(sizes))
    table = risks.Table.load(settings.table)
    regime = facts.regime if settings.regime == AUTO else settings.regime
    total = 0.0
    for role, share in shares.items():
        effect = table.effect(regime, role, configuration)
        if effect is None and role is not Role.VECTOR:
            return None
        total += share * (effect.loss if effect else 0.0)
    return total
