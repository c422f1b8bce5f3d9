"""Image classifiers and a segmentation network, on scikit-learn's digits and on drawn shapes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.task import Problem, fitted, mlp, rows, task


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,400 training images (n, 1, 8, 8) and labels, then the 397 that are held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    images = (torch.tensor(data.images, dtype=torch.float32) / 8 - 1)[order, None]
    labels = torch.tensor(data.target)[order]
    return images[:1400], labels[:1400], images[1400:], labels[1400:]


def _classifier(model: nn.Module, seed: int, size: int, noise: float = 0.5, shift: int = 1) -> Problem:
    """Classify digits under noise and shifts, new ones in each step, so that no run ends by heart."""
    images, labels, test_images, test_labels = digits()

    def spoiled(x: Tensor, random: torch.Generator) -> Tensor:
        moved = torch.roll(x, tuple(torch.randint(-shift, shift + 1, (2,), generator=random).tolist()), dims=(2, 3))
        return moved + noise * torch.randn(x.shape, generator=random)

    choose = rows(images, labels, size=size)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = choose(random)
        return spoiled(x, random), y

    fixed = torch.Generator().manual_seed(0)
    test = torch.cat([spoiled(test_images, fixed) for _ in range(3)]), test_labels.repeat(3)
    return fitted(model, lambda x, y: F.cross_entropy(model(x), y), draw, seed, test=test)


@task(lr=3e-3, steps=350)
def plain_cnn(seed: int) -> Problem:
    """A CNN of 3 convolutions without norms classifies noisy digits, batches of 64."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 10)),
    )
    return _classifier(model, seed, 64)


class Residual(nn.Module):
    """Two convolutions with batch norms beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


@task(lr=3e-3, steps=130, schedule="one-cycle")
def resnet(seed: int) -> Problem:
    """A residual network of 7 convolutions with batch norm classifies noisy digits, one-cycle, batches of 64."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), Residual(24), nn.AvgPool2d(2)),
        *(Residual(24), Residual(24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
    )
    return _classifier(model, seed, 64)


def _separable(fan_in: int, fan_out: int) -> list[nn.Module]:
    depthwise = nn.Conv2d(fan_in, fan_in, 3, padding=1, groups=fan_in, bias=False)
    pointwise = nn.Conv2d(fan_in, fan_out, 1, bias=False)
    return [depthwise, nn.BatchNorm2d(fan_in), nn.ReLU6(), pointwise, nn.BatchNorm2d(fan_out), nn.ReLU6()]


@task(lr=1e-2, steps=180, schedule="cosine")
def mobilenet(seed: int) -> Problem:
    """A MobileNet of 4 depthwise-separable blocks classifies noisy digits, batches of 64."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU6()),
        *(*_separable(24, 48), *_separable(48, 48), nn.AvgPool2d(2), *_separable(48, 96), *_separable(96, 96)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)),
    )
    return _classifier(model, seed, 64)


class ViT(nn.Module):
    """Patches of 2 x 2 pixels, places and a class token."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], dim=1) + self.places
        return self.head(self.layers(tokens)[:, 0])


@task(lr=3e-3, steps=240, schedule="cosine")
def vit(seed: int) -> Problem:
    """A ViT of 2 layers of width 64 classifies digits with a little noise, batches of 64."""
    return _classifier(ViT(64, 2), seed, 64, noise=0.2, shift=0)


@task(lr=3e-3, steps=400)
def mlp_full_batch(seed: int) -> Problem:
    """A network of 2 x 128 units classifies noisy digits, all 1,400 in each step."""
    return _classifier(nn.Sequential(nn.Flatten(), mlp(64, 128, 128, 10)), seed, 1400)


@task(lr=1e-3, steps=1400)
def mlp_small_batch(seed: int) -> Problem:
    """A network of 2 x 128 units classifies noisy digits, batches of 4."""
    return _classifier(nn.Sequential(nn.Flatten(), mlp(64, 128, 128, 10)), seed, 4)


@task(lr=3e-3, steps=210, schedule="cosine")
def mixer(seed: int) -> Problem:
    """An MLP-Mixer of 2 layers of width 48 classifies digits with a little noise, batches of 64."""

    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.across, self.within = mlp(16, 32, 16, activation=nn.GELU), mlp(48, 96, 48, activation=nn.GELU)
            self.norms = nn.ModuleList([nn.LayerNorm(48), nn.LayerNorm(48)])

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            return x + self.within(self.norms[1](x))

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.layers = nn.Conv2d(1, 48, 2, stride=2), nn.Sequential(Mixing(), Mixing())
            self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.layers(self.patches(x).flatten(2).transpose(1, 2))).mean(dim=1))

    return _classifier(Mixer(), seed, 64, noise=0.2, shift=0)


class UNet(nn.Module):
    """Down, up, and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up, self.leave = nn.ConvTranspose2d(2 * width, width, 2, 2), nn.Conv2d(2 * width, 1, 3, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.enter(x))
        low = F.relu(self.norm(self.middle(F.relu(self.down(high)))))
        return self.leave(torch.cat([high, F.relu(self.up(low))], dim=1))


@task(lr=3e-3, steps=300, schedule="cosine")
def segmentation(seed: int) -> Problem:
    """A UNet of 5 convolutions finds discs in noise, images of 16 x 16, batches of 16."""
    model = UNet(16)
    axis = torch.arange(16.0)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y, size = torch.rand(3, 16, 2, 1, 1, generator=random) * 16
        inside = ((axis - x) ** 2 + (axis[:, None] - y) ** 2 < (size / 4 + 1) ** 2).any(dim=1, keepdim=True).float()
        return inside + 0.7 * torch.randn(inside.shape, generator=random), inside

    return fitted(model, lambda x, y: F.binary_cross_entropy_with_logits(model(x), y), draw, seed)
