"""One run of the zoo: a task with one optimizer, at one learning rate."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import baoc
from baoc import BAOC, BlockOptimizer, parse
from baoc.core.plan import PlanError
from baoc.core.roles import Role
from baoc.planners.effect_table import elements
from baoc.planners.model_facts import ModelFacts
from experiments.runs import Row
from experiments.zoo.catalog import TASKS
from experiments.zoo.task import Parameters, Problem, Task

REFERENCE, BUDGETED = "adamw32", "baoc@"
FACTOR = 3.0
"""Between neighbouring learning rates."""
FLOOR = 1e-12
"""Squared errors below this are rounding errors of numbers near one."""
EVALUATIONS = 5
"""Scores that are averaged, in the last tenth of a run: the last one alone depends on the last few batches."""


@dataclass(frozen=True)
class Run:
    """What identifies a run.

    >>> Run("siren-image", "baoc@0.25", seed=1, rung=-1).key
    'siren-image baoc@0.25 seed=1 lr=0.000333 steps=350'
    """

    task: str
    method: str
    """``adamw32``, ``baoc@`` with a budget, or a configuration for all weights."""
    seed: int
    rung: int
    """The learning rate is the task's times three to the power of this."""

    @property
    def key(self) -> str:
        steps = TASKS[self.task].steps
        return f"{self.task} {self.method} seed={self.seed} lr={self.lr:.3g} steps={steps}"

    @property
    def lr(self) -> float:
        return TASKS[self.task].lr * FACTOR**self.rung


def train(run: Run) -> Row:
    """Train to the end and return what is known of the run.

    ``score`` is None if the run diverged, and if no plan fits the budget, which ``error`` says.
    """
    task = TASKS[run.task]
    row: Row = {"key": run.key, "task": run.task, "method": run.method, "seed": run.seed, "lr": run.lr}
    row |= {"steps": task.steps, "score": None, "error": None}
    torch.manual_seed(run.seed)
    problem = task.build(run.seed)
    row["parameters"] = sum(parameter.numel() for parameter in _parameters(problem))
    row |= _facts(problem)
    try:
        optimizer = make_optimizer(run.method, problem.params, run.lr, task.weight_decay)
    except PlanError as error:
        return {**row, "error": str(error)}
    started = time.process_time()
    row["score"] = _trained(task, problem, optimizer, seed=run.seed)
    row["seconds"] = round(time.process_time() - started, 3)
    row["state_bytes"] = baoc.state_bytes(optimizer)
    if isinstance(optimizer, BAOC):
        row["plan"] = {block.name: block.configuration.alias for block in optimizer.plan.blocks}
    return row


def make_optimizer(method: str, params: Parameters, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Return the optimizer of a method: ``adamw32``, ``baoc@`` with a budget, or a configuration for all weights."""
    if method == REFERENCE:
        every = params.parameters() if isinstance(params, nn.Module) else params
        return torch.optim.AdamW([each for each in every if each.requires_grad], lr=lr, weight_decay=weight_decay)
    if not method.startswith(BUDGETED):
        return BlockOptimizer(params, lr=lr, weight_decay=weight_decay, plan=parse(method))
    share = method.removeprefix(BUDGETED)
    memory = share if share == "auto" else float(share)
    return BAOC(params, lr=lr, weight_decay=weight_decay, memory=memory, verbose=False)


def _facts(problem: Problem) -> Row:
    """What an effect table files a task under: its regime, and the role with the most elements."""
    params = problem.params
    named = params if isinstance(params, nn.Module) else {f"0.{i}": param for i, param in enumerate(params)}
    facts = ModelFacts.of(named)
    numel = elements((facts.role(name), math.prod(shape)) for name, shape in facts.shapes.items())
    role = max((Role.MATRIX, Role.EMBEDDING, Role.HEAD), key=numel.__getitem__)
    return {"regime": facts.regime, "role": role.value}


def _parameters(problem: Problem) -> list[nn.Parameter]:
    params = problem.params
    every = list(params.parameters()) if isinstance(params, nn.Module) else params
    return [parameter for parameter in every if parameter.requires_grad]


def _trained(task: Task, problem: Problem, optimizer: torch.optim.Optimizer, seed: int) -> float | None:
    """Return the mean score (geometric if it spans decades); None if the run diverged."""
    torch.manual_seed(seed + 1)  # dropout and the like: no optimizer's own random numbers move them
    schedule = LambdaLR(optimizer, task.lr_factor)
    spacing = max(1, task.steps // (10 * (EVALUATIONS - 1)))
    scores = []
    for left in reversed(range(task.steps)):
        loss = problem.loss()
        if not math.isfinite(loss.item()):
            return None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if left % spacing == 0 and left < EVALUATIONS * spacing:
            scores.append(_score(problem))
    if not all(map(math.isfinite, scores)):
        return None
    return mean(scores, task.decades)


def mean(scores: Sequence[float], decades: bool) -> float:
    """Return the mean of scores; where they span decades, the geometric one.

    >>> mean([1.0, 3.0], decades=False), round(mean([1e-8, 1e-4], decades=True), 9)
    (2.0, 1e-06)
    """
    if not decades or math.inf in scores:
        return statistics.fmean(scores)
    return statistics.geometric_mean([max(score, FLOOR) for score in scores])


@torch.no_grad()
def _score(problem: Problem) -> float:
    if not isinstance(problem.params, nn.Module):
        return problem.score()
    problem.params.eval()
    score = problem.score()
    problem.params.train()
    return score
