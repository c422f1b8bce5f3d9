"""One run: pretrained weights, one optimizer, one learning rate."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import baoc
from baoc import BAOC
from baoc.core.plan import PlanError
from baoc.planners.model_facts import ModelFacts
from experiments.finetune.tasks import TASKS, FineTuning, Problem, Scores
from experiments.runs import Row
from experiments.workloads.base import HeldOut
from experiments.zoo.training import FACTOR, make_optimizer

UNTRAINED = "untrained"
WEIGHT_DECAY, CLIP = 0.01, 1.0


@dataclass(frozen=True)
class Run:
    """What identifies a run.

    >>> Run("smollm2-gsm8k", "baoc@0.25", seed=1, rung=-1).key
    'smollm2-gsm8k baoc@0.25 seed=1 lr=3.33e-05 steps=10'
    """

    task: str
    method: str
    """``untrained``, or as in the zoo: ``adamw32``, ``baoc@`` with a budget, or a configuration for all weights."""
    seed: int
    rung: int
    """The learning rate is the task's times three to the power of this."""

    @property
    def key(self) -> str:
        return f"{self.task} {self.method} seed={self.seed} lr={self.lr:.3g} steps={TASKS[self.task].steps}"

    @property
    def lr(self) -> float:
        return TASKS[self.task].lr * FACTOR**self.rung


def train(run: Run) -> Row:
    """Train to the end and return what is known of the run.

    The losses are None if the run diverged, and if no plan fits the budget, which ``error`` says.
    """
    task = TASKS[run.task]
    row: Row = {"key": run.key, "task": run.task, "method": run.method, "seed": run.seed, "lr": run.lr}
    row |= {"rung": run.rung, "steps": task.steps, "validation": None, "test": None, "error": None}
    torch.manual_seed(run.seed)
    problem = task.build(run.seed)
    row["parameters"] = sum(parameter.numel() for parameter in problem.model.parameters())
    row["regime"] = ModelFacts.of(problem.model).regime
    started = time.process_time()
    if run.method != UNTRAINED:
        initial = [parameter.detach().clone() for parameter in problem.model.parameters()]
        try:
            optimizer = make_optimizer(run.method, problem.model, run.lr, WEIGHT_DECAY)
            is_finite = _train(task, problem, optimizer, run.seed)
        except PlanError as error:
            return {**row, "error": str(error)}
        row["state_bytes"] = baoc.state_bytes(optimizer)
        if isinstance(optimizer, BAOC):
            row["plan"] = _plan(optimizer)
        row["distance"] = distance(problem.model, initial) if is_finite else None
    row["train_seconds"] = round(time.process_time() - started, 2)
    for split in ("validation", "test"):
        scores = _scores(problem, split)
        row[split] = scores if math.isfinite(scores["loss"]) else None
    row["seconds"] = round(time.process_time() - started, 2)
    return row


@torch.no_grad()
def distance(model: nn.Module, initial: list[torch.Tensor]) -> float:
    """Return how far all weights together are from the initial ones, relative to the length of those.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> round(distance(layer, [layer.weight / 1.5]), 6)
    0.5
    """
    moved = sum((now - then).double().square().sum() for now, then in zip(model.parameters(), initial, strict=True))
    length = sum(then.double().square().sum() for then in initial)
    return math.sqrt(float(moved) / float(length))


def _train(task: FineTuning, problem: Problem, optimizer: torch.optim.Optimizer, seed: int) -> bool:
    """Train; return whether the last loss was finite."""
    torch.manual_seed(seed + 1)  # dropout: no optimizer's own random numbers move it
    problem.model.train()
    schedule, parameters = LambdaLR(optimizer, task.lr_factor), list(problem.model.parameters())
    for _ in range(task.steps):
        loss = problem.loss()
        if not math.isfinite(loss.item()):
            return False
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
    return True


@torch.no_grad()
def _scores(problem: Problem, split: HeldOut) -> Scores:
    problem.model.eval()
    return problem.scores(split)


def _plan(optimizer: BAOC) -> dict[str, int]:
    """Return the parameters of each configuration."""
    numel: dict[str, int] = {}
    for block in optimizer.plan.blocks:
        alias = block.configuration.alias
        numel[alias] = numel.get(alias, 0) + block.numel
    return numel
