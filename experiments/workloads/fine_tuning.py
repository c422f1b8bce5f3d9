"""Fine-tunings of small models that AdamW has trained before, on other data. They are trained once, then kept.

``gpt-small/alpaca-gsm8k`` goes from Alpaca to GSM8K, with Alpaca's tokenizer. ``vit-small/cifar10-classes`` goes from
the first five classes to the others, with a fresh head.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from experiments.workloads import gpt, images, vit
from experiments.workloads.base import Options, Workload
from experiments.workloads.family import FamilyWorkload
from experiments.workloads.tokens import Tokenizer

SEED = 0
"""Of the training before. The seed of a run shuffles the new data."""


class FineTuning(FamilyWorkload):
    """A family's workload that begins with the weights of another, ``before``."""

    steps_before: int
    fresh: ClassVar[tuple[str, ...]] = ()
    """Parameters that begin anew with every seed."""

    @property
    @abstractmethod
    def before(self) -> Workload:
        """What the model has been trained on, of the same model."""

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        return trained_weights(self.before, self.steps_before, self.options.cache_folder)

    def prepare(self) -> None:
        super().prepare()
        _ = self.weights

    def make(self, pretrained: str | None) -> nn.Module:
        model = super().make(pretrained)
        if pretrained or next(model.parameters()).is_meta:
            return model
        old = {name: value for name, value in self.weights.items() if name not in self.fresh}
        new = {name: value for name, value in model.state_dict().items() if name in self.fresh}
        model.load_state_dict({**old, **new})
        return model


class GPTFineTuning(FineTuning, gpt.GPTWorkload):
    """From one text to another."""

    tasks = {"alpaca-gsm8k": "solving GSM8K's problems after Alpaca's instructions"}
    steps_before = 1500

    def __init__(self, name: str, size: gpt.LanguageSize, dataset: str, options: Options | None = None) -> None:
        super().__init__(name, size, dataset, options)
        self._first, self.dataset = dataset.split("-")

    @cached_property
    def before(self) -> gpt.GPTWorkload:
        name = f"gpt-small/{self._first}"
        return gpt.GPTWorkload(name, gpt.SIZES["gpt-small"], self._first, self.options)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.before.tokenizer


class ViTFineTuning(FineTuning, vit.ViTWorkload):
    """From the first half of the classes to the other."""

    tasks = {
        "cifar10-classes": "naming CIFAR-10's last five classes after the first five",
        "digits-classes": "reading the digits 5 to 9 after 0 to 4",
    }
    steps_before = 1000
    fresh = ("head.weight", "head.bias")

    def __init__(self, name: str, size: vit.ViTSize, dataset: str, options: Options | None = None) -> None:
        super().__init__(name, size, dataset, options)
        self.dataset = dataset.partition("-")[0]

    @cached_property
    def before(self) -> vit.ViTWorkload:
        return SomeClasses(self.name, vit.SIZES["vit-small"], self.dataset, self.options)

    @cached_property
    def images(self) -> images.Splits:
        return of_classes(images.load(self.dataset, self.options), range(images.CLASSES // 2, images.CLASSES))


class SomeClasses(vit.ViTWorkload):
    """The first half of the classes."""

    @cached_property
    def images(self) -> images.Splits:
        return of_classes(images.load(self.dataset, self.options), range(images.CLASSES // 2))


GPT_SIZES = {"gpt-small": replace(gpt.SIZES["gpt-small"], steps=150, lr=6e-3)}
VIT_SIZES = {"vit-small": replace(vit.SIZES["vit-small"], steps=300, lr=1.2e-3)}


def of_classes(splits: images.Splits, classes: range) -> images.Splits:
    """The images of these classes."""
    chosen = {split: torch.isin(every.labels, torch.tensor(classes)) for split, every in splits.items()}
    return {split: images.Images(splits[split].pixels[of], splits[split].labels[of]) for split, of in chosen.items()}


def trained_weights(workload: Workload, steps: int, cache: Path) -> Mapping[str, Tensor]:
    """What AdamW makes of a workload at its own lr, found in the cache if it was trained before."""
    path = cache / f"weights-{_digest(workload, steps)}.pt"
    if not path.is_file():
        from experiments.train import train  # which knows all workloads

        model, _ = train(workload, steps=steps, lr=workload.lr, seed=SEED, device="cpu")
        _save(model.state_dict(), path)
    weights: Mapping[str, Tensor] = torch.load(path, weights_only=True)
    return weights


def _digest(workload: Workload, steps: int) -> str:
    """Of all that the weights depend on; the first batch stands for the data and the tokenizer."""
    model = workload.build(seed=SEED, device="meta")
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    digest = hashlib.blake2b(repr((steps, workload.lr, workload.batch_size, SEED, shapes)).encode(), digest_size=12)
    for name, value in next(workload.train_batches(seed=SEED)).items():
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def _save(weights: Mapping[str, Tensor], path: Path) -> None:
    """At once or not at all: the runs of a sweep may get here together."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    torch.save(dict(weights), temporary)
    os.replace(temporary, path)
