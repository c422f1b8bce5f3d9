"""The tasks: pretrained weights, something to train them on, and a test set that is looked at once."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.finetune import resnet
from experiments.workloads import Options, images
from experiments.workloads.base import HeldOut, Split
from experiments.workloads.sources import folder_of, missing, split_of
from experiments.zoo import pretrained
from experiments.zoo.task import generator, rows

WARM_UP = 0.1
"""The part of a run in which the learning rate rises."""
NOISE = 0.1
"""The standard deviation of noise on images, where pixels are from 0 to 1."""
Scores = dict[str, float]
Examples = Sequence[Tensor]
"""Inputs; the last tensor has the labels where there are labels."""


@dataclass(frozen=True)
class Problem:
    """Pretrained weights and data, made from a seed: two problems of one seed begin alike and draw the same batches."""

    model: nn.Module
    loss: Callable[[], Tensor]
    """Returns the loss of the next batch."""
    scores: Callable[[HeldOut], Scores]
    """Returns the loss, and the accuracy of a classifier, on held-out data."""


@dataclass(frozen=True)
class FineTuning:
    """A task.

    Attributes:
        name: in keys and on the page.
        about: what it is.
        model: the folder with its weights.
        build: makes the problem of a seed.
        lr: the centre of the learning rates to try.
        steps: of a run.
        seeds: at most so many.
        once: methods that run with the first seed only, because they take long.
        budgets: of BAOC.
    """

    name: str
    about: str
    model: str
    build: Callable[[int], Problem]
    lr: float
    steps: int
    seeds: int = 3
    once: tuple[str, ...] = ()
    budgets: tuple[str, ...] = ("auto", "0.25", "0.05")

    def lr_factor(self, step: int) -> float:
        """Return the factor on the learning rate at a step, counted from 0: a short rise, then a cosine to zero."""
        rise = max(1, round(WARM_UP * self.steps))
        if step < rise:
            return (step + 1) / (rise + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / (self.steps - rise)))

    @property
    def is_there(self) -> bool:
        """Whether the weights are there."""
        root = os.environ.get(pretrained.FOLDER)
        if not root:
            return False
        folder = Path(root) / self.model
        return (folder / "config.json").exists() or resnet.weights_file(folder) is not None


def classifier(
    model: nn.Module, seed: int, size: int, train: Examples, held_out: Mapping[HeldOut, Examples]
) -> Problem:
    """Return a problem of a model that returns logits."""

    def scores(split: HeldOut) -> Scores:
        logits, labels = [], held_out[split][-1]
        for batch in zip(*(each.split(64) for each in held_out[split]), strict=True):
            logits.append(model(*batch[:-1]))
        found = torch.cat(logits)
        accuracy = (found.argmax(dim=1) == labels).float().mean().item()
        return {"loss": F.cross_entropy(found, labels).item(), "accuracy": accuracy}

    draw, random = rows(*train, size=size), generator(seed + 1)

    def loss() -> Tensor:
        *inputs, labels = draw(random)
        return F.cross_entropy(model(*inputs), labels)

    return Problem(model, loss, scores)


def language(name: str, seed: int, size: int, length: int, tests: Mapping[HeldOut, int]) -> Problem:
    """Return a problem of a language model on GSM8K, with so many windows to score."""
    model = pretrained.language_model(name)
    windows = {split: pretrained.windows(name, split, length) for split in ("train", *tests)}
    draw, random = rows(windows["train"], size=size), generator(seed + 1)

    def loss(tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    def scores(split: HeldOut) -> Scores:
        chosen = pretrained.spread(windows[split], tests[split])
        return {"loss": sum(loss(batch).item() * len(batch) for batch in chosen.split(8)) / len(chosen)}

    return Problem(model, lambda: loss(*draw(random)), scores)


def stories15m(seed: int) -> Problem:
    return language("stories15m", seed, size=2, length=128, tests={"validation": 16, "test": 48})


def smollm2(seed: int) -> Problem:
    return language("smollm2", seed, size=2, length=128, tests={"validation": 4, "test": 12})


def intents(seed: int) -> Problem:
    model = pretrained.classifier(len(pretrained.INTENTS))

    def examples(patterns: slice, fillers: Sequence[str]) -> Examples:
        sentences, labels = zip(*pretrained.intents(patterns, fillers), strict=True)
        return *pretrained.encoded(sentences, 16), torch.tensor(labels)

    every, unseen = pretrained.FILLERS, slice(2, 3)
    held_out: Mapping[HeldOut, Examples] = {
        "validation": examples(unseen, every[:4]),
        "test": examples(unseen, every[4:]),
    }
    return classifier(model, seed, 8, examples(slice(0, 2), every), held_out)


def imdb(seed: int) -> Problem:
    held_out: Mapping[HeldOut, Examples] = {"validation": _reviews("validation", 128), "test": _reviews("test", 384)}
    return classifier(pretrained.classifier(2), seed, 8, _reviews("train", 2000), held_out)


@functools.cache
def _reviews(split: Split, count: int) -> Examples:
    """Return the first 64 tokens of reviews, their masks, and whether the reviewer liked the film."""
    folder = folder_of("imdb", Options())
    if folder is None or not (folder / "reviews.json").is_file():
        raise missing("imdb", "there is no reviews.json in a data folder")
    reviews = {row["t"]: int(row["s"]) for row in json.loads((folder / "reviews.json").read_text(encoding="utf-8"))}
    chosen = [text for text in reviews if split_of(text.encode(), one_in=10, has_test=False) == split][:count]
    return *pretrained.encoded(chosen, 64), torch.tensor([reviews[text] for text in chosen])


def noisy_images(seed: int) -> Problem:
    """The training and validation images are of those that the weights were trained on; the test images are new."""
    path = resnet.weights_file(Path(pretrained.folder("resnet20")))
    assert path is not None
    held_out: Mapping[HeldOut, Examples] = {"validation": _noisy("validation", 500), "test": _noisy("test", 1500)}
    return classifier(resnet.pretrained(path), seed, 32, _noisy("train", 5000), held_out)


@functools.cache
def _noisy(split: Split, count: int) -> Examples:
    found = images.load("cifar10", Options())[split]
    clean, labels = found.batch(list(range(min(count, len(found)))))
    noise = 2 * NOISE * torch.randn(clean.shape, generator=generator(0))  # images are from -1 to 1
    return resnet.pixels((clean + noise).clamp(-1, 1)), labels


TASKS = {
    task.name: task
    for task in (
        FineTuning(
            "minilm-intents", "MiniLM on 10 intents of short sentences, batches of 8", "minilm", intents, 3e-4, 30
        ),
        FineTuning(
            "resnet20-noise",
            f"ResNet-20 on CIFAR-10 with Gaussian noise of {NOISE:g}, batches of 32",
            *("resnet20", noisy_images, 1e-3, 60),
        ),
        FineTuning("stories15m-gsm8k", "stories15M on GSM8K, 2 x 128 tokens", "stories15m", stories15m, 1e-3, 30),
        FineTuning(
            "smollm2-gsm8k",
            "SmolLM2-135M on GSM8K, 2 x 128 tokens",
            *("smollm2", smollm2, 1e-4, 10),
            seeds=2,
            once=("muon-8", "baoc@0.07"),
            budgets=("auto", "0.25", "0.05", "0.07"),
        ),
        FineTuning("minilm-imdb", "MiniLM on the feeling of IMDB reviews, 8 x 64 tokens", "minilm", imdb, 3e-4, 40),
    )
}
"""By name, the quickest first."""
