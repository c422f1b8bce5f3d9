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


def products_dtype(device: torch.device) -> torch.dtype:
    """Of matrix products: bf16 where hardware multiplies it several times as fast. Singular values end near one anyway.

    >>> products_dtype(torch.device("cpu")), products_dtype(torch.device("cuda"))
    (torch.float32, torch.bfloat16)
    """
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalised(
    stacked: Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    scratch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Matrices of shape ``(batch, rows, cols)`` with their singular values brought near one.

    Holds one copy of the batch and two Gram matrices of each, in ``scratch`` if it is given, besides the input, which
    is overwritten. The result is in one of the two. Products are of ``dtype``, by default that of the device.

    >>> x = torch.randn(1, 4, 9, generator=torch.Generator().manual_seed(0))
    >>> bool(((orthogonalised(x, POLAR_EXPRESS) @ x.mT).diagonal(dim1=1, dim2=2) > 0).all())
    True
    """
    batch, side, length = stacked.shape[0], min(stacked.shape[-2:]), max(stacked.shape[-2:])
    is_tall = stacked.shape[-2] > stacked.shape[-1]
    dtype = dtype or products_dtype(stacked.device)
    shapes = (batch, side, length), (batch, side, side), (batch, side, side)
    sizes = [aligned(math.prod(shape)) for shape in shapes]
    scratch = stacked.new_empty(sum(sizes)) if scratch is None else scratch[: sum(sizes)]
    parts = scratch.split_with_sizes(sizes)
    copy = parts[0][: math.prod(shapes[0])].view(shapes[0])
    gram, polynomial = (part.view(dtype)[: math.prod(shapes[1])].view(shapes[1]) for part in parts[1:])
    x, other = (copy.copy_(stacked.mT), stacked.view(copy.shape)) if is_tall else (stacked, copy)
    for order in (torch.inf, 2):  # first the largest element: squares of tiny gradients would vanish
        x.div_(torch.linalg.vector_norm(x, order, dim=(-2, -1), keepdim=True).clamp_(min=_SMALLEST_NORM))
    if dtype == torch.float32:
        x, other = _iterated(x, other, gram, polynomial, coefficients)
        return other.view(stacked.shape).copy_(x.mT) if is_tall else x
    # the memory that x is not in has room for two copies of it in bf16
    first, second = (part.view(x.shape) for part in other.view(-1).view(dtype).split_with_sizes([x.numel()] * 2))
    found, _ = _iterated(first.copy_(x), second, gram, polynomial, coefficients)
    return x.view(stacked.shape).copy_(found.mT if is_tall else found)


def _iterated(
    x: Tensor, other: Tensor, gram: Tensor, polynomial: Tensor, coefficients: Sequence[tuple[float, float, float]]
) -> tuple[Tensor, Tensor]:
    """What iterations make of x, (batch, side, length), and the memory that is left: one is ``x``, one ``other``."""
    for a, b, c in coefficients:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    return x, other


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
