"""Which coordinates are sampled (Sec. 3.1): how many of each tensor, and where.

The places are computed from a few numbers, so none of them is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from baoc.core.roles import canonical_name
from baoc.core.spec import Shape
from baoc.planners.paper.units import Granularity, structural_units

RATIO = 0.001
_SOME_MATRICES = 8  # of a stack, such as experts, that are sampled if there are enough samples
_ENOUGH = 16  # samples of a matrix: a grid of 4 x 4
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


def sample_count(numel: int, ratio: float = RATIO, floor: int = 0) -> int:
    """Return the size of Omega of a unit: ``ceil(ratio * numel)``, but at least ``floor`` or all.

    >>> sample_count(2_359_296), sample_count(768), sample_count(768, floor=64)
    (2360, 1, 64)
    """
    # exact decimal arithmetic: 0.07 * 100 is above 7 in floats
    return min(numel, max(math.ceil(Fraction(str(ratio)) * numel), floor))


def sample_counts(
    shapes: Mapping[str, Shape], ratio: float = RATIO, floor: int = 0, granularity: Granularity = "module"
) -> dict[str, int]:
    """Return how many coordinates of each tensor are sampled.

    Each structural unit has :func:`sample_count` coordinates. Its tensors share them in proportion to their sizes, by
    largest remainders; of equal remainders, the first tensor's counts. A tensor may get none.

    >>> sample_counts({"fc.weight": (100, 100), "fc.bias": (100,), "norm.weight": (100,)})
    {'fc.weight': 11, 'fc.bias': 0, 'norm.weight': 1}
    """
    names = {canonical_name(name): name for name in shapes}
    counts = dict.fromkeys(shapes, 0)
    for unit in structural_units(shapes, granularity):
        sizes = {names[name]: math.prod(shapes[names[name]]) for name in unit.parameters}
        total = sample_count(unit.numel, ratio, floor)
        quotas = {name: Fraction(total * size, max(1, unit.numel)) for name, size in sizes.items()}
        counts |= {name: math.floor(quota) for name, quota in quotas.items()}
        left = total - sum(counts[name] for name in sizes)
        for name in sorted(sizes, key=lambda name: counts[name] - quotas[name])[:left]:
            counts[name] += 1
    return counts


def draw(shape: Shape, generator: torch.Generator, count: int) -> Coordinates:
    """Draw ``count`` coordinates of a tensor at random.

    >>> draw((768, 3072), torch.Generator().manual_seed(0), 2360).grid
    (1, 49, 49)
    """
    matrices, rows, cols = stacked(shape)
    b = r = c = 0
    if count:
        b = min(matrices, max(1, -(-count // (rows * cols)), min(_SOME_MATRICES, count // min(_ENOUGH, rows * cols))))
        per_matrix = -(-count // b)
        # as square as the matrix allows, so that both its rows and its columns are seen, and with full rows
        c = min(cols, max(per_matrix // min(rows, math.isqrt(per_matrix)), -(-per_matrix // rows)))
        r = -(-per_matrix // c)
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
