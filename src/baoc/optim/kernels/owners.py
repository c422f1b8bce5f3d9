"""Matrices whose rows are spread over ranks: each is put together on one rank, its owner, and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baoc.core.sharding import Ranks


class Owners:
    """Who owns which matrices of a batch, all of one shape: runs of them in order, of equal length but for one.

    Args:
        ranks: that have the rows.
        shape: of the batch, ``(matrices, rows, cols)``.
        turn: the rank that gets the first matrix where they do not come out even, so that it is not always the same.
    """

    def __init__(self, ranks: Ranks, shape: tuple[int, int, int], turn: int) -> None:
        matrices, height, self._width = shape
        each, over = divmod(matrices, ranks.size)
        self._counts = [each + ((rank - turn) % ranks.size < over) for rank in range(ranks.size)]
        self._heights = [rows.stop - rows.start for rows in (ranks.rows(height, rank) for rank in range(ranks.size))]
        self._ranks = ranks

    @property
    def mine(self) -> int:
        """How many matrices this rank owns."""
        return self._counts[self._ranks.rank]

    def gather(self, parts: Tensor) -> Tensor:
        """From this rank's rows of all matrices, flat, to the matrices that it owns: ``(mine, rows, cols)``."""
        received = self._ranks.exchange(parts, self._sent, self._received)
        pieces = zip(received.split_with_sizes(self._received), self._heights)
        return torch.cat([piece.view(self.mine, height, self._width) for piece, height in pieces], 1)

    def scatter(self, owned: Tensor) -> Tensor:
        """And back."""
        pieces = [piece.reshape(-1) for piece in owned.split_with_sizes(self._heights, 1)]
        return self._ranks.exchange(torch.cat(pieces), self._received, self._sent)

    @property
    def _sent(self) -> Sequence[int]:
        """Elements of the rows here that go to each rank."""
        return [count * self._heights[self._ranks.rank] * self._width for count in self._counts]

    @property
    def _received(self) -> Sequence[int]:
        """Elements that come from each."""
        return [self.mine * height * self._width for height in self._heights]
