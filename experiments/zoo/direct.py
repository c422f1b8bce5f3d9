"""Direct optimisation: images, tensors, positions and controls are the parameters themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.fields import image
from experiments.zoo.task import Problem, fitted, generator, objective, task


def _picture(size: int, seed: int) -> Tensor:
    """Return an image as convolutions take it: (1, 3, size, size)."""
    return image(size, seed)[1].T.reshape(1, 3, size, size)


@task(lr=3e-2, steps=300, weight_decay=0.0, decades=True)
def image_deblurring(seed: int) -> Problem:
    """The pixels of a 128 x 128 image are found from 8 masked, blurred and subsampled ones, full batch."""
    true = _picture(128, seed)
    masks = torch.rand(8, 1, 128, 128, generator=generator(seed)) < 0.5
    pixels = nn.Parameter(torch.full_like(true, 0.5))

    def measure(x: Tensor) -> Tensor:
        return F.avg_pool2d(x * masks, 3, stride=2)

    measured = measure(true)
    return objective([pixels], lambda: F.mse_loss(measure(pixels), measured))


@task(lr=1e-2, steps=1500, schedule="cosine", weight_decay=0.0)
def image_total_variation(seed: int) -> Problem:
    """The pixels of a 64 x 64 image are found from a noisy third under a total-variation penalty, full batch."""
    true, random = _picture(64, seed), generator(seed)
    noisy = true + 0.1 * torch.randn(true.shape, generator=random)
    seen = (torch.rand(1, 1, 64, 64, generator=random) < 1 / 3).float()
    pixels = nn.Parameter(torch.full_like(true, 0.5))

    def loss() -> Tensor:
        across, down = pixels.diff(dim=3)[:, :, :-1], pixels.diff(dim=2)[..., :-1]
        return ((pixels - noisy) * seen).square().mean() + 0.03 * (across.square() + down.square() + 1e-6).sqrt().mean()

    return objective([pixels], loss)


@task(lr=3e-3, steps=150, weight_decay=0.0, decades=True)
def deep_image_prior(seed: int) -> Problem:
    """A convolutional network of 4 layers maps fixed noise to an image of 48 x 48 pixels, full batch."""
    true = _picture(48, seed)
    noise = torch.rand(1, 16, 48, 48, generator=generator(seed)) * 0.1
    layers: list[nn.Module] = []
    for fan_in in (16, 32, 32):
        layers += [nn.Conv2d(fan_in, 32, 3, padding=1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2)]
    model = nn.Sequential(*layers, nn.Conv2d(32, 3, 3, padding=1))

    def loss() -> Tensor:
        model.train()  # its norms are those of the one image, also in the score
        return F.mse_loss(model(noise), true)

    return objective(model, loss)


@task(lr=1e-1, steps=800, schedule="cosine", weight_decay=0.0, decades=True)
def low_rank_tensor(seed: int) -> Problem:
    """A tensor of 512 x 384 x 320 and rank 8 is factored (CP, rank 16), batches of 8,192 entries."""
    random = generator(seed)
    shape = (512, 384, 320)
    true = [torch.randn(size, 8, generator=random) for size in shape]
    factors = [nn.Parameter(torch.randn(size, 16, generator=random) * 0.5) for size in shape]

    def entries(parts: Sequence[Tensor], at: Sequence[Tensor]) -> Tensor:
        chosen = [part[index] for part, index in zip(parts, at)]
        return (chosen[0] * chosen[1] * chosen[2]).sum(dim=1)

    def draw(random: torch.Generator) -> list[Tensor]:
        return [torch.randint(size, (8192,), generator=random) for size in shape]

    return fitted(factors, lambda *at: F.mse_loss(entries(factors, at), entries(true, at)), draw, seed)


@task(lr=1e-2, steps=600, weight_decay=0.0, decades=True)
def low_rank_matrix(seed: int) -> Problem:
    """A matrix of 512 x 384 and rank 16 is factored from two fifths of its entries, full batch."""
    random = generator(seed)
    left, right = torch.randn(512, 16, generator=random), torch.randn(384, 16, generator=random)
    true = left @ right.T / 4
    seen = (torch.rand(512, 384, generator=random) < 0.4).float()
    factors = [nn.Parameter(torch.randn(size, 16, generator=random) * 0.3) for size in (512, 384)]

    def loss() -> Tensor:
        return ((factors[0] @ factors[1].T - true) * seen).square().sum() / seen.sum()

    return objective(factors, loss)


@task(lr=1e-1, steps=800, schedule="cosine", weight_decay=0.0, decades=True)
def point_positions(seed: int) -> Problem:
    """Positions of 300 points in the plane are found from their distances, full batch."""
    random = generator(seed)
    true = torch.randn(300, 2, generator=random)
    distances = torch.cdist(true, true)
    places = nn.Parameter(true + 0.7 * torch.randn(300, 2, generator=random))

    def loss() -> Tensor:
        offset = places[:, None] - places
        return (((offset**2).sum(-1) + 1e-9).sqrt() - distances).square().mean()

    return objective([places], loss)


@task(lr=1e-1, steps=600, schedule="cosine", weight_decay=0.0, decades=True)
def trajectory(seed: int) -> Problem:
    """Forces of 64 carts over 25 time steps bring each to rest at its goal, full batch."""
    random = generator(seed)
    goal, start = torch.randn(64, 2, generator=random), torch.randn(64, 2, generator=random)
    forces = nn.Parameter(torch.zeros(25, 64, 2))

    def loss() -> Tensor:
        place, speed = start, torch.zeros(64, 2)
        for force in forces:
            speed = 0.95 * speed + 0.2 * torch.tanh(force)
            place = place + 0.2 * speed
        return (place - goal).square().mean() + speed.square().mean() + 1e-5 * forces.square().mean()

    return objective([forces], loss)


@task(lr=1e-2, steps=500, weight_decay=0.0, decades=True)
def dictionary(seed: int) -> Problem:
    """A dictionary of 96 atoms and the linear codes of 32-dimensional signals, batches of 256."""
    random = generator(seed)
    atoms = torch.randn(24, 32, generator=random)
    encoder, decoder = (nn.Parameter(torch.randn(*size, generator=random) * 0.1) for size in ((32, 96), (96, 32)))

    def draw(random: torch.Generator) -> list[Tensor]:
        codes = torch.randn(256, 24, generator=random) * (torch.rand(256, 24, generator=random) < 0.2)
        return [codes @ atoms / 2]

    return fitted([encoder, decoder], lambda x: F.mse_loss(x @ encoder @ decoder, x), draw, seed)
