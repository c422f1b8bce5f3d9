"""Implicit fields: networks and splats whose inputs are coordinates, and whose errors go far down."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.task import Problem, fitted, generator, mlp, objective, rows, task


def image(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return coordinates in [-1, 1] (pixels, 2) and colours (pixels, 3): waves with soft discs on them."""
    random = generator(seed)
    axis = torch.linspace(-1, 1, size)
    points = torch.cartesian_prod(axis, axis)
    waves = torch.randn(2, 12, generator=random) * 4
    colours = torch.sin(points @ waves + torch.rand(12, generator=random) * 6) @ torch.randn(12, 3, generator=random)
    colours = 0.5 + 0.08 * colours
    for _ in range(5):
        centre, radius = torch.rand(2, generator=random) * 1.6 - 0.8, 0.1 + 0.2 * torch.rand(1, generator=random)
        inside = torch.sigmoid(40 * (radius - (points - centre).norm(dim=1, keepdim=True)))
        colours = colours * (1 - inside) + torch.rand(3, generator=random) * inside
    return points, colours


class Sine(nn.Module):
    """A layer of a SIREN (Sitzmann et al. 2020): sin(30 (Wx + b)), with its initialisation."""

    def __init__(self, fan_in: int, fan_out: int, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(fan_in, fan_out)
        bound = 1 / fan_in if first else math.sqrt(6 / fan_in) / 30
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(x))


def _siren(inputs: int, width: int, outputs: int) -> nn.Sequential:
    head = nn.Linear(width, outputs)
    nn.init.uniform_(head.weight, -math.sqrt(6 / width) / 30, math.sqrt(6 / width) / 30)
    return nn.Sequential(Sine(inputs, width, first=True), Sine(width, width), Sine(width, width), head)


@task(lr=1e-3, steps=350, weight_decay=0.0, decades=True)
def siren_image(seed: int) -> Problem:
    """A SIREN of 3 x 96 units fits an image of 40 x 40 pixels, full batch."""
    points, colours = image(40, seed)
    model = _siren(2, 96, 3)
    return objective(model, lambda: F.mse_loss(model(points), colours))


@task(lr=1e-3, steps=1200, schedule="cosine", weight_decay=0.0, decades=True)
def siren_audio(seed: int) -> Problem:
    """A SIREN of 3 x 64 units fits a second of sound, batches of 512 of 4,000 samples."""
    time = torch.linspace(-1, 1, 4000)[:, None]
    random = generator(seed)
    pitch, phase = 20 + 80 * torch.rand(8, generator=random), 6 * torch.rand(8, generator=random)
    sound = (torch.sin(time * pitch + phase) * torch.rand(8, generator=random)).mean(dim=1, keepdim=True)
    model = _siren(1, 64, 1)
    model[0].linear.weight.data *= 4  # higher frequencies, as for sound
    return fitted(
        model,
        lambda x, y: F.mse_loss(model(x), y),
        rows(time, sound, size=512),
        seed,
        test=(time, sound),
    )


@task(lr=3e-3, steps=500, weight_decay=0.0, decades=True)
def fourier_features(seed: int) -> Problem:
    """A ReLU network of 3 x 96 units on 128 random Fourier features fits an image, batches of 1,024 pixels."""
    points, colours = image(40, seed)
    angles = points @ (torch.randn(2, 64, generator=generator(seed)) * 6)
    features = torch.cat([angles.sin(), angles.cos()], dim=1)
    model = mlp(128, 96, 96, 96, 3)
    return fitted(
        model,
        lambda x, y: F.mse_loss(model(x), y),
        rows(features, colours, size=1024),
        seed,
        test=(features, colours),
    )


class HashGrid(nn.Module):
    """Multi-resolution hash encoding (Mueller et al. 2022) in two dimensions, with a small network on it."""

    def __init__(self, levels: int = 6, entries: int = 1024, features: int = 2) -> None:
        super().__init__()
        self.tables = nn.Parameter(torch.empty(levels, entries, features).uniform_(-1e-4, 1e-4))
        self.sizes = [int(4 * 1.6**level) for level in range(levels)]
        self.net = mlp(levels * features, 32, 32, 3)

    def forward(self, points: Tensor) -> Tensor:
        found = [self._level(table, size, (points + 1) / 2 * size) for table, size in zip(self.tables, self.sizes)]
        return self.net(torch.cat(found, dim=1))

    def _level(self, table: Tensor, size: int, at: Tensor) -> Tensor:
        low = at.floor().clamp(max=size - 1)
        part, low = at - low, low.long()
        corners = torch.zeros(len(at), table.shape[1])
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            x, y = low[:, 0] + i, low[:, 1] + j
            index = (x * (size + 1) + y) if (size + 1) ** 2 <= len(table) else (x ^ (y * 2654435761)) % len(table)
            weight = (part[:, 0] if i else 1 - part[:, 0]) * (part[:, 1] if j else 1 - part[:, 1])
            corners = corners + weight[:, None] * F.embedding(index, table)
        return corners


@task(lr=1e-2, steps=400, weight_decay=0.0, decades=True)
def hash_grid(seed: int) -> Problem:
    """A hash grid of 6 levels x 1,024 entries with a small network fits an image, batches of 1,024 pixels."""
    points, colours = image(64, seed)
    model = HashGrid()
    return fitted(
        model,
        lambda x, y: F.mse_loss(model(x), y),
        rows(points, colours, size=1024),
        seed,
        test=(points, colours),
    )


@task(lr=3e-2, steps=350, weight_decay=0.0, decades=True)
def splats(seed: int) -> Problem:
    """128 Gaussian splats (places, sizes, angles, colours) fit an image of 32 x 32 pixels, full batch."""
    points, colours = image(32, seed)
    random = generator(seed)
    places = nn.Parameter(torch.rand(128, 2, generator=random) * 2 - 1)
    sizes = nn.Parameter(torch.full((128, 2), math.log(8.0)))
    angles = nn.Parameter(torch.zeros(128))
    tints = nn.Parameter(torch.zeros(128, 4))

    def loss() -> Tensor:
        offset = points[:, None] - places
        cos, sin = angles.cos(), angles.sin()
        x, y = offset[..., 0] * cos + offset[..., 1] * sin, offset[..., 1] * cos - offset[..., 0] * sin
        scale = sizes.exp()
        weight = torch.exp(-0.5 * ((x * scale[:, 0]) ** 2 + (y * scale[:, 1]) ** 2)) * torch.sigmoid(tints[:, 3])
        return F.mse_loss(weight @ tints[:, :3], colours)

    return objective([places, sizes, angles, tints], loss)


@task(lr=1e-2, steps=800, schedule="cosine", weight_decay=0.0, decades=True)
def signed_distance(seed: int) -> Problem:
    """A GELU network of 3 x 64 units learns the signed distance to a torus, batches of 1,024 points."""
    model = mlp(3, 64, 64, 64, 1, activation=nn.GELU)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        points = torch.rand(1024, 3, generator=random) * 2 - 1
        ring = points[:, :2].norm(dim=1) - 0.6
        return points, torch.stack([ring, points[:, 2]]).norm(dim=0)[:, None] - 0.25

    return fitted(model, lambda x, y: F.mse_loss(model(x), y), draw, seed)
