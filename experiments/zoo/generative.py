"""Generative and self-supervised models on digits and on points in the plane."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.images import digits
from experiments.zoo.task import Problem, fitted, mlp, rows, task


def moons(count: int, random: torch.Generator) -> Tensor:
    """Return points (count, 2) near two half circles."""
    angle = torch.rand(count, generator=random) * math.pi
    upper = torch.rand(count, generator=random) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x - 0.5, y - 0.25], dim=1) * 1.5 + 0.1 * torch.randn(count, 2, generator=random)


class VAE(nn.Module):
    """An encoder to 8 Gaussian numbers, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 128, 64, 16), mlp(8, 64, 128, 64)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Return the negative evidence bound per pixel."""
        mean, log_scale = self.encoder(x).chunk(2, dim=1)
        found = self.decoder(mean + log_scale.exp() * noise)
        distance = 0.5 * (mean**2 + (2 * log_scale).exp() - 1) - log_scale
        pixels = F.binary_cross_entropy_with_logits(found, (x + 1) / 2, reduction="none")
        return (pixels.sum(dim=1) + distance.sum(dim=1)).mean() / 64


@task(lr=3e-3, steps=1200)
def vae(seed: int) -> Problem:
    """A VAE with 8 latent numbers on digits, batches of 64."""
    images, _, test, _ = digits()
    model, choose = VAE(), rows(images.flatten(1), size=64)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        return choose(random)[0], torch.randn(64, 8, generator=random)

    noise = torch.randn(len(test), 8, generator=torch.Generator().manual_seed(0))
    return fitted(model, model, draw, seed, test=(test.flatten(1), noise))


class RealNVP(nn.Module):
    """Affine couplings, each of one coordinate by the other (Dinh et al. 2017)."""

    def __init__(self, couplings: int, width: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList([mlp(1, width, width, 2) for _ in range(couplings)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean negative log-likelihood."""
        volume = torch.zeros(len(x))
        for net in self.nets:
            kept, moved = x.unbind(dim=1)
            log_scale, shift = net(kept[:, None]).unbind(dim=1)
            log_scale = torch.tanh(log_scale)
            volume = volume + log_scale
            x = torch.stack([moved * log_scale.exp() + shift, kept], dim=1)
        return (0.5 * x.square().sum(dim=1) + math.log(2 * math.pi) - volume).mean()


@task(lr=3e-3, steps=550, schedule="cosine")
def flow(seed: int) -> Problem:
    """A RealNVP of 6 couplings of width 48 learns two moons, batches of 512."""
    model = RealNVP(6, 48)
    test = moons(4096, torch.Generator().manual_seed(seed + 10_000))
    return fitted(model, model, lambda random: [moons(512, random)], seed, test=[test])


@task(lr=3e-3, steps=1100)
def diffusion(seed: int) -> Problem:
    """A denoiser of 3 x 96 units learns two moons at all noise levels, batches of 256."""
    model = mlp(5, 96, 96, 96, 2, activation=nn.SiLU)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        clean, time = moons(256, random), torch.rand(256, 1, generator=random)
        noise, angle = torch.randn(256, 2, generator=random), time * math.pi / 2
        mixed = angle.cos() * clean + angle.sin() * noise
        return torch.cat([mixed, time, (4 * angle).cos(), (4 * angle).sin()], dim=1), noise

    return fitted(model, lambda x, noise: F.mse_loss(model(x), noise), draw, seed)


@task(lr=1e-3, steps=280)
def contrastive(seed: int) -> Problem:
    """A SimCLR encoder learns which two noisy digits show the same image, batches of 128."""
    images, _, test, _ = digits()
    encoder = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 32)),
    )

    def view(x: Tensor, random: torch.Generator) -> Tensor:
        kept = torch.rand(x.shape, generator=random) < 0.8
        return x * kept + 0.3 * torch.randn(x.shape, generator=random)

    def pairs(x: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        return view(x, random), view(x, random)

    def loss(left: Tensor, right: Tensor) -> Tensor:
        found = [F.normalize(encoder(x), dim=1) for x in (left, right)]
        return F.cross_entropy(10 * found[0] @ found[1].T, torch.arange(len(left)))

    choose = rows(images, size=128)
    fixed = pairs(test, torch.Generator().manual_seed(0))
    return fitted(encoder, loss, lambda random: pairs(choose(random)[0], random), seed, test=fixed)


@task(lr=1e-3, steps=1000)
def masked_autoencoder(seed: int) -> Problem:
    """A network of 2 x 192 units fills in digits of which it sees a third, batches of 128."""
    images, _, test, _ = digits()
    model = mlp(128, 192, 192, 64, activation=nn.GELU)

    def masked(x: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        x, seen = x.flatten(1), (torch.rand(len(x), 64, generator=random) < 1 / 3).float()
        return torch.cat([x * seen, seen], dim=1), x

    choose = rows(images, size=128)
    fixed = masked(test.repeat(3, 1, 1, 1), torch.Generator().manual_seed(0))
    return fitted(
        model, lambda x, y: F.mse_loss(model(x), y), lambda random: masked(choose(random)[0], random), seed, test=fixed
    )
