"""KeyboardInterrupt at random source lines of an action. The optimizer must stay usable and within its budget.

An action runs once to count the lines of `baoc` that it executes. Then it runs again on an equal optimizer, and the
interrupt is raised at a random one of these lines. After it:

- the optimizer holds no more than its budget, and as many bytes as its plan says;
- it can step, and a checkpoint of it can be loaded into a new optimizer, which then makes bitwise equal steps;
- the same action can be done again.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import unittest.mock
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

import baoc
from baoc import BAOC, EffectPlanner, PaperPlanner, Plan, release_gradients
from baoc.optim import migrate
from baoc.planners.base import Planner
from benchmarks.torture.training import LOW_BITS, backward, make_model

PACKAGE = os.path.dirname(os.path.abspath(baoc.__file__)) + os.sep
SHARE, LATER = 0.6, 0.5
_MOST_STEPS = 5  # before the action
_ADDED = "added"


@dataclass(frozen=True)
class Kind:
    """A planner, and how its parameters are trained."""

    planner: Planner
    dtype: torch.dtype = torch.float32
    low_bits: bool = False
    releases: bool = False


KINDS = {
    "effects": Kind(EffectPlanner()),
    "effects, replan": Kind(EffectPlanner(replan_every=3)),
    "paper": Kind(PaperPlanner(warmup=3, warmup_base="budget")),
    "paper, replan": Kind(PaperPlanner(warmup=2, warmup_base="budget", replan_every=2)),
    "low bits": Kind(EffectPlanner(), torch.bfloat16, low_bits=True),
    "released": Kind(EffectPlanner(replan_every=3), releases=True),
    "low bits, released": Kind(EffectPlanner(), torch.float16, low_bits=True, releases=True),
}


class Interrupt:
    """Counts the executed lines of `baoc` in a ``with`` block, and interrupts it at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.lines = 0
        self.place = ""
        self._at = at

    def __enter__(self) -> Interrupt:
        sys.settrace(self._on_call)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            if self.lines == self._at:
                self.place = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                raise KeyboardInterrupt
            self.lines += 1
        return self._on_line


class Run:
    """A model in training, with what the actions need."""

    def __init__(self, kind: Kind, steps: int) -> None:
        self.model = make_model(kind.dtype)
        self.extra = nn.Parameter(torch.linspace(-1, 1, 1024).reshape(16, 64).to(kind.dtype))
        self.kind, self.planner = kind, kind.planner
        self.reference = Plan.uniform("adamw-16", _shapes(self.model)).state_bytes
        self.budget = int(SHARE * self.reference)
        self.optimizer = self._optimizer(self.model)
        if self.kind.low_bits:
            self.optimizer.set_plan(LOW_BITS)
        self.steps = 0
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> None:
        backward(self.model, self.steps)
        self.extra.grad = torch.full_like(self.extra, 1e-3)
        self.steps += 1

    def add_group(self) -> None:
        self.optimizer.add_param_group({"params": [(_ADDED, self.extra)]})

    def _optimizer(self, model: nn.Module) -> BAOC:
        optimizer = BAOC(model, lr=1e-3, memory=self.budget, planner=self.planner, verbose=False)
        if self.kind.releases:
            release_gradients(optimizer)
        return optimizer

    def resumed(self) -> Run:
        """Return an equal run that resumes from a checkpoint of this one."""
        other = copy.copy(self)
        other.model, other.extra = copy.deepcopy(self.model), nn.Parameter(self.extra.detach().clone())
        other.optimizer = other._optimizer(other.model)
        if len(self.optimizer.param_groups) > 1:
            other.add_group()
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        return other

    def weights(self) -> list[torch.Tensor]:
        return [param.detach() for param in (*self.model.parameters(), self.extra)]


@dataclass(frozen=True)
class Action:
    """What is interrupted."""

    prepare: Callable[[Run], Any]
    """Returns what ``do`` needs; not interrupted."""
    do: Callable[[Run, Any], None]
    do_again: bool = True
    """Whether it can be done after it was done; if not, only after it was undone."""
    recover: Callable[[Run, Any], None] = lambda run, given: None
    """What a training script does after an interrupt, before it goes on."""


def _later_checkpoint(run: Run) -> dict[str, Any]:
    other = Run(run.kind, run.steps + 2)
    return {"model": other.model.state_dict(), "optimizer": copy.deepcopy(other.optimizer.state_dict())}


def _load(run: Run, saved: dict[str, Any]) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
    run.model.load_state_dict(saved["model"])


def _give_weights(run: Run, saved: dict[str, Any]) -> None:
    """Give the model the weights of its optimizer, which an interrupted load has either replaced as a whole or not."""
    ages = [
        [age for held in state.values() for key, age in held.items() if key.endswith(".age")]
        for state in (run.optimizer.state_dict()["state"], saved["optimizer"]["state"])
    ]
    if ages[0] == ages[1]:
        run.model.load_state_dict(saved["model"])


