"""How fast this machine multiplies matrices, and how much of that a step with Newton-Schulz iterations reaches."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from baoc import BlockOptimizer
from baoc.planners import cost
from benchmarks.timing import timed

SIDE, QUICK_SIDE = 2048, 512
REPEATS = 5


def rate(quick: bool = False) -> float:
    """fp32 operations per second of the best of several products of square matrices."""
    side = QUICK_SIDE if quick else SIDE
    left, right = torch.randn(side, side), torch.randn(side, side)
    out = torch.empty(side, side)
    return 2 * side**3 / min(timed(lambda: torch.mm(left, right, out=out)) for _ in range(REPEATS))


def operations(optimizer: Optimizer) -> float:
    """Of the matrix products in one step; 0 for an optimizer without."""
    if not isinstance(optimizer, BlockOptimizer):
        return 0.0
    return float(
        sum(
            cost.operations(shape, block.configuration)
            for block in optimizer.plan.blocks
            for shape in block.parameters.values()
        )
    )
