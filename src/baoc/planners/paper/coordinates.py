"""The sampled coordinates of a tensor, computed from a few numbers so that none of them is stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from baoc.core.spec import Shape

RATIO = 0.001
FLOOR = 256
"""The least number of coordinates that is sampled of a tensor; smaller tensors are sampled as a whole."""
_FEW_MATRICES = 8  # of a stack, such as experts, that are sampled at least
_MASK = 0xFFFFFFFF
_PARTS = 20  # bits: strata are bounded at fractions of a place


@dataclass(frozen=True)
class Axis:
    """``count`` distinct places out of ``size``, in order: one at random from each of ``count`` equal strata.

    >>> Axis(size=5, count=5, shift=3).places().tolist()
    [0, 1, 2, 3, 4]
    """

    size: int
    count: int
    shift: int  # of the strata's bounds, in parts of a place

    @property
    def step(self) -> int:
        """The width of a stratum, in parts of a place."""
        return (self.size << _PARTS) // max(1, self.count)

    def places(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the places, shape ``(count,)``, int64."""
        return strata_places(torch.arange(self.count, device=device) * self.step + self.shift, self.step, self.size)


def strata_places(start: Tensor, step: Tensor | int, size: Tensor | int) -> Tensor:
    """Return one pseudo-random place in each stratum.

    Args:
        start: where each stratum begins, in parts of a place.
        step: the width of a stratum, in parts of a place.
        size: of the axis.
    """
    low, high = (start >> _PARTS).clamp(min=0), (start + step) >> _PARTS
    high = high.clamp(max=size)
    x = start & _MASK
    for _ in range(2):  # a hash of 32 bits, by products that fit 64
        x = (((x >> 16) ^ x) * 0x45D9F3B) & _MASK
    return low + (((x >> 16) ^ x) * (high - low) >> 32)


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of one tensor, seen as a stack of matrices: the first ``count`` of a grid, row by row.

    A grid of matrices, rows and columns serves every metric, including the rank-1 residual.
    """

    shape: Shape
    matrices: Axis
    rows: Axis
    cols: Axis
    count: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.matrices.count, self.rows.count, self.cols.count

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes with more than one place."""
        return tuple(axis for axis in (self.matrices, self.rows, self.cols) if axis.size != 1) if self.count else ()

    def take(self, tensor: Tensor) -> Tensor:
        """The sampled entries as fp32, shape ``(count,)``."""
        taken = torch.empty(self.count, dtype=torch.float32, device=tensor.device)
        self.take_into(taken, tensor, [axis.places(tensor.device) for axis in self.axes])
        return taken

    def take_into(self, taken: Tensor, tensor: Tensor, places: Sequence[Tensor], rows: slice | None = None) -> None:
        """Write the sampled entries into ``taken``.

        Args:
            taken: shape ``(count,)``.
            tensor: to read from.
            places: on each of :attr:`axes`.
            rows: the rows of dim 0 that the tensor has, if it is a shard; other entries of ``taken`` stay as they are.
        """
        if not self.count:
            return
        if rows is not None:
            self._take_some(taken, tensor, places, rows)
            return
        if not places:  # one element
            taken.copy_(tensor.reshape(1))
        elif not tensor.is_contiguous():
            taken.copy_(self._take_strided(tensor, places))
        elif tensor.dtype == taken.dtype:
            torch.index_select(tensor.view(-1), 0, self._flat_index(places), out=taken)
        else:
            taken.copy_(tensor.view(-1).index_select(0, self._flat_index(places)))

    def _take_some(self, taken: Tensor, tensor: Tensor, places: Sequence[Tensor], rows: slice) -> None:
        if not tensor.numel():
            return
        index = self._flat_index(places) if places else torch.zeros(1, dtype=torch.int64, device=tensor.device)
        index = index - rows.start * math.prod(self.shape[1:])
        is_here = (index >= 0) & (index < tensor.numel())
        # not by a mask: the host would have to wait for the device to count it
        found = tensor.reshape(-1).index_select(0, index.clamp(0, tensor.numel() - 1))
        taken.copy_(torch.where(is_here, found.to(taken.dtype), taken))

    def _take_strided(self, tensor: Tensor, places: Sequence[Tensor]) -> Tensor:
        # indexed in its own dims and at once: a flat view of the tensor or one of whole matrices would copy them
        if tensor.dim() == 1:
            return tensor[places[0]]
        chosen = dict(zip(self.axes, places))
        only = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        matrices, rows, cols = (chosen.get(axis, only) for axis in (self.matrices, self.rows, self.cols))
        stack = torch.unravel_index(matrices, self.shape[:-2]) if len(self.shape) > 2 else ()
        index = (*(each[:, None, None] for each in stack), rows[:, None], cols)
        grid = tensor[index]
        return grid.reshape(-1)[: self.count]

    def _flat_index(self, places: Sequence[Tensor]) -> Tensor:
        index, stride = places[-1], 1
        for axis, before in zip(self.axes[:0:-1], places[-2::-1]):
            stride *= axis.size
            index = torch.add(index, before.view(-1, *[1] * index.dim()), alpha=stride)
        return index.view(-1)[: self.count]


def stacked(shape: Shape) -> tuple[int, int, int]:
    """Return a tensor's shape as (matrices, rows, columns), with its last two dims as rows and columns.

    >>> stacked((64, 32, 3, 3)), stacked((768, 3072)), stacked((768,)), stacked(())
    ((2048, 3, 3), (1, 768, 3072), (1, 768, 1), (1, 1, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape), 1
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def sample_count(numel: int, ratio: float = RATIO, floor: int = FLOOR) -> int:
    """Return the number of coordinates to sample: ``ceil(ratio * numel)``, but at least ``floor`` or all.

    >>> sample_count(2_359_296), sample_count(768), sample_count(100)
    (2360, 256, 100)
    """
    # exact decimal arithmetic: 0.07 * 100 is above 7 in floats
    return min(numel, max(math.ceil(Fraction(str(ratio)) * numel), floor))


def draw(shape: Shape, generator: torch.Generator, ratio: float = RATIO, floor: int = FLOOR) -> Coordinates:
    """Draw the coordinates of a tensor at random.

    >>> draw((768, 3072), torch.Generator().manual_seed(0)).grid
    (1, 48, 50)
    """
    count = sample_count(math.prod(shape), ratio, floor)
    matrices, rows, cols = stacked(shape)
    b = min(matrices, max(_FEW_MATRICES, -(-count // max(1, rows * cols))))
    per_matrix = -(-count // b) if b else 0
    # as square as the matrix allows, so that both its rows and its columns are seen
    r = min(rows, max(math.isqrt(per_matrix), -(-per_matrix // max(1, cols))))
    c = -(-per_matrix // r) if r else 0
    luck = torch.randint(_MASK + 1, (3, 2), generator=generator, device="cpu").tolist()
    return Coordinates(
        shape,
        matrices=_axis(matrices, b, *luck[0]),
        rows=_axis(rows, r, *luck[1]),
        cols=_axis(cols, c, *luck[2]),
        count=count,
    )


def _axis(size: int, count: int, turn: int, side: int) -> Axis:
    """Return an axis from two random 32-bit numbers. A random shift of the strata makes all places equally likely."""
    whole = Axis(size, count, 0)
    shift = turn * whole.step >> 32
    # the last stratum runs over the end and on at the front: one of the two pieces has the place
    front, back = shift >> _PARTS, size - ((shift - whole.step >> _PARTS) + size)
    at_front = side * (front + back) >> 32 < front
    return Axis(size, count, shift - whole.step if at_front else shift)
