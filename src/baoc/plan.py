"""Plans apart from a training run: of a model before training, or of gradient statistics.

``import baoc.plan`` gives this module; :class:`Plan`, :class:`Block` and what goes with them are here too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from baoc.core.budget import memory_budget
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.sharding import rows_per_rank
from baoc.core.spec import DEFAULT_BETAS, Hyper
from baoc.optim.optimizer import BlockOptimizer
from baoc.planners.base import Budget, Memory, Planner
from baoc.planners.effects import EffectPlanner
from baoc.planners.model_facts import ModelFacts
from baoc.planners.paper.collect import LossFunction, StatisticsCollector, record_steps
from baoc.planners.paper.coordinates import RATIO
from baoc.planners.paper.planner import PaperPlanner
from baoc.planners.paper.sampling import BETA_RHO
from baoc.planners.paper.statistics import GradientStatistics

__all__ = ["Block", "Plan", "PlanError", "collect_statistics", "make_plan", "memory_budget"]

WARMUP_CONFIGURATION = "adamw-16"


def make_plan(
    model: nn.Module | ModelFacts | GradientStatistics,
    memory: Memory = "auto",
    *,
    planner: Planner | None = None,
    host_memory: Memory | None = None,
    ranks: int = 1,
    hyper: Hyper | None = None,
) -> Plan:
    """Return the plan for a model within a budget, without training it.

    Args:
        model: a module (one on the meta device will do), facts about one, or gradient statistics.
        memory: as in :class:`~baoc.BAOC`.
        planner: as in :class:`~baoc.BAOC`. A :class:`~baoc.PaperPlanner` needs gradient statistics.
        host_memory: as in :class:`~baoc.BAOC`.
        ranks: over which parameters are sharded.
        hyper: learning rate, betas and weight decay that the model will be trained with.

    Returns:
        The plan.

    Raises:
        PlanError: no plan fits the budget.

    Example:
        >>> plan = make_plan(nn.Linear(64, 128), memory=0.6)
        >>> plan.state_bytes <= 0.6 * plan.reference_bytes
        True
    """
    statistics = model if isinstance(model, GradientStatistics) else None
    if isinstance(model, GradientStatistics):
        facts = model.model
    else:
        facts = model if isinstance(model, ModelFacts) else ModelFacts.of(model)
    if hyper is not None:
        facts = dataclasses.replace(facts, hyper=hyper)
    if ranks > 1:
        rows = {name: rows_per_rank(shape[0], ranks) for name, shape in facts.shapes.items() if shape}
        facts = dataclasses.replace(facts, rows=rows)
    planner, budget = planner or EffectPlanner(), Budget(memory, host_memory)
    if isinstance(planner, PaperPlanner):
        if statistics is None:
            raise PlanError(
                "PaperPlanner plans from gradient statistics. Pass those that baoc.collect_statistics(...) returns."
            )
        plan = planner.plan(statistics, facts, budget)
    else:
        plan = planner.initial_plan(facts, budget)
    return plan.sharded(ranks) if ranks > 1 else plan


def collect_statistics(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    steps: int = 50,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = DEFAULT_BETAS,
    ratio: float = RATIO,
    seed: int = 0,
    floor: int = 0,
    beta_rho: float = BETA_RHO,
    optimizer: torch.optim.Optimizer | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> GradientStatistics:
    """Train for a few steps and return statistics of the gradients. This changes the model's weights.

    Args:
        model: only its trainable parameters are sampled.
        loss_fn: ``loss_fn(model, batch)`` returns the loss.
        batches: a list, a DataLoader or any other iterable. One that can be iterated again is, if it is shorter than
            ``steps``.
        steps: how many.
        lr: of the AdamW16 that the warm-up is trained with, unless ``optimizer`` is given.
        weight_decay: likewise.
        betas: likewise; also beta_m and beta_v of the sampled moments.
        ratio: share of each structural unit's coordinates that is sampled.
        seed: of the choice of coordinates.
        floor: sample at least this many coordinates of a unit, or all.
        beta_rho: the largest decay of the direction stability that plans will ask for.
        optimizer: what to train with instead.
        on_step: called as ``on_step(step, steps, loss)`` after each step.

    Returns:
        Gradient statistics, for ``make_plan(statistics, planner=PaperPlanner())`` or a file.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> loss = lambda model, batch: model(batch).square().mean()
        >>> statistics = collect_statistics(model, loss, [torch.randn(2, 8)], steps=5)
        >>> statistics.steps, statistics.shapes
        (5, {'weight': (4, 8), 'bias': (4,)})
    """
    collector = StatisticsCollector(model, ratio=ratio, seed=seed, betas=betas, floor=floor, beta_rho=beta_rho)
    if optimizer is None:
        optimizer = BlockOptimizer(model, lr=lr, betas=betas, weight_decay=weight_decay, plan=WARMUP_CONFIGURATION)
    return record_steps(collector, model, loss_fn, batches, optimizer, steps, on_step)
