"""A family of models: its sizes, each with the settings it trains well with, on each of its datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from experiments.workloads import weights
from experiments.workloads.base import Options
from experiments.workloads.dataset import DatasetWorkload


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of a family."""

    build: Callable[[], nn.Module]
    parameters: int
    description: str
    batch_size: int
    steps: int
    lr: float
    weights: str | None = None
    """Published weights on the hub; None: the paper trains this model from scratch."""
    lr_spread: tuple[float, ...] = ()


class FamilyWorkload(DatasetWorkload):
    """A size on a dataset."""

    family: ClassVar[str]
    tasks: ClassVar[Mapping[str, str]]
    """What is learned from each dataset."""

    def __init__(self, name: str, size: Size, dataset: str, options: Options | None = None) -> None:
        self.name, self.size, self.dataset = name, size, dataset
        self.description = f"{size.description}, {self.tasks[dataset]}"
        self.steps, self.batch_size, self.lr, self.lr_spread = size.steps, size.batch_size, size.lr, size.lr_spread
        super().__init__(options)
        found = weights.source(name.partition("/")[0], size.weights, self.options)
        self.options = replace(self.options, pretrained=found)