def _smaller_plan(run: Run) -> Plan:
    return EffectPlanner().initial_plan(baoc.ModelFacts.of(run.model), baoc.Budget(0.3))


ACTIONS: dict[str, Action] = {
    "set_plan": Action(_smaller_plan, lambda run, plan: run.optimizer.set_plan(plan)),
    "set_plan, aside": Action(_smaller_plan, lambda run, plan: _set_plan_aside(run, plan)),
    "replan": Action(
        lambda run: _statistics(run) if isinstance(run.planner, PaperPlanner) else None,
        lambda run, found: _discard(run.optimizer.replan(int(LATER * run.reference), statistics=found)),
    ),
    "add_param_group": Action(lambda run: None, lambda run, _: run.add_group(), do_again=False),
    "step": Action(lambda run: None if run.kind.releases else run.gradients(), lambda run, _: _step(run)),
    "save": Action(lambda run: None, lambda run, _: _discard(run.optimizer.state_dict())),
    "load": Action(_later_checkpoint, _load, recover=_give_weights),
}


def _step(run: Run) -> None:
    """Make a step. Released gradients update parameters in the backward pass."""
    if run.kind.releases:
        run.gradients()
    run.optimizer.step()


def _set_plan_aside(run: Run, plan: Plan) -> None:
    """Set a plan as if there were no memory for old and new state side by side: all old state is put aside."""
    with unittest.mock.patch.object(migrate, "SIDE_BY_SIDE", -(1 << 60)):
        run.optimizer.set_plan(plan)


def attempt(kind: Kind, action: Action, steps: int, draw: random.Random) -> str:
    """Interrupt an action and check what follows. Return the line of the interrupt; '' if none took effect."""
    counting, run = Run(kind, steps), Run(kind, steps)
    given = action.prepare(counting)
    with Interrupt() as counted:
        action.do(counting, given)
    given = action.prepare(run)
    with Interrupt(at=draw.randrange(max(1, counted.lines))) as interrupt:
        action.do(run, given)
    run.optimizer.zero_grad()  # forgets what an interrupted step has left
    action.recover(run, given)
    try:
        _check(run)
        if action.do_again or len(run.optimizer.param_groups) == 1:
            action.do(run, action.prepare(run) if action is ACTIONS["step"] else given)
            run.optimizer.zero_grad()
        _check(run)
    except Exception as error:
        raise AssertionError(f"interrupted at {interrupt.place}: {type(error).__name__}: {error}") from error
    return interrupt.place


def _check(run: Run) -> None:
    optimizer = run.optimizer
    held, planned = baoc.state_bytes(optimizer), optimizer.plan.state_bytes
    assert held <= run.budget, f"{held} B are held, and the budget is {run.budget} B"
    assert held >= planned, f"{held} B are held, and the plan has {planned} B"
    run.step()
    other = run.resumed()
    run.step()
    other.step()
    assert run.optimizer.plan.to_json() == other.optimizer.plan.to_json(), "the resumed run has another plan"
    for ours, theirs in zip(run.weights(), other.weights()):
        assert torch.isfinite(ours).all(), "weights are not finite"
        assert torch.equal(ours, theirs), "the resumed run has other weights"


def run(times: int, seed: int = 0, names: list[str] | None = None) -> dict[str, Any]:
    """Interrupt ``times`` actions. Return how many there were of each, where they took effect, and what went wrong."""
    torch.set_num_threads(1)
    done: Counter[str] = Counter()
    places: set[str] = set()
    wrong: dict[str, str] = {}
    chosen = [(planner, action) for planner in KINDS for action in names or ACTIONS]
    for number in range(times):
        planner, action = chosen[number % len(chosen)]
        draw = random.Random(f"{seed} {number}")
        steps = draw.randrange(1 if action == "replan" else 0, _MOST_STEPS + 1)
        try:
            places.add(attempt(KINDS[planner], ACTIONS[action], steps, draw))
        except AssertionError as error:
            wrong.setdefault(str(error)[:300], f"{planner}, {action} after {steps} steps, number {number}")
        done[action] += 1
        print(f"{number + 1} interrupts, {len(wrong)} findings", end="\r", file=sys.stderr)
    return {
        "interrupts": sum(done.values()),
        "by": dict(done),
        "lines": len(places - {""}),
        "findings": [f"{where}: {error}" for error, where in wrong.items()],
    }


def _statistics(run: Run) -> baoc.GradientStatistics:
    """Gradient statistics of the run, whether or not its optimizer still has some."""
    collector = baoc.StatisticsCollector(run.model)
    backward(run.model, 0)
    collector.observe()
    run.optimizer.zero_grad()
    return collector.statistics()


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def _discard(value: object) -> None:
    """For lambdas that return nothing."""
