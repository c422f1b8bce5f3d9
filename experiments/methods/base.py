"""What every method of the comparison looks like: a name, a way to build its optimizer, and its learning rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from experiments.packages import installed

GRID = 3
"""How many learning rates each method may try: the same for all, or the best-tuned method would win."""

AS_ADAMW = (0.5, 1.0, 2.0)
"""For methods whose authors say that AdamW's learning rate can be kept."""


class MethodError(ValueError):
    """A method that is not known, or that cannot be built here."""


@dataclass(frozen=True)
class Settings:
    """What a workload tells every method."""

    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    steps: int = 1000  # of the whole run
    warmup: int = 50  # steps before the paper's BAOC plans
    seed: int = 0


Build = Callable[[nn.Module, float, Settings], torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """One row of the comparison."""

    name: str
    label: str  # as in the paper's tables
    build: Build
    lr_factors: tuple[float, ...] = AS_ADAMW  # on the workload's AdamW lr
    note: str = ""
    needs: tuple[str, ...] = ()  # packages of the extra "experiments"

    def __post_init__(self) -> None:
        if len(self.lr_factors) != GRID or not all(factor > 0 for factor in self.lr_factors):
            raise MethodError(
                f"{self.name} declares the lr factors {self.lr_factors}; every method has {GRID}, all positive."
            )

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages it needs that are not installed."""
        return tuple(package for package in self.needs if not installed(package))
