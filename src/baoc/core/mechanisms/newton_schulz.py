"""Singular values made one by matrix products alone: Newton-Schulz iterations with tuned coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

POLAR_EXPRESS: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""One polynomial for each iteration, each the best for what the last one leaves (https://arxiv.org/abs/2505.16932)."""

MUON: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""Of ``torch.optim.Muon``: singular values end between 0.7 and 1.2."""

_SMALLEST_NORM = torch.finfo(torch.float32).tiny


def orthogonalised(
    stacked: Tensor, coefficients: Sequence[tuple[float, float, float]], scratch: Tensor | None = None
) -> Tensor:
    """Matrices of shape ``(batch, rows, cols)`` with their singular values brought near one.

    Holds one copy of the batch and two Gram matrices of each, in ``scratch`` if it is given, besides the input, which
    is overwritten. The result is in one of the two.

    >>> x = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(0))
    >>> bool(((orthogonalised(x, POLAR_EXPRESS) @ x.mT).diagonal(dim1=1, dim2=2) > 0).all())
    True
    """
    batch, side, length = stacked.shape[0], min(stacked.shape[-2:]), max(stacked.shape[-2:])
    is_tall = stacked.shape[-2] > stacked.shape[-1]
    shapes = (batch, side, length), (batch, side, side), (batch, side, side)
    sizes = [aligned(math.prod(shape)) for shape in shapes]
    scratch = stacked.new_empty(sum(sizes)) if scratch is None else scratch[: sum(sizes)]
    parts = zip(scratch.split_with_sizes(sizes), shapes)
    copy, gram, polynomial = (part[: math.prod(shape)].view(shape) for part, shape in parts)
    x, other = (copy.copy_(stacked.mT), stacked.view(copy.shape)) if is_tall else (stacked, copy)
    for order in (torch.inf, 2):  # first the largest element: squares of tiny gradients would vanish
        x.div_(torch.linalg.vector_norm(x, order, dim=(-2, -1), keepdim=True).clamp_(min=_SMALLEST_NORM))
    for a, b, c in coefficients:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    return other.view(stacked.shape).copy_(x.mT) if is_tall else x


def aligned(numel: int) -> int:
    """Rounded up to whole lines of a cache: what matrix products make of a matrix depends on where it begins."""
    return -(-numel // 16) * 16


def workspace(rows: int, cols: int) -> int:
    """Elements that one matrix needs while it is made orthogonal, itself included."""
    return rows * cols + aligned(rows * cols) + 2 * aligned(min(rows, cols) ** 2)


def operations(rows: int, cols: int, iterations: int) -> int:
    """Multiplications and additions that make one matrix orthogonal: two products with it, one of Gram matrices.

    >>> operations(768, 768, 5)
    13589544960
    """
    side = min(rows, cols)
    return iterations * (4 * side * rows * cols + 2 * side**3)
