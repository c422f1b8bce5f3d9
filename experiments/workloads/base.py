"""What a workload is: a model, its data, its loss and its metric, behind one small interface."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from baoc.tools.models import ModelError

Batch = dict[str, Tensor]
"""Tensors on the CPU, each with the examples along its first dimension."""

Split = Literal["train", "validation", "test"]
HeldOut = Literal["validation", "test"]


class WorkloadError(ModelError):
    """A workload that cannot be found, or whose data, packages or options do not do."""


@dataclass(frozen=True)
class Metric:
    """The number that a workload is judged by."""

    name: Literal["accuracy", "perplexity", "loss"]
    higher_is_better: bool = False


ACCURACY, PERPLEXITY, LOSS = Metric("accuracy", higher_is_better=True), Metric("perplexity"), Metric("loss")


@dataclass(frozen=True)
class Options:
    """How to run a workload, where the defaults do not suit.

    >>> Options(batch_size=0)
    Traceback (most recent call last):
    experiments.workloads.base.WorkloadError: batch_size is 0; it must be at least 1.
    """

    data: str | Path | None = None
    """Folder with alpaca/, gsm8k/ and cifar10/; left out, ``$BAOC_DATA``, and without that the Hugging Face hub."""
    cache: str | Path | None = None
    """Where trained tokenizers are kept; left out, ``$BAOC_CACHE``, and without that ``~/.cache/baoc``."""
    pretrained: str | None = None
    """Weights, and for language the tokenizer: a folder, a folder with one folder per size (``gpt2/``, ``t5-base/``), a
    hub id, or ``"hub"`` for the published weights of each size. Left out, random weights and a trained BPE."""
    bf16: bool = False
    """Compute losses under bfloat16 autocast."""
    checkpointing: bool = False
    """Keep fewer activations, and compute them again in the backward pass."""
    batch_size: int | None = None
    """Examples in a batch, instead of the workload's own number."""
    length: int | None = None
    """Tokens in a sequence, instead of the workload's own number; for language only."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("length", 8)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise WorkloadError(f"{name} is {value}; it must be at least {least}.")

    @property
    def data_folder(self) -> Path | None:
        folder = self.data or os.environ.get("BAOC_DATA")
        return Path(folder).expanduser() if folder else None

    @property
    def cache_folder(self) -> Path:
        if folder := self.cache or os.environ.get("BAOC_CACHE"):
            return Path(folder).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baoc"


class Workload(ABC):
    """Something to train. A subclass sets the attributes below and gives the four methods.

    For data that fits in memory, :class:`~experiments.workloads.dataset.DatasetWorkload` asks for less.
    """

    name: str
    description: str
    metric: Metric
    steps: int
    """How long it is trained unless the caller says otherwise."""
    batch_size: int
    lr: float
    """A good peak learning rate for AdamW, with a short warm-up and a cosine to a tenth."""
    lr_spread: tuple[float, ...] = ()
    """Learning rates that tuning tries, as factors on the middle one of a method; empty: the method's own."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        if self.options.batch_size is not None:
            self.batch_size = self.options.batch_size

    def prepare(self) -> None:
        """Do what every run would otherwise do for itself, such as training a tokenizer."""
        next(self.train_batches(seed=0))

    @abstractmethod
    def build(self, *, seed: int, device: str = "cpu", pretrained: str | None = None) -> nn.Module:
        """The model, ready to be trained. The same seed gives the same weights on every device."""

    @abstractmethod
    def train_batches(self, *, seed: int, start: int = 0) -> Iterator[Batch]:
        """Endless shuffled batches, the same for the same seed; ``start`` skips that many at no cost."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch, on the model's device."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: HeldOut, max_batches: int | None = None) -> dict[str, float]:
        """``loss`` and the metric on held-out data; always the same data in the same order."""
