"""Networks that solve differential equations: PINNs, an inverse problem and a DeepONet."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.task import Problem, fitted, generator, mlp, task

PI = math.pi


def derivatives(model: Callable[[Tensor], Tensor], points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return u (n,), its gradient (n, d) and its pure second derivatives (n, d)."""
    points = points.detach().requires_grad_()
    u = model(points).squeeze(1)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    second = [torch.autograd.grad(column.sum(), points, create_graph=True)[0][:, i] for i, column in enumerate(first.T)]
    return u, first, torch.stack(second, dim=1)


def _collocated(
    params: nn.Module,
    residual: Callable[[Tensor], Tensor],
    boundary: Callable[[torch.Generator], Tensor],
    error: Callable[[], Tensor],
    seed: int,
    points: int = 128,
) -> Problem:
    """Points in the unit square, drawn anew in each step; the score is the relative error of the solution."""
    random = generator(seed + 1)

    def loss() -> Tensor:
        inside = torch.rand(points, 2, generator=random)
        return residual(inside).square().mean() + 10 * boundary(random).square().mean()

    return Problem(params, loss, lambda: error().item())


def _relative(found: Tensor, true: Tensor) -> Tensor:
    return (found - true).square().mean() / true.square().mean()


def _grid() -> Tensor:
    axis = torch.linspace(0, 1, 33)
    return torch.cartesian_prod(axis, axis)


@task(lr=3e-3, steps=700, schedule="cosine", weight_decay=0.0, decades=True)
def pinn_poisson(seed: int) -> Problem:
    """A tanh network of 3 x 32 units solves a Poisson equation in the unit square by its residual."""
    model = mlp(2, 32, 32, 32, 1, activation=nn.Tanh)

    def solution(at: Tensor) -> Tensor:
        return torch.sin(PI * at[:, 0]) * torch.sin(2 * PI * at[:, 1])

    def residual(at: Tensor) -> Tensor:
        _, _, second = derivatives(model, at)
        return (second.sum(dim=1) + 5 * PI**2 * solution(at)) / 10

    def boundary(random: torch.Generator) -> Tensor:
        along = torch.rand(64, generator=random)
        edge = torch.arange(64) % 2
        sides = torch.cat([torch.stack([along, edge], dim=1), torch.stack([edge, along], dim=1)])
        return model(sides)

    grid = _grid()
    return _collocated(model, residual, boundary, lambda: _relative(model(grid).squeeze(1), solution(grid)), seed)


@task(lr=3e-3, steps=700, weight_decay=0.0, decades=True)
def pinn_burgers(seed: int) -> Problem:
    """A tanh network of 3 x 32 units solves Burgers' equation with a travelling front, constant lr."""
    model = mlp(2, 32, 32, 32, 1, activation=nn.Tanh)
    viscosity = 0.05

    def solution(at: Tensor) -> Tensor:  # a front that moves at speed 1/2
        return 0.5 - 0.5 * torch.tanh((at[:, 0] - 0.3 - 0.5 * at[:, 1]) / (4 * viscosity))

    def residual(at: Tensor) -> Tensor:
        u, first, second = derivatives(model, at)
        return first[:, 1] + u * first[:, 0] - viscosity * second[:, 0]

    def boundary(random: torch.Generator) -> Tensor:
        start, walls = torch.rand(64, 2, generator=random), torch.rand(64, 2, generator=random)
        start[:, 1] = 0
        walls[:, 0] = torch.arange(64) % 2
        at = torch.cat([start, walls])
        return model(at).squeeze(1) - solution(at)

    grid = _grid()
    return _collocated(model, residual, boundary, lambda: _relative(model(grid).squeeze(1), solution(grid)), seed)


@task(lr=1e-2, steps=700, weight_decay=0.0, decades=True)
def pinn_heat_inverse(seed: int) -> Problem:
    """A tanh network of 3 x 32 units fits the heat equation to 200 measurements and finds the diffusivity."""
    model = mlp(2, 32, 32, 32, 1, activation=nn.Tanh)
    model.register_parameter("diffusivity", nn.Parameter(torch.tensor(0.5)))
    true = 0.1

    def solution(at: Tensor) -> Tensor:
        return torch.exp(-true * PI**2 * at[:, 1]) * torch.sin(PI * at[:, 0])

    measured = torch.rand(200, 2, generator=generator(seed))

    def residual(at: Tensor) -> Tensor:
        _, first, second = derivatives(model, at)
        return first[:, 1] - model.diffusivity * second[:, 0]

    def boundary(random: torch.Generator) -> Tensor:
        return model(measured).squeeze(1) - solution(measured)

    grid = _grid()
    return _collocated(model, residual, boundary, lambda: _relative(model(grid).squeeze(1), solution(grid)), seed)


class DeepONet(nn.Module):
    """A branch for a function's values, a trunk for a place, and their inner product (Lu et al. 2021)."""

    def __init__(self, sensors: int, width: int) -> None:
        super().__init__()
        self.branch = mlp(sensors, width, width, width)
        self.trunk = mlp(1, width, width, width, activation=nn.Tanh)

    def forward(self, values: Tensor, at: Tensor) -> Tensor:
        return self.branch(values) @ self.trunk(at).T / 8


@task(lr=3e-3, steps=1200, schedule="one-cycle", weight_decay=0.0, decades=True)
def deeponet(seed: int) -> Problem:
    """A DeepONet of width 96 learns to integrate random functions, batches of 128 functions."""
    model = DeepONet(32, 96)
    at = torch.linspace(0, 1, 32)[:, None]
    order = torch.arange(1, 5)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        weight = torch.randn(128, 4, generator=random) / order
        return weight @ torch.cos(PI * order[:, None] * at.T), weight @ (
            torch.sin(PI * order[:, None] * at.T) / (PI * order[:, None])
        )

    return fitted(model, lambda f, integral: F.mse_loss(model(f, at), integral), draw, seed)
