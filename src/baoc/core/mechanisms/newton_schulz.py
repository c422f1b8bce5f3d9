"""Newton-Schulz iterations: the singular values of matrices become one, by matrix products alone.

An iteration is ``x <- a x + b (x x') x + c (x x')^2 x = w x`` with the polynomial ``w = a + b r + c r^2`` of the Gram
matrix ``r = x x'``. Two forms of it give the same result:

- *Standard*: multiply ``x`` in every iteration.
- *Gram*: ``r`` follows from its predecessor, ``r <- w r w``, so only the small square matrices are multiplied, and
  ``x`` once with the product ``q`` of all ``w``. This saves work for matrices that are longer than wide
  (https://github.com/Dao-AILab/gram-newton-schulz). Errors of ``r`` add up: in fp32 they are as small as those of the
  standard form if ``r`` is computed from ``x`` anew after two iterations (`docs/results/newton_schulz.md`).

All polynomials of ``r`` commute and are symmetric. On CPUs their products are computed strip by strip, from the
diagonal to the right, and mirrored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

YOU_JIACHENG: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""You Jiacheng's coefficients, one triple per iteration: https://x.com/YouJiacheng/status/1905861218138804534, as in
https://github.com/KellerJordan/modded-nanogpt."""

MUON: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""The coefficients of ``torch.optim.Muon``. Singular values end between 0.7 and 1.2."""

POLAR_EXPRESS: Coefficients = tuple(
    (a / 1.01, b / 1.01**3, c / 1.01**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)
"""Those of Polar Express (https://arxiv.org/abs/2505.16932), with the authors' safety factor of 1.01."""

GRAM_ASPECT = 1.5
"""Matrices at least so many times as long as wide take the Gram form."""
RESTART = 2
"""Iterations of the Gram form after which ``r`` is computed from ``x`` anew."""

_STRIPS = ((1024, 8), (384, 4), (0, 1))  # from which side on: narrower strips multiply more slowly
_GRAM_SQUARES = 4  # square matrices that the Gram form holds
_SMALLEST_NORM = torch.finfo(torch.float32).tiny


def products_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products: fp16 on GPUs, which multiply it several times as fast as fp32.

    Norms are one at most, so nothing overflows, and fp16 rounds eight times as finely as bf16, at the same speed.

    Args:
        device: where the matrices are.

    Returns:
        The dtype. Singular values end close enough to one with either.

    Example:
        >>> products_dtype(torch.device("cpu")), products_dtype(torch.device("cuda"))
        (torch.float32, torch.float16)
    """
    return torch.float16 if device.type == "cuda" else torch.float32


def orthogonalised(
    stacked: Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    scratch: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Bring the singular values of matrices close to one by Newton-Schulz iterations.

    Args:
        stacked: fp32 matrices, shape ``(batch, rows, cols)``. They are overwritten.
        coefficients: one triple ``(a, b, c)`` per iteration ``x <- a x + b (x x') x + c (x x')^2 x``.
        scratch: memory for a copy of the batch and the square matrices of each, see :func:`workspace`.
        dtype: the dtype of matrix products; by default :func:`products_dtype`.

    Returns:
        The result in fp32, as a view of ``stacked`` or ``scratch``.

    Example:
        >>> x = torch.eye(4, 9, dtype=torch.float32, device="cpu").mul(1e-6).unsqueeze(0)
        >>> bool((orthogonalised(x, YOU_JIACHENG).diagonal(dim1=1, dim2=2) - 1).abs().max() < 0.2)
        True
    """
    batch, side, length = stacked.shape[0], min(stacked.shape[-2:]), max(stacked.shape[-2:])
    is_tall = stacked.shape[-2] > stacked.shape[-1]
    dtype = dtype or products_dtype(stacked.device)
    wide, square = (batch, side, length), (batch, side, side)
    sizes = [aligned(math.prod(wide)), *[aligned(math.prod(square))] * _scratch_squares(side, length)]
    scratch = stacked.new_empty(sum(sizes)) if scratch is None else scratch[: sum(sizes)]
    parts = scratch.split_with_sizes(sizes)
    copy = parts[0][: math.prod(wide)].view(wide)
    squares = [part.view(dtype)[: math.prod(square)].view(square) for part in parts[1:]]
    x, other = (copy.copy_(stacked.mT), stacked.view(copy.shape)) if is_tall else (stacked, copy)
    for order in (torch.inf, 2):  # first by the largest element: squares of tiny gradients would underflow
        x.div_(torch.linalg.vector_norm(x, order, dim=(-2, -1), keepdim=True).clamp_(min=_SMALLEST_NORM))
    iterated = _by_gram if takes_gram(side, length) else _iterated
    if dtype == torch.float32:
        x, other = iterated(x, other, squares, coefficients)
        return other.view(stacked.shape).copy_(x.mT) if is_tall else x
    # `other` has room for two copies of x in half precision
    first, second = (part.view(x.shape) for part in other.view(-1).view(dtype).split_with_sizes([x.numel()] * 2))
    found, _ = iterated(first.copy_(x), second, squares, coefficients)
    return x.view(stacked.shape).copy_(found.mT if is_tall else found)


def takes_gram(rows: int, cols: int) -> bool:
    """Return whether a matrix of this shape takes the Gram form."""
    return max(rows, cols) >= GRAM_ASPECT * min(rows, cols)


def _iterated(
    x: Tensor, other: Tensor, squares: Sequence[Tensor], coefficients: Sequence[tuple[float, float, float]]
) -> tuple[Tensor, Tensor]:
    """Iterate on x, shape (batch, side, length). Return the result and the free memory; one is ``x``, one ``other``."""
    r, w = squares
    for a, b, c in coefficients:
        _symmetric(x, x.mT, out=r)
        _symmetric(r, r, out=w, plus=r, beta=b, alpha=c)
        torch.baddbmm(x, w, x, beta=a, out=other)
        x, other = other, x
    return x, other


def _by_gram(
    x: Tensor, other: Tensor, squares: Sequence[Tensor], coefficients: Sequence[tuple[float, float, float]]
) -> tuple[Tensor, Tensor]:
    """Do the same as :func:`_iterated` in the Gram form."""
    for run in (coefficients[:RESTART], coefficients[RESTART:]):
        if not run:
            continue
        # `q` is multiplied with x into `other` at last, so it may not lie there. The others may.
        q, r, *rest = squares
        size, spare = r.numel(), other.view(-1)
        found = (spare[at : at + size].view(r.shape) for at in range(0, spare.numel() - size + 1, size))
        w, free = [*rest, *found][:2]
        _symmetric(x, x.mT, out=r)
        for i, (a, b, c) in enumerate(run, 1):
            _symmetric(r, r, out=w, plus=r, beta=b, alpha=c)
            w.diagonal(dim1=1, dim2=2).add_(a)
            q.copy_(w if i == 1 else _symmetric(q, w, out=free))
            if i < len(run):
                _symmetric(_symmetric(w, r, out=free), w, out=r)
        x, other = torch.bmm(q, x, out=other), x
    return x, other


def _symmetric(
    left: Tensor, right: Tensor, *, out: Tensor, plus: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Set ``out`` to ``beta plus + alpha left right``, where that is symmetric, shape (batch, side, side)."""
    side = out.shape[-1]
    height = _strip_height(side, out.device.type)
    for start in range(0, side, height):
        rows, rest = slice(start, start + height), slice(start + height, side)
        factors, strip = (left[:, rows], right[:, :, start:]), out[:, rows, start:]
        if plus is None:
            torch.bmm(*factors, out=strip)
        else:
            torch.baddbmm(plus[:, rows, start:], *factors, beta=beta, alpha=alpha, out=strip)
        for matrix in out if start + height < side else ():  # one by one: torch transposes single matrices faster
            matrix[rest, rows].copy_(matrix[rows, rest].mT)
    return out


def _strip_height(side: int, device: str) -> int:
    """Return how many rows of a symmetric product are computed at a time, all of them on GPUs."""
    strips = next(count for least, count in _STRIPS if side >= least) if device == "cpu" else 1
    return -(-side // strips)


def aligned(numel: int) -> int:
    """Round a number of elements up to whole cache lines. Results of matrix products depend on their alignment."""
    return -(-numel // 16) * 16


def workspace(rows: int, cols: int) -> int:
    """Return how many elements :func:`orthogonalised` needs for one matrix, the matrix included."""
    side, length = min(rows, cols), max(rows, cols)
    return rows * cols + aligned(rows * cols) + _scratch_squares(side, length) * aligned(side**2)


def _scratch_squares(side: int, length: int) -> int:
    """How many square matrices need scratch. The Gram form finds room for up to two in the copy of x."""
    return _GRAM_SQUARES - min(2, length // side) if takes_gram(side, length) else 2


def operations(rows: int, cols: int, iterations: int, device: str = "cpu") -> int:
    """Return the floating-point operations of :func:`orthogonalised` for one matrix.

    Args:
        rows: rows of the matrix.
        cols: columns of the matrix.
        iterations: how many iterations.
        device: type of the device. CPUs compute little more than half of a symmetric product.

    Returns:
        Multiplications and additions.

    Example:
        >>> operations(768, 768, 5, "cuda"), operations(768, 3072, 5, "cuda")
        (13589544960, 27179089920)
        >>> operations(768, 768, 5) / operations(768, 768, 5, "cuda")
        0.75
    """
    side, length = min(rows, cols), max(rows, cols)
    height = _strip_height(side, device)
    computed = sum(min(height, side - start) * (side - start) for start in range(0, side, height))
    gram, full = 2 * length * computed, 2 * length * side**2  # a symmetric product with x, and another
    small = 2 * side * computed  # a symmetric product of square matrices
    if not takes_gram(rows, cols):
        return iterations * (gram + small + full)
    runs = [count for count in (min(iterations, RESTART), iterations - RESTART) if count > 0]
    # in each run: r^2 in every iteration, two products for the next r and one for q in all but one
    return sum(gram + full + (4 * count - 3) * small for count in runs)
