"""What a task of the zoo is: a few lines that build something to train, and how it is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

Schedule = Literal["constant", "cosine", "one-cycle"]
Parameters = nn.Module | list[nn.Parameter]
WARM_UP = 0.3
"""The part of a one-cycle schedule in which the learning rate rises."""


@dataclass(frozen=True)
class Problem:
    """Something to train, made from a seed.

    Two problems of one seed start with the same weights and draw the same batches.
    """

    params: Parameters
    """Goes to the optimizer as it is: a module where there is one."""
    loss: Callable[[], Tensor]
    """Returns the loss of the next batch. Called once per step."""
    score: Callable[[], float]
    """Returns what is compared, without gradients: a positive loss on fixed held-out data, or the objective itself."""


@dataclass(frozen=True)
class Task:
    """A problem, the number of steps, and the learning rates to try.

    Attributes:
        build: makes the problem of a seed. Its docstring describes the task in the results.
        lr: the centre of AdamW's learning rates.
        steps: of a run.
        schedule: of the learning rate.
        weight_decay: as in ``torch.optim.AdamW``.
        decades: scores span orders of magnitude, and are compared as ratios.
        model: the folder of pretrained weights that the task needs.
    """

    build: Callable[[int], Problem]
    lr: float
    steps: int
    schedule: Schedule = "constant"
    weight_decay: float = 0.01
    decades: bool = False
    model: str | None = None

    @property
    def name(self) -> str:
        return self.build.__name__.replace("_", "-")

    @property
    def kind(self) -> str:
        """The module that has it."""
        return self.build.__module__.rpartition(".")[2]

    @property
    def about(self) -> str:
        """The first line of the docstring."""
        return (self.build.__doc__ or "").partition("\n")[0]

    def lr_factor(self, step: int) -> float:
        """Return the factor on the learning rate at a step, counted from 0."""
        done = step / self.steps
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        if done < WARM_UP:
            return 0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * done / WARM_UP))
        return 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def task(lr: float, steps: int, **settings: Any) -> Callable[[Callable[[int], Problem]], Task]:
    """Make a :class:`Task` of the function that builds its problem.

    Example:
        >>> @task(lr=0.1, steps=20)
        ... def a_point(seed: int) -> Problem:
        ...     '''One number goes to three.'''
        ...     point = nn.Parameter(torch.zeros(1))
        ...     return objective([point], lambda: (point - 3).square().sum())
        >>> a_point.name, a_point.about, a_point.build(seed=0).loss().item()
        ('a-point', 'One number goes to three.', 9.0)
    """
    return lambda build: Task(build, lr, steps, **settings)


def objective(params: Parameters, loss: Callable[[], Tensor]) -> Problem:
    """Return a problem whose loss has no batches; the objective itself is the score."""
    return Problem(params, loss, lambda: loss().item())


def fitted(
    params: Parameters,
    loss: Callable[..., Tensor],
    draw: Callable[[torch.Generator], Sequence[Tensor]],
    seed: int,
    test: Sequence[Tensor] | None = None,
) -> Problem:
    """Return a problem with batches.

    Args:
        params: what is trained.
        loss: the mean loss of a batch: ``loss(*draw(generator))``.
        draw: returns a batch.
        seed: of the batches.
        test: what the score is measured on (default: four more batches, the same for every optimizer).
    """
    batches, held_out = generator(seed + 1), generator(seed + 10_000)
    tests = [tuple(test)] if test is not None else [tuple(draw(held_out)) for _ in range(4)]
    return Problem(
        params,
        lambda: loss(*draw(batches)),
        lambda: sum(loss(*batch).item() for batch in tests) / len(tests),
    )


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*tensors: Tensor, size: int) -> Callable[[torch.Generator], Sequence[Tensor]]:
    """Return a function that draws so many rows of tensors, the same of each."""

    def draw(random: torch.Generator) -> Sequence[Tensor]:
        chosen = torch.randint(len(tensors[0]), (size,), generator=random)
        return [tensor[chosen] for tensor in tensors]

    return draw


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers with activations between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), activation()]
    return nn.Sequential(*layers[:-1])
