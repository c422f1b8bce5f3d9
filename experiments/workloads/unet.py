"""Diffusion: Stable Diffusion 1.5's UNet, and a small sibling of the same class, on latents of images.

Stable Diffusion's latents come from a VAE and its conditions from CLIP, and neither can be had without a download. Here
a latent is one level of the Haar wavelet transform of an image's luminance: four channels at half the size, as cheap as
it is exactly invertible. The condition on a class is a table of fixed random vectors. The denoiser sees the shapes, the
noise schedule and the loss of the original; losses are not comparable with those on VAE latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baoc.tools.models import MODELS
from baoc.tools.models.resolve import explained
from experiments.packages import need
from experiments.workloads import images
from experiments.workloads.base import LOSS, Batch, Options, Split
from experiments.workloads.dataset import generator
from experiments.workloads.family import FamilyWorkload, Size

LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601
TIMES = 1000
SIGNAL = (1 - torch.linspace(0.00085**0.5, 0.012**0.5, TIMES) ** 2).cumprod(0)  # Stable Diffusion's schedule


@dataclass(frozen=True, kw_only=True)
class UNetSize(Size):
    """One size of the family."""

    condition: tuple[int, int]  # (tokens, width)


class UNetWorkload(FamilyWorkload):
    """Predict the noise in a noisy latent, given its class. Noise and times are part of the batch."""

    family, metric = "UNet", LOSS
    tasks = {"cifar10": "denoising latents of CIFAR-10", "digits": "denoising latents of handwritten digits"}

    def __init__(self, name: str, size: UNetSize, dataset: str, options: Options | None = None) -> None:
        super().__init__(name, size, dataset, options)
        self.conditions = torch.randn(images.CLASSES, *size.condition, generator=generator("conditions"))

    @cached_property
    def images(self) -> images.Splits:
        return images.load(self.dataset, self.options)

    @cached_property
    def scale(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel over the training images."""
        latents = haar(self.images["train"].pixels / 127.5 - 1)
        return latents.mean((0, 2, 3), keepdim=True), latents.std((0, 2, 3), keepdim=True)

    def make(self, pretrained: str | None) -> nn.Module:
        if not pretrained:
            return self.size.build()
        # A whole pipeline, on the hub or on disk, has its denoiser in a folder of its own.
        subfolder = None if Path(pretrained, "config.json").is_file() else "unet"
        model_class = need("diffusers", self.name).UNet2DConditionModel
        with explained(f"the pretrained UNet {pretrained!r} cannot be loaded"):
            model: nn.Module = model_class.from_pretrained(pretrained, subfolder=subfolder)
        return model

    def checkpoint(self, model: nn.Module) -> None:
        model.enable_gradient_checkpointing()  # type: ignore[operator]

    def count(self, split: Split) -> int:
        return len(self.images[split])

    def collate(self, split: Split, indices: Sequence[int], generator: torch.Generator) -> Batch:
        pixels, labels = self.images[split].batch(list(indices))
        mean, deviation = self.scale
        latents = (haar(pixels) - mean) / deviation
        noise = torch.randn(latents.shape, generator=generator)
        times = torch.randint(TIMES, labels.shape, generator=generator)
        signal = SIGNAL[times].view(-1, 1, 1, 1)
        return {
            "sample": signal.sqrt() * latents + (1 - signal).sqrt() * noise,
            "timestep": times,
            "encoder_hidden_states": self.conditions[labels],
            "noise": noise,
        }

    def sums(self, model: nn.Module, batch: Batch) -> Batch:
        inputs = {name: value for name, value in batch.items() if name != "noise"}
        loss = F.mse_loss(model(**inputs).sample.float(), batch["noise"], reduction="sum")
        return {"loss": loss, "count": torch.tensor(batch["noise"].numel())}


def haar(pixels: Tensor) -> Tensor:
    """(images, 3, 2n, 2n) -> (images, 4, n, n): the mean, and the differences along each axis and both.

    >>> haar(torch.ones(1, 3, 2, 2)).flatten().tolist()
    [2.0, 0.0, 0.0, 0.0]
    """
    grey = (pixels * torch.tensor(LUMINANCE).view(1, 3, 1, 1)).sum(1, keepdim=True)
    corners = F.pixel_unshuffle(grey, 2)  # (images, 4, n, n): each block's pixels
    signs = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    return torch.einsum("ij,bjhw->bihw", signs, corners)


def unet_small() -> nn.Module:
    diffusers = need("diffusers", "unet-small")
    model: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=16, cross_attention_dim=64, attention_head_dim=4, block_out_channels=(32, 64, 64),
        layers_per_block=1, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    return model


SIZES = {
    "unet": UNetSize(
        build=MODELS["sd15-unet"],
        parameters=859_520_964,
        description="Stable Diffusion 1.5's UNet",
        weights="stable-diffusion-v1-5/stable-diffusion-v1-5",
        condition=(77, 768),
        batch_size=32,
        steps=2500,
        lr=1e-4,
    ),
    "unet-small": UNetSize(
        build=unet_small,
        parameters=1_489_028,
        description="a UNet of 3 levels and width 32",
        condition=(4, 64),
        batch_size=16,
        steps=250,
        lr=2e-3,
    ),
}
