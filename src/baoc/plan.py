"""Plans apart from a training run, and what is measured for them: gradient statistics and update times.

``import baoc.plan`` gives this module; :class:`Plan`, :class:`Block` and what goes with them are here too.
"""

from __future__ import annotations

import dataclasses
import statistics as averages
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from baoc.core.budget import memory_budget
from baoc.core.configuration import BUDGET_REFERENCE, Configuration
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.sharding import rows_per_rank
from baoc.core.spec import DEFAULT_BETAS, Hyper, Shape
from baoc.optim.optimizer import BlockOptimizer
from baoc.planners.base import Budget, Memory, Planner
from baoc.planners.effects import EffectPlanner
from baoc.planners.model_facts import ModelFacts
from baoc.planners.paper.coordinates import RATIO
from baoc.planners.paper.planner import PaperPlanner
from baoc.planners.paper.problem import local_shapes, unit_granularity
from baoc.planners.paper.sampling import BETA_RHO
from baoc.planners.paper.statistics import GradientStatistics, LossFunction, StatisticsCollector, record_steps
from baoc.planners.paper.times import MEASURE, UpdateTimes, signature
from baoc.planners.paper.units import structural_units

__all__ = ["Block", "Plan", "PlanError", "collect_statistics", "make_plan", "measure_updates", "memory_budget"]

WARMUP_CONFIGURATION = "adamw-16"
_STEPS, _SECONDS = 3, 0.01  # the least to time; the first step, which allocates and compiles, is not timed
P = TypeVar("P", bound=Planner)


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
        plan = measured(planner, facts).plan(statistics, facts, budget)
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


def measured(planner: P, model: ModelFacts) -> P:
    """Return a planner with measured times where it asks for them (``times="measure"``), else as it is."""
    if not isinstance(planner, PaperPlanner) or planner.times != MEASURE:
        return planner
    return dataclasses.replace(planner, times=measured_times(planner, model, torch.device(model.device)))


def measured_times(
    planner: PaperPlanner, model: ModelFacts, device: torch.device, dtype: torch.dtype = torch.float32
) -> UpdateTimes:
    """Time one update of every structural unit with every candidate of a planner on a device."""
    held = local_shapes(model)
    units = structural_units(model.shapes, unit_granularity(planner.granularity))
    shapes = [{name: held[name] for name in unit.parameters} for unit in units]
    return measure_updates(shapes, planner.candidates, device, dtype)  # type: ignore[arg-type]  # parsed there


def measure_updates(
    units: Iterable[Mapping[str, Shape]],
    configurations: Sequence[Configuration],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> UpdateTimes:
    """Time one update of every unit with every configuration and with AdamW16.

    Tensors of the units' shapes are made for it, one unit at a time, so this needs room for the largest unit's
    weights, gradients and state. Units with equal shapes are measured once.

    Args:
        units: shapes by name.
        configurations: to measure.
        device: where to measure.
        dtype: of parameters and gradients.

    Returns:
        Medians in seconds, of at least three updates and ten milliseconds each.

    Example:
        >>> from baoc import parse
        >>> times = measure_updates([{"weight": (64, 64)}], [parse("sgd")])
        >>> list(times.seconds), list(times.seconds["64x64"])
        (['64x64'], ['adamw[m=bf16,v=bf16]', 'sgd'])
    """
    device = torch.device(device)
    distinct = {signature(unit): unit for unit in units if signature(unit)}
    chosen = dict.fromkeys((BUDGET_REFERENCE, *configurations))
    seconds = {}
    for key, unit in sorted(distinct.items()):
        _one_update(unit, BUDGET_REFERENCE, device, dtype)  # discarded: caches and clocks are cold at first
        seconds[key] = {str(c): _one_update(unit, c, device, dtype) for c in chosen}
    return UpdateTimes(str(device), seconds)


def _one_update(
    unit: Mapping[str, Shape], configuration: Configuration, device: torch.device, dtype: torch.dtype
) -> float:
    params = {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for name, shape in unit.items()}
    for param in params.values():
        param.grad = torch.linspace(-1, 1, param.numel(), dtype=dtype, device=device).view(param.shape)
    optimizer = BlockOptimizer(list(params.items()), lr=1e-3, plan=Plan.uniform(configuration, dict(unit)))
    optimizer.step()
    taken: list[float] = []
    while len(taken) < _STEPS or sum(taken) < _SECONDS:
        _wait(device)
        start = time.perf_counter()
        optimizer.step()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return averages.median(taken)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
