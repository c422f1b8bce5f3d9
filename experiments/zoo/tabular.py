"""Tables of numbers, tiny and wide networks, and a Gaussian process."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.task import Problem, fitted, generator, mlp, objective, task


def friedman(x: Tensor) -> Tensor:
    """Return Friedman's function of the first five columns, in [0, 1]."""
    return 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]


@task(lr=3e-3, steps=1100, schedule="one-cycle")
def tabular_regression(seed: int) -> Problem:
    """A network of 3 x 96 units learns Friedman's function with noise, one-cycle, batches of 256."""
    model = mlp(10, 96, 96, 96, 1)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.rand(256, 10, generator=random)
        return x * 2 - 1, (friedman(x) - 14) / 5 + 0.2 * torch.randn(256, generator=random)

    return fitted(model, lambda x, y: F.mse_loss(model(x).squeeze(1), y), draw, seed)


class Table(nn.Module):
    """Embeddings of categories beside numbers, dropout and batch norm."""

    def __init__(self, categories: int, columns: int, numbers: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(categories, 8) for _ in range(columns)])
        width = 8 * columns + numbers
        self.net = nn.Sequential(
            *(nn.Linear(width, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(96, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 3)),
        )

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        found = [table(column) for table, column in zip(self.tables, categories.T)]
        return self.net(torch.cat([numbers, *found], dim=1))


@task(lr=3e-3, steps=600, schedule="cosine")
def tabular_categories(seed: int) -> Problem:
    """A network on 5 categories of 50 values and 8 numbers tells three classes, batches of 256."""
    random = generator(seed)
    effects, weights = torch.randn(5, 50, 3, generator=random), torch.randn(8, 3, generator=random)
    model, column = Table(50, 5, 8), torch.arange(5)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        numbers, categories = torch.randn(256, 8, generator=random), torch.randint(50, (256, 5), generator=random)
        scores = effects[column, categories].sum(dim=1) + torch.sin(2 * numbers) @ weights
        return numbers, categories, torch.multinomial(scores.softmax(dim=1), 1, generator=random).squeeze(1)

    return fitted(model, lambda x, c, y: F.cross_entropy(model(x, c), y), draw, seed)


@task(lr=1e-2, steps=1500)
def logistic_regression(seed: int) -> Problem:
    """A linear layer tells 10 classes of 200 correlated columns, batches of 128."""
    random = generator(seed)
    mix, true = torch.randn(200, 200, generator=random) / 14, torch.randn(200, 10, generator=random) / 4
    model = nn.Linear(200, 10)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(128, 200, generator=random) @ mix
        return x, torch.multinomial((x @ true).softmax(dim=1), 1, generator=random).squeeze(1)

    return fitted(model, lambda x, y: F.cross_entropy(model(x), y), draw, seed)


@task(lr=9e-2, steps=2000, weight_decay=0.0, decades=True)
def xor(seed: int) -> Problem:
    """A tanh network of 16 units learns the parity of 4 bits, full batch."""
    bits = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 4)
    parity = (bits.prod(dim=1) > 0).float()
    model = mlp(4, 16, 1, activation=nn.Tanh)
    return objective(model, lambda: F.binary_cross_entropy_with_logits(model(bits).squeeze(1), parity))


@task(lr=3e-3, steps=2000, weight_decay=0.0, decades=True)
def tiny_regression(seed: int) -> Problem:
    """A network of 2 x 16 tanh units fits a curve of 64 points, full batch."""
    x = torch.linspace(-1, 1, 64)[:, None]
    y = torch.sin(4 * x) + 0.5 * torch.cos(9 * x)
    model = mlp(1, 16, 16, 1, activation=nn.Tanh)
    return objective(model, lambda: F.mse_loss(model(x), y))


@task(lr=9e-4, steps=320)
def wide_net(seed: int) -> Problem:
    """A network of one layer of 4,096 units learns a random network's labels, batches of 128."""
    random = generator(seed)
    teacher = torch.randn(64, 32, generator=random) / 8, torch.randn(32, 10, generator=random)
    model = mlp(64, 4096, 10)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(128, 64, generator=random)
        return x, (torch.relu(x @ teacher[0]) @ teacher[1]).argmax(dim=1)

    return fitted(model, lambda x, y: F.cross_entropy(model(x), y), draw, seed)


@task(lr=1e-3, steps=450, schedule="cosine")
def deep_narrow_net(seed: int) -> Problem:
    """A residual network of 8 layers of width 48 with layer norms learns random polynomials, batches of 128."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(48), nn.Linear(48, 48)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(self.linear(self.norm(x)))

    random = generator(seed)
    pairs = torch.randint(16, (2, 24), generator=random)
    weights = torch.randn(24, 4, generator=random) / 5
    model = nn.Sequential(nn.Linear(16, 48), *(Block() for _ in range(8)), nn.LayerNorm(48), nn.Linear(48, 4))

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(128, 16, generator=random)
        return x, (x[:, pairs[0]] * x[:, pairs[1]]) @ weights

    return fitted(model, lambda x, y: F.mse_loss(model(x), y), draw, seed)


@task(lr=3e-2, steps=600, weight_decay=0.0)
def gaussian_process(seed: int) -> Problem:
    """Length scales of 6 inputs, amplitude and noise of a GP by marginal likelihood of 128 points, full batch."""
    random = generator(seed)
    x = torch.rand(128, 6, generator=random)
    y = friedman(x) / 5 + 0.3 * torch.randn(128, generator=random)
    y = (y - y.mean()) / y.std()
    scales, amplitude, noise = (
        nn.Parameter(torch.zeros(6)),
        nn.Parameter(torch.zeros(())),
        nn.Parameter(torch.zeros(())),
    )

    def loss() -> Tensor:
        at = x * scales.exp()
        squares = (at[:, None] - at).square().sum(dim=2)
        covariance = amplitude.exp() * torch.exp(-0.5 * squares) + (noise.exp() + 1e-4) * torch.eye(128)
        root = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(root, y[:, None], upper=False)
        return 0.5 * white.square().mean() + root.diagonal().log().mean() + 0.5 * math.log(2 * math.pi)

    return objective([scales, amplitude, noise], loss)
