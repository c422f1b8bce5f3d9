"""A small model whose training is the same every time, and what it takes to say that two runs are the same."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from baoc import Block, BlockOptimizer, Configuration, Plan, parse

REPRESENTATIVE = ("adamw-32", "adamw-16", "adamw-8", "adamw[m=int8,v=factored]", "adafactor", "sgdm-8", "sgd")
"""Every mechanism's family, every codec, and no state at all."""


class Net(nn.Module):
    """Two matrices large enough for every codec, with a vector and a scalar that are too small for any."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(64, 72)
        self.second = nn.Linear(72, 64, bias=False)
        self.gain = nn.Parameter(torch.ones(()))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.gain


def backward(model: nn.Module, step: int) -> Tensor:
    """The gradients of a step, which depend on its number and the parameters only."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
    model.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()


def trained(
    plan: Plan | Configuration | str | None = None, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[Net, BlockOptimizer]:
    """A model and its optimizer after three steps."""
    model = Net(dtype)
    optimizer = BlockOptimizer(model, plan=plan, **settings)
    train(model, optimizer, range(3))
    return model, optimizer


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def mixed_plan(model: nn.Module, *, lr_scale: float | None = None) -> Plan:
    """Three blocks, one of them stateless."""
    configurations = {"first": "adamw-8", "second": "sgd", "gain": "sgdm-32"}
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes(model).items():
        blocks.setdefault(name.split(".")[0], {})[name] = shape
    return Plan(tuple(Block(name, parse(configurations[name]), found, lr_scale) for name, found in blocks.items()))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((dict(model.named_parameters()), optimizer.state_dict()))


def assert_same(left: Any, right: Any, place: str = "") -> None:
    """Equal in structure, dtype and every bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        assert left.dtype == right.dtype, f"{place}: {left.dtype} and {right.dtype}"
        assert torch.equal(left, right), f"{place}: tensors differ by up to {(left - right).abs().max()}"
    elif isinstance(left, dict) and isinstance(right, dict):
        assert set(left) == set(right), f"{place}: keys {list(left)} and {list(right)}"
        for key in left:
            assert_same(left[key], right[key], f"{place}.{key}")
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        assert len(left) == len(right), f"{place}: {len(left)} and {len(right)} entries"
        for index, (one, other) in enumerate(zip(left, right)):
            assert_same(one, other, f"{place}[{index}]")
    else:
        assert left == right, f"{place}: {left!r} and {right!r}"


def assert_same_training(model: nn.Module, optimizer: Any, twin: nn.Module, twin_optimizer: Any) -> None:
    """From here on both make the same updates, to the bit."""
    train(model, optimizer, range(10, 13))
    train(twin, twin_optimizer, range(10, 13))
    assert_same(dict(model.named_parameters()), dict(twin.named_parameters()), "parameters")
    assert_same(optimizer.state_dict()["state"], twin_optimizer.state_dict()["state"], "state")


def ages(optimizer: BlockOptimizer) -> list[int]:
    """The age of every slot, parameter by parameter."""
    return [int(v) for state in optimizer.state.values() for key, v in state.items() if key.endswith(".age")]
