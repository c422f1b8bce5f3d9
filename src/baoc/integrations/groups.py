"""Param groups as frameworks make them, without losing the names and the module that plans are made from."""

from __future__ import annotations

from typing import TypeVar

from baoc.optim.checkpoint import CARRIED
from baoc.optim.optimizer import BlockOptimizer

Optimizer = TypeVar("Optimizer", bound=BlockOptimizer)


def spare_vectors(optimizer: Optimizer) -> Optimizer:
    """Spare norms and biases weight decay, as most training scripts do, in an optimizer that was given a module.

    Vectors and scalars of every group move to a group of their own without decay; names, plan and state stay.

    >>> import torch
    >>> optimizer = spare_vectors(BlockOptimizer(torch.nn.Linear(4, 4), weight_decay=0.1))
    >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
    [(['weight'], 0.1), (['bias'], 0.0)]
    """
    for group in list(optimizer.param_groups):
        named = list(zip(group["param_names"], group["params"]))
        spared = [(name, param) for name, param in named if param.dim() < 2]
        kept = [(name, param) for name, param in named if param.dim() >= 2]
        if not group["weight_decay"] or not spared:
            continue
        if not kept:
            group["weight_decay"] = 0.0
            continue
        group["param_names"], group["params"] = ([name for name, _ in kept], [param for _, param in kept])
        others = {key: value for key, value in group.items() if key not in CARRIED}
        names, params = [name for name, _ in spared], [param for _, param in spared]
        optimizer.param_groups.append({**others, "params": params, "param_names": names, "weight_decay": 0.0})
    return optimizer
