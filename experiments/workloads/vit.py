"""ViT: the paper's vision transformer, and a small sibling of the same class.

The paper says ImageNet-1K, but the state that it reports is that of a head of 10 classes. ``vit/cifar10`` has this
head; ``vit/imagenet`` has one class for each folder of ``train/``, and takes images of 224 x 224.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from baoc.tools.models import MODELS, ViT
from baoc.tools.models.resolve import explained
from experiments.workloads import images
from experiments.workloads.base import ACCURACY, Batch, Split
from experiments.workloads.family import FamilyWorkload, Size


@dataclass(frozen=True, kw_only=True)
class ViTSize(Size):
    """One size of the family."""

    side: int
    """Of images from a folder, in pixels."""
    for_folder: Callable[[int], nn.Module]
    """Makes the model for that side, of so many classes."""


class ViTWorkload(FamilyWorkload):
    """Name the class of an image. Training images are mirrored at random; digits, which change, are not."""

    size: ViTSize

    family, metric = "ViT", ACCURACY
    tasks = {
        "cifar10": "naming CIFAR-10's images",
        "imagenet": "naming ImageNet's images",
        "digits": "reading handwritten digits",
    }

    @cached_property
    def images(self) -> Mapping[Split, images.Loaded]:
        return self._folder[0] if self.dataset == "imagenet" else images.load(self.dataset, self.options)

    @cached_property
    def _folder(self) -> tuple[Mapping[Split, images.Loaded], int]:
        return images.image_folder(self.dataset, self.size.side, self.options)

    def make(self, pretrained: str | None) -> nn.Module:
        model = self.size.for_folder(self._folder[1]) if self.dataset == "imagenet" else self.size.build()
        if pretrained:
            with explained(f"{pretrained!r} is not a saved state dict of {self.name}'s model"):
                model.load_state_dict(torch.load(pretrained, map_location="cpu", weights_only=True))
        return model

    def checkpoint(self, model: nn.Module) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def count(self, split: Split) -> int:
        return len(self.images[split])

    def collate(self, split: Split, indices: Sequence[int], generator: torch.Generator) -> Batch:
        pixels, labels = self.images[split].batch(list(indices))
        if split == "train" and self.dataset != "digits":
            mirrored = torch.rand(len(pixels), 1, 1, 1, generator=generator) < 0.5
            pixels = torch.where(mirrored, pixels.flip(-1), pixels)
        return {"images": pixels, "labels": labels}

    def sums(self, model: nn.Module, batch: Batch) -> Batch:
        logits, labels = model(batch["images"]).float(), batch["labels"]
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (logits.argmax(-1) == labels).sum(),
            "count": torch.tensor(len(labels)),
        }


def vit_small(classes: int = images.CLASSES) -> nn.Module:
    return ViT(image=images.SIZE, patch=8, classes=classes, dim=128, depth=4, heads=4)


def _large(classes: int) -> nn.Module:
    return ViT(image=224, classes=classes)


SIZES = {
    "vit": ViTSize(
        build=MODELS["vit"],
        for_folder=_large,
        side=224,
        parameters=10_949_002,
        description="the paper's ViT",
        batch_size=128,
        steps=4000,
        lr=5e-4,
    ),
    "vit-small": ViTSize(
        build=vit_small,
        for_folder=vit_small,
        side=images.SIZE,
        parameters=821_642,
        description="a ViT of 4 layers and width 128",
        batch_size=32,
        steps=1000,
        lr=3e-4,
    ),
}
