"""Plans apart from a training run: profile a model once, then ask for any budget.

``import baoc.plan`` gives this module; :class:`Plan`, :class:`Block` and what goes with them are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from baoc.core.budget import is_per_rank, memory_budget
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.sharding import fullest
from baoc.core.spec import DEFAULT_BETAS, Hyper
from baoc.optim.optimizer import BlockOptimizer
from baoc.planning.planner import DEFAULT_MEMORY, Planner
from baoc.planning.settings import Settings
from baoc.profiling.coordinates import RATIO
from baoc.profiling.profile import Profile
from baoc.profiling.profiler import LossFunction, Profiler, record

__all__ = ["Block", "Plan", "PlanError", "make_plan", "memory_budget", "profile"]

WARMUP_CONFIGURATION = "adamw-16"


def make_plan(
    profile: Profile,
    memory: float | int | str = DEFAULT_MEMORY,
    time: float | None = None,
    *,
    host_memory: float | int | str | None = None,
    hyper: Hyper | None = None,
    ranks: int = 1,
    **settings: Any,
) -> Plan:
    """The plan of least risk for a profile within a memory and a time budget.

    ``memory`` is a share of AdamW16's state (0.5, "50%"), bytes (an int), a size ("1.5GiB") or "auto"; ``time`` bounds
    how long a training step may become, relative to one with AdamW16. With ``host_memory``, a budget for state in host
    memory, ``memory`` is for what the device holds, and the plan says what is where. A budget like "2GiB/rank" is what
    each of ``ranks`` may hold that parameters are sharded over. ``settings`` are those of
    :class:`~baoc.planning.planner.Settings`.

    >>> model = nn.Linear(64, 128)
    >>> seen = profile(model, lambda model, batch: model(batch).square().mean(), [torch.randn(2, 64)], steps=5)
    >>> plan = make_plan(seen, memory=0.6, time=10.0)
    >>> plan.state_bytes <= 0.6 * plan.reference_bytes
    True
    """
    chosen = Settings.of("make_plan", settings)
    rows = {name: fullest(shape[0], ranks) for name, shape in profile.shapes.items() if shape}
    of_a_rank = rows if is_per_rank(memory) else {}
    planner = Planner(profile.shapes, profile, hyper or Hyper(lr=1e-3), chosen, rows=of_a_rank)
    plan = planner.plan(memory, time, host_memory=host_memory)
    return plan.sharded(ranks) if ranks > 1 else plan


def profile(
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
    optimizer: torch.optim.Optimizer | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> Profile:
    """Train for a few steps and record what the gradients are like. This changes the model's weights.

    Args:
        model: only its trainable parameters are profiled.
        loss_fn: ``loss_fn(model, batch)`` returns the loss.
        batches: a list, a DataLoader or any other iterable. What can be iterated again is, if it is shorter than
            ``steps``; an iterator is used up to its end.
        steps: how many.
        lr: of the AdamW16 that the warm-up is trained with, unless ``optimizer`` is given.
        weight_decay: likewise.
        betas: likewise; also the decay of the sampled moments.
        ratio: which share of each tensor is followed.
        seed: of the choice of coordinates.
        optimizer: what to train with instead.
        on_step: called as ``on_step(step, steps, loss)`` after each step.

    >>> model = nn.Linear(8, 4)
    >>> seen = profile(model, lambda model, batch: model(batch).square().mean(), [torch.randn(2, 8)], steps=5)
    >>> seen.steps, seen.shapes
    (5, {'weight': (4, 8), 'bias': (4,)})
    """
    profiler = Profiler(model, ratio=ratio, seed=seed, betas=betas)
    if optimizer is None:
        optimizer = BlockOptimizer(model, lr=lr, betas=betas, weight_decay=weight_decay, plan=WARMUP_CONFIGURATION)
    return record(profiler, model, loss_fn, batches, optimizer, steps, on_step)
