"""One number for each row, or for each column, of a parameter's matrices: the mean of a non-negative slot along it.

What SlimAdam keeps of a second moment. A convolution's kernels are flattened, and the matrices of a stack are apart.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baoc.core.codecs.base import Codec, Format, Held, SummedFormat
from baoc.core.codecs.dense import FP32Format
from baoc.core.codecs.factored import flattened, unflattened
from baoc.core.roles import matrix_shape
from baoc.core.rounding import Rounding
from baoc.core.spec import Buffer, Scalar, Shape, Slot


@dataclass(frozen=True)
class MeanFormat(SummedFormat):
    rounds = False
    matrix: Shape = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", matrix_shape(self.shape))
        super().__post_init__()

    @abstractmethod
    def expand(self, held: Held, rows: slice, mean_floor: Scalar) -> Tensor: ...

    def finish(self, held: Held, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None) -> None:
        if partial is not None:
            held[""].copy_(held[""] * keep + partial * add)

    def problem(self, held: Held) -> str | None:
        return "negative numbers" if bool((held[""] < 0).any()) else None

    def graph_key(self) -> Hashable:
        return type(self), self.matrix == self.shape or self.shape[1:], self.rows is None or self

    def _spread(self, means: Tensor, rows: int) -> Tensor:
        """Means that broadcast over a matrix, for as many rows, in the parameter's shape."""
        return unflattened(means.expand(rows, *self.matrix[1:]), self.matrix, self.shape)


@dataclass(frozen=True)
class RowMeanFormat(MeanFormat):
    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("", (self.held_shape[0], *self.matrix[1:-1]), torch.float32),)

    def expand(self, held: Held, rows: slice, mean_floor: Scalar) -> Tensor:
        means = held[""][rows]  # (rows,) or (stacks, rows)
        return self._spread(means.unsqueeze(-1), means.shape[0])

    def absorb(
        self, held: Held, rows: slice, x: Tensor, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None
    ) -> Tensor | None:
        own = held[""][rows]
        own.copy_(own * keep + flattened(x, self.matrix, self.shape).mean(-1) * add)
        return None


@dataclass(frozen=True)
class ColMeanFormat(MeanFormat):
    @property
    def buffers(self) -> tuple[Buffer, ...]:
        stacks = (self.held_shape[0],) if len(self.matrix) > 2 else ()  # of one matrix, every shard needs all columns
        return (Buffer("", (*stacks, self.matrix[-1]), torch.float32, by_rows=bool(stacks)),)

    def expand(self, held: Held, rows: slice, mean_floor: Scalar) -> Tensor:
        if len(self.matrix) > 2:
            means = held[""][rows].unsqueeze(-2)  # (stacks, 1, cols)
            return self._spread(means, means.shape[0])
        return self._spread(held[""], rows.stop - rows.start)  # (cols,)

    def absorb(
        self, held: Held, rows: slice, x: Tensor, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None
    ) -> Tensor | None:
        x = flattened(x, self.matrix, self.shape)
        if len(self.matrix) > 2:
            own = held[""][rows]
            own.copy_(own * keep + x.mean(-2) * add)
            return None
        share = x.sum(0) / self.shape[0]  # (cols,); divided first: shards' shares can be added up as they are
        return share if partial is None else partial + share


class RowMean(Codec):
    name = "row-mean"
    bits = 32
    factored = True
    stored: type[MeanFormat] = RowMeanFormat

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        return (FP32Format if len(shape) < 2 else self.stored)(slot, shape, rows)

    def exact(self) -> str:
        return self.name

    def refusal(self, slot: Slot) -> str | None:
        return None if not slot.signed else f"it keeps means of a non-negative slot, and {slot.name!r} is signed"


class ColMean(RowMean):
    name = "col-mean"
    stored = ColMeanFormat
