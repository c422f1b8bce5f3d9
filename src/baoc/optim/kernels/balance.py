"""Bringing the rows and columns of a direction to one size, by sums alone: the direction is never held as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baoc.core.roles import matrix_shape
from baoc.core.spec import FP32_TINY
from baoc.optim.kernels.job import Job


class Balance:
    """One factor for each row and each column of the matrices that a parameter is, found in turns (Sinkhorn).

    Args:
        norms: "row" and "col", in the order of the turns.
        peek: the direction of some rows of the parameter.
    """

    def __init__(self, norms: Sequence[str], job: Job, peek: Callable[[slice], Tensor]) -> None:
        self._norms, self._peek, self._place = norms, peek, job.place
        self._matrix = matrix_shape(job.layout.shape)  # (rows, cols) or (stacks, rows, cols)
        lines = job.param.shape[0]
        ones = job.param.new_ones(1, dtype=torch.float32)
        self._is_stack = len(self._matrix) > 2
        self._row = ones.expand(lines, *self._matrix[1:-1], 1).clone()  # (rows, 1) or (stacks, rows, 1)
        cols = (lines, 1, self._matrix[-1]) if self._is_stack else (1, self._matrix[-1])
        self._col = ones.expand(cols).clone()

    def settle(self, tiles: Sequence[slice]) -> None:
        """Find the factors."""
        for norm in self._norms:
            if norm == "row":
                for rows in tiles:
                    self._row[rows] = _inverse_root(self._squares(rows, self._cols(rows)).mean(-1, keepdim=True))
            elif self._is_stack:
                for rows in tiles:
                    self._col[rows] = _inverse_root(self._squares(rows, self._row[rows]).mean(-2, keepdim=True))
            else:
                partial = torch.zeros_like(self._col)
                for rows in tiles:
                    partial += self._squares(rows, self._row[rows]).sum(0, keepdim=True) / self._matrix[0]
                self._col = _inverse_root(self._place.sum(partial))

    def scaled(self, rows: slice, direction: Tensor) -> Tensor:
        """Rows of the direction with their factors."""
        flat = direction.reshape(-1, *self._matrix[1:])
        return (flat * self._row[rows] * self._cols(rows)).view(direction.shape)

    def _squares(self, rows: slice, factor: Tensor) -> Tensor:
        return (self._peek(rows).reshape(-1, *self._matrix[1:]) * factor).square()

    def _cols(self, rows: slice) -> Tensor:
        return self._col[rows] if self._is_stack else self._col


def _inverse_root(mean_square: Tensor) -> Tensor:
    return mean_square.clamp(min=FP32_TINY).rsqrt()
