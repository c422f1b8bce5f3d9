"""Reinforcement learning on small environments: scores are exact errors and regrets, not noisy returns."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.task import Problem, fitted, generator, mlp, task

DISCOUNT = 0.95
MOVES = torch.tensor([(0, 1), (0, -1), (1, 0), (-1, 0)])


@dataclass(frozen=True)
class Maze:
    """A grid with walls and one goal. States are seen as two-hot vectors of row and column."""

    next: Tensor  # (states, 4)
    rewards: Tensor  # (states, 4)
    seen: Tensor  # (states, features)

    @classmethod
    def made(cls, seed: int, size: int = 10) -> Maze:
        random = generator(seed)
        walls = torch.rand(size, size, generator=random) < 0.2
        walls[-1, -1] = False
        places = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        to = (places[:, None] + MOVES).clamp(0, size - 1)
        to = torch.where(walls[to[..., 0], to[..., 1]][..., None], places[:, None], to)
        index = to[..., 0] * size + to[..., 1]
        goal = size * size - 1
        rewards = (index == goal).float()
        index[goal] = torch.randint(goal, (4,), generator=random)  # begins again
        return cls(index, rewards, torch.cat([F.one_hot(places[:, 0], size), F.one_hot(places[:, 1], size)], 1).float())

    def values(self, policy: Tensor | None = None) -> Tensor:
        """Return exact values of actions (states, 4), of a policy (states, 4) or of the best one."""
        q = torch.zeros_like(self.rewards)
        for _ in range(300):
            state = q.max(dim=1).values if policy is None else (policy * q).sum(dim=1)
            q = self.rewards + DISCOUNT * state[self.next]
        return q


def _follow(target: nn.Module, model: nn.Module, share: float) -> None:
    """Move a target network towards the one that is trained."""
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), model.parameters()):
            slow.lerp_(fast, share)


@task(lr=1e-3, steps=2000, decades=True)
def dqn(seed: int) -> Problem:
    """A Q-network of 2 x 64 units learns a maze from replayed moves with a target network, batches of 64."""
    maze, random = Maze.made(seed), generator(seed + 1)
    model = mlp(20, 64, 64, 4)
    target, true = deepcopy(model), maze.values()

    def loss() -> Tensor:
        _follow(target, model, 0.05)
        states, moves = (torch.randint(high, (64,), generator=random) for high in (100, 4))
        with torch.no_grad():
            best = target(maze.seen[maze.next[states, moves]]).max(dim=1).values
        wanted = maze.rewards[states, moves] + DISCOUNT * best
        return F.smooth_l1_loss(model(maze.seen[states])[torch.arange(64), moves], wanted)

    return Problem(model, loss, lambda: (F.mse_loss(model(maze.seen), true) / true.var()).item())


class ActorCritic(nn.Module):
    """A policy and a value on one body."""

    def __init__(self, features: int, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, actions), nn.Linear(64, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(1)


@task(lr=1e-3, steps=1800)
def actor_critic(seed: int) -> Problem:
    """An actor-critic of 2 x 64 units learns a maze from 64 random places a step; the score is its regret."""
    maze, random = Maze.made(seed, size=6), generator(seed + 1)
    model = ActorCritic(12, 4)
    best = maze.values().max(dim=1).values.mean()

    def loss() -> Tensor:
        state = torch.randint(36, (64,), generator=random)
        scores, value = model(maze.seen[state])
        chances = scores.softmax(dim=1)
        moves = torch.multinomial(chances.detach(), 1, generator=random).squeeze(1)
        reached = maze.next[state, moves]
        with torch.no_grad():
            wanted = maze.rewards[state, moves] + DISCOUNT * model(maze.seen[reached])[1]
        gain = (wanted - value).detach()
        log_chances = scores.log_softmax(dim=1)
        entropy = -(chances * log_chances).sum(dim=1).mean()
        chosen = log_chances[torch.arange(64), moves]
        return F.mse_loss(value, wanted) - (gain * chosen).mean() - 0.001 * entropy

    def regret() -> float:
        policy = model(maze.seen)[0].softmax(dim=1)
        return (1 - (policy * maze.values(policy)).sum(dim=1).mean() / best).item()

    return Problem(model, loss, regret)


@task(lr=1e-3, steps=800)
def sac_critic(seed: int) -> Problem:
    """Two critics of 2 x 96 units learn a policy's costs with target networks; the score is the Bellman error."""
    random = generator(seed)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=random))[0] * 0.9
    push, act = torch.randn(2, 4, generator=random) * 0.3, torch.randn(4, 2, generator=random) * 0.2
    critics = nn.ModuleList([mlp(6, 96, 96, 1) for _ in range(2)])
    targets = deepcopy(critics)

    def loss(x: Tensor, noise: Tensor) -> Tensor:
        u = x @ act + noise
        cost = x.square().sum(dim=1) + 0.1 * u.square().sum(dim=1)
        then = x @ turn + u @ push
        ahead = torch.cat([then, then @ act], dim=1)
        with torch.no_grad():
            wanted = DISCOUNT * torch.minimum(*(target(ahead).squeeze(1) for target in targets)) - cost / 4
        found = torch.stack([critic(torch.cat([x, u], dim=1)).squeeze(1) for critic in critics])
        return (found - wanted).square().mean()

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        for slow, fast in zip(targets, critics):
            _follow(slow, fast, 0.02)
        return torch.randn(128, 4, generator=random), torch.randn(128, 2, generator=random)

    held_out = generator(seed + 10_000)
    test = torch.randn(2000, 4, generator=held_out), torch.randn(2000, 2, generator=held_out)
    return fitted(critics, loss, draw, seed, test=test)


@task(lr=1e-2, steps=1500, schedule="cosine", decades=True)
def dynamics_model(seed: int) -> Problem:
    """A network of 2 x 96 units learns the next state of a driven pendulum, batches of 128."""
    model = mlp(4, 96, 96, 3, activation=nn.SiLU)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        angle, speed, torque = (torch.rand(3, 128, generator=random) * 2 - 1) * torch.tensor([[3.14], [4.0], [2.0]])
        after = speed + 0.2 * (9.8 * angle.sin() + torque)
        turned = angle + 0.2 * after
        return torch.stack([angle.cos(), angle.sin(), speed, torque], 1), torch.stack(
            [turned.cos(), turned.sin(), after], 1
        )

    return fitted(model, lambda x, y: F.mse_loss(model(x), y), draw, seed)
