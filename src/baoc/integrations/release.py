"""Gradient release: each parameter is updated as soon as its gradient is there, which is then given back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from baoc.configurator import BAOC
from baoc.optim.optimizer import BlockOptimizer


def release_gradients(optimizer: BlockOptimizer) -> list[Any]:
    """Step within ``backward()``: gradients of all parameters are never there at once. Handles that end it, as hooks'.

    One optimizer, with one plan, serves all parameters; ``loss.backward()`` is the whole step. So gradients cannot be
    clipped by their common norm or accumulated, and ``on_nonfinite`` is asked for each parameter by itself. Where a
    gradient is shared by several uses of a parameter, it is complete when the hook runs.

    A :class:`~baoc.BAOC` needs all gradients of a step to plan. Take its plan instead, which a budget is enough for::

        plan = baoc.BAOC(model, memory=0.25).plan
        optimizer = baoc.BlockOptimizer(model, lr=3e-4, plan=plan)

    >>> import torch
    >>> model = torch.nn.Linear(8, 8)
    >>> handles = release_gradients(BlockOptimizer(model, lr=1e-2))
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> model.weight.grad is None
    True
    """
    if isinstance(optimizer, BAOC):
        raise TypeError(
            "BAOC plans from all gradients of a step, which gradient release never has at once. Use its plan: "
            "baoc.BlockOptimizer(model, plan=baoc.BAOC(model, memory=...).plan, ...)."
        )

    def step(param: Tensor) -> None:
        optimizer.step()  # of the only parameter that has a gradient now
        param.grad = None

    optimizer.zero_grad(set_to_none=True)
    return [
        member.param.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        for member in optimizer.members()
    ]
