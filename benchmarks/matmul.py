"""How fast this machine multiplies matrices, and how much of that a step with Newton-Schulz iterations reaches."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from baoc import BlockOptimizer
from baoc.core.mechanisms import Spectral
from baoc.core.mechanisms.muon import NEWTON_SCHULZ
from baoc.core.roles import as_matrices
from baoc.core.spec import Shape
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
    iterations = len(NEWTON_SCHULZ.default)
    return sum(
        iterations * _operations(shape)
        for block in optimizer.plan.blocks
        if isinstance(block.configuration.mechanism, Spectral)
        for shape in block.parameters.values()
    )


def _operations(shape: Shape) -> float:
    """Of one iteration: a Gram matrix, its square, and the product of that with the matrix.

    >>> _operations((768, 3072)) / 1e9
    8.153726976
    """
    matrices, rows, cols = as_matrices(shape)
    side, length = min(rows, cols), max(rows, cols)
    return matrices * (4.0 * side**2 * length + 2.0 * side**3)
