"""Graphs and sets: networks that do not know an order."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.task import Problem, fitted, generator, mlp, task


def _normalised(links: Tensor) -> Tensor:
    """Return D^-1/2 (A + I) D^-1/2."""
    links = ((links + links.T) > 0).float() + torch.eye(len(links))
    scale = links.sum(dim=1).rsqrt()
    return links * scale[:, None] * scale


class GCN(nn.Module):
    """Graph convolutions (Kipf and Welling 2017)."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, links: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(links @ layer(x))
        return links @ self.layers[-1](x)


@task(lr=1e-2, steps=300)
def gcn(seed: int) -> Problem:
    """A GCN of 2 layers labels 800 nodes of 8 communities, half of them held out, full batch."""
    random = generator(seed)
    labels = torch.randint(8, (800,), generator=random)
    chance = torch.where(labels[:, None] == labels, 0.03, 0.004)
    links = _normalised(torch.rand(800, 800, generator=random) < chance)
    features = torch.randn(8, 64, generator=random)[labels] * 0.2 + torch.randn(800, 64, generator=random)
    known = torch.rand(800, generator=random) < 0.5
    model = GCN(64, 64, 8)

    def loss(chosen: Tensor) -> Tensor:
        return F.cross_entropy(model(links, F.dropout(features, 0.5, model.training))[chosen], labels[chosen])

    return fitted(model, loss, lambda _: [known], seed, test=[~known])


class GIN(nn.Module):
    """Sums over neighbours and a network, three times, then the sum over nodes (Xu et al. 2019)."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp(features, width, width), mlp(width, width, width), mlp(width, width, width)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.head = nn.Linear(width, 1)

    def forward(self, links: Tensor, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms):
            x = F.relu(norm(layer(x + links @ x)))
        return self.head(x.mean(dim=1)).squeeze(1)


@task(lr=3e-3, steps=500, schedule="cosine")
def graph_regression(seed: int) -> Problem:
    """A GIN of 3 layers counts triangles in graphs of 16 nodes, batches of 64 graphs."""
    model = GIN(4, 48)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        kind = torch.rand(64, 16, 16, generator=random) < 0.15 + 0.3 * torch.rand(64, 1, 1, generator=random)
        links = kind.triu(1).float()
        links = links + links.transpose(1, 2)
        triangles = (links @ links @ links).diagonal(dim1=1, dim2=2).sum(dim=1) / 6
        degree = links.sum(dim=2, keepdim=True)
        return (
            links / 4,
            torch.cat([torch.ones(64, 16, 1), degree / 4, torch.rand(64, 16, 2, generator=random)], 2),
            (triangles / 10),
        )

    return fitted(model, lambda links, x, y: F.mse_loss(model(links, x), y), draw, seed)


class DeepSet(nn.Module):
    """A network for each element, their mean, and a network on it (Zaheer et al. 2017)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.each, self.all = mlp(inputs, width, width, width), mlp(width, width, 1)

    def forward(self, elements: Tensor) -> Tensor:
        return self.all(self.each(elements).mean(dim=1)).squeeze(1)


@task(lr=1e-3, steps=700)
def deep_set(seed: int) -> Problem:
    """A set network of width 64 estimates the entropy of mixtures from 32 points, batches of 64 sets."""
    model = DeepSet(2, 64)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        angle, spread = torch.rand(2, 64, 1, generator=random) * 3
        points = torch.randn(64, 32, 2, generator=random)
        long, short = points[..., 0] * (spread + 0.2), points[..., 1] * 0.3
        turned = torch.stack([long * angle.cos() - short * angle.sin(), long * angle.sin() + short * angle.cos()], 2)
        return turned, (spread + 0.2).log().squeeze(1) + torch.sin(2 * angle).squeeze(1)

    return fitted(model, lambda x, y: F.mse_loss(model(x), y), draw, seed)


@task(lr=3e-3, steps=300, schedule="cosine")
def set_attention(seed: int) -> Problem:
    """Self-attention of width 48 over 16 points finds their farthest pair, batches of 32 sets."""
    layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.Linear(3, 48), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(48, 1)
    )

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        points = torch.randn(32, 16, 3, generator=random)
        return points, torch.cdist(points, points).flatten(1).max(dim=1).values

    return fitted(model, lambda x, y: F.mse_loss(model(x).mean(dim=(1, 2)), y), draw, seed)
