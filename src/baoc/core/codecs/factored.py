"""Means of an unsigned slot over the rows and columns of a parameter's matrices.

``factored`` keeps both means, as Adafactor does. ``row-mean`` and ``col-mean`` keep one of them, as SlimAdam does, and
``mean`` keeps one number per matrix. The kernels of a convolution are flattened: there is one number per output, and
one per weight of an output. Each matrix of a stack has means of its own. ``torch.optim.Adafactor`` factors the last
two dims instead; slots that must equal it set ``torch_dims``.

Means are linear in the slot, so blending them equals blending the slot and taking the means again. These formats
advance by themselves and never build the full tensor.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baoc.core.codecs.base import BF16, FP32, BF16Format, Codec, Format, FP32Format, Held, SummedFormat, joined
from baoc.core.codecs.quantized import Int8, Int8Format, fits
from baoc.core.roles import matrix_shape
from baoc.core.rounding import Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Scalar, Shape, Slot


@dataclass(frozen=True)
class FactoredFormat(SummedFormat):
    """The means over the columns (``row``) and over the rows (``col``) of each matrix.

    Args:
        slot: the slot.
        shape: global shape of the parameter.
        rows: rows of dim 0 on this rank. ``None``: all.
        inner: the format of the two factors.
    """

    inner: type[Format] = FP32Format
    matrix: Shape = field(init=False, repr=False, compare=False)
    """The parameter's shape as factors see it: ``(*stacks, rows, cols)``, with its own dim 0."""
    row: Format = field(init=False, repr=False, compare=False)
    col: Format = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        matrix = self.shape if self.slot.torch_dims else factored_shape(self.shape)
        cols = self._factor(matrix[:-2] + matrix[-1:], None if len(matrix) == 2 else self.rows)
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "row", self._factor(matrix[:-1], self.rows))
        object.__setattr__(self, "col", cols)  # every shard of one matrix needs all columns
        super().__post_init__()

    def _factor(self, shape: Shape, rows: int | None) -> Format:
        # The size of the whole parameter decides what is small. A factor only needs rows that int8 can group.
        inner = BF16Format if self.inner is Int8Format and not fits(shape) else self.inner
        return inner(self.slot, shape, rows)

    @property
    def factors(self) -> tuple[tuple[str, Format], ...]:
        """Pairs of name and format of the two factors."""
        return ("row", self.row), ("col", self.col)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(joined(name, buffer.name), buffer.shape, buffer.dtype, name == "row" or len(self.matrix) > 2)
            for name, factor in self.factors
            for buffer in factor.buffers
        )

    def expand(self, held: Held, rows: slice, mean_floor: Scalar) -> Tensor:
        row = self.row.decode(_part(held, "row", self.row), rows)  # (rows, *batch, R) or (rows,)
        cols = rows if row.dim() > 1 else slice(None)
        col = self.col.decode(_part(held, "col", self.col), cols)  # (rows, *batch, C) or (C,)
        # Both factors have the same grand mean. Every shard on dim 0 can compute that of the columns.
        col = col / col.mean(-1, keepdim=True).clamp(min=mean_floor)
        return unflattened(row.unsqueeze(-1) * col.unsqueeze(-2), self.matrix, self.shape)

    def absorb(
        self, held: Held, rows: slice, x: Tensor, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None
    ) -> Tensor | None:
        x = flattened(x, self.matrix, self.shape)
        _blend(self.row, _part(held, "row", self.row), rows, x.mean(-1), keep, add, rounding)
        if x.dim() > 2:  # dim 0 is a batch dim: each of its rows has its own columns
            _blend(self.col, _part(held, "col", self.col), rows, x.mean(-2), keep, add, rounding)
            return None
        # Divide before summing, so that partial sums of shards can simply be added. Without shards, read the height
        # off the tensor, so that one traced graph serves every height.
        height = self.shape[0] if self.rows is not None else next(iter(_part(held, "row", self.row).values())).shape[0]
        share = x.sum(0) / height  # (C,)
        return share if partial is None else partial + share

    def finish(self, held: Held, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None) -> None:
        if partial is not None:  # one matrix: every shard has all columns
            cols = slice(0, partial.shape[0])
            _blend(self.col, _part(held, "col", self.col), cols, partial, keep, add, Rounding(rounding.phase))

    def problem(self, held: Held) -> str | None:
        problems = (factor.problem(_part(held, name, factor)) for name, factor in self.factors)
        return next((problem for problem in problems if problem), None)

    def graph_key(self) -> Hashable:
        seen = self.matrix == self.shape or self.shape[1:]
        return type(self), self.row.graph_key(), self.col.graph_key(), seen, self.rows is None or self


def factored_shape(shape: Shape) -> Shape:
    """Return a tensor's shape as the matrices whose means are kept.

    A tensor of one row, such as an image that is optimized directly, has no rows to average over. Its trailing dims are
    cut in two instead, where that leaves the fewest numbers.

    Args:
        shape: the tensor's shape.

    Returns:
        ``(rows, cols)`` or ``(matrices, rows, cols)``, with the tensor's own dim 0.

    Example:
        >>> factored_shape((64, 32, 3, 3)), factored_shape((1, 3, 128, 128))
        ((64, 288), (1, 384, 128))
    """
    if len(shape) < 3 or shape[0] != 1:
        return matrix_shape(shape)
    cuts = [(1, math.prod(shape[1:at]), math.prod(shape[at:])) for at in range(2, len(shape))]
    return min(cuts, key=sum)


def flattened(x: Tensor, matrix: Shape, shape: Shape) -> Tensor:
    """Reshape rows of a parameter to rows of its matrices.

    Args:
        x: shape ``(rows, *shape[1:])``.
        matrix: the parameter's shape as matrices.
        shape: the parameter's shape. If both are equal, ``x`` is returned, so that one graph fits all shapes.
    """
    return x if matrix == shape else x.reshape(-1, *matrix[1:])


def unflattened(x: Tensor, matrix: Shape, shape: Shape) -> Tensor:
    """Undo :func:`flattened`."""
    return x if matrix == shape else x.reshape(-1, *shape[1:])


def _part(held: Held, name: str, factor: Format) -> dict[str, Tensor]:
    return {buffer: held[joined(name, buffer)] for buffer, _ in factor.keys}


def _blend(factor: Format, held: Held, rows: slice, x: Tensor, keep: Scalar, add: Scalar, rounding: Rounding) -> None:
    factor.encode(held, rows, factor.decode(held, rows) * keep + x * add, rounding)


class Factored(Codec):
    """Row and column means in fp32."""

    name = "factored"
    bits = 32
    factored = True
    inner: type[Format] = FP32Format
    dense: Codec = FP32()
    """The codec of vectors."""

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        if len(shape) < 2:
            return self.dense.at(shape, slot, rows)
        return FactoredFormat(slot, shape, rows, self.inner if math.prod(shape) >= SMALL_NUMEL else FP32Format)

    def exact(self) -> str:
        return "factored"

    def refusal(self, slot: Slot) -> str | None:
        if not slot.signed:
            return None
        return f"it keeps row and column means of a non-negative slot, and {slot.name!r} is signed"


class FactoredBF16(Factored):
    """Row and column means in bf16."""

    name = "factored-bf16"
    bits = 16
    inner = BF16Format
    dense = BF16()


class FactoredInt8(Factored):
    """Row and column means in int8."""

    name = "factored-int8"
    bits = 8
    inner = Int8Format
    dense = Int8()


@dataclass(frozen=True)
class MeanFormat(SummedFormat):
    """The means along one axis of each matrix, or over all of it, in fp32."""

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
        """Expand means that broadcast over a matrix to rows of the parameter."""
        return unflattened(means.expand(rows, *self.matrix[1:]), self.matrix, self.shape)


@dataclass(frozen=True)
class RowMeanFormat(MeanFormat):
    """One number per row of each matrix."""

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
    """One number per column of each matrix."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        stacks = (self.held_shape[0],) if len(self.matrix) > 2 else ()  # every shard of one matrix needs all columns
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
        share = x.sum(0) / self.shape[0]  # (cols,); divided first, so that shards can be added
        return share if partial is None else partial + share

    def graph_key(self) -> Hashable:
        return super().graph_key() if len(self.matrix) > 2 else self  # the height is part of the code


@dataclass(frozen=True)
class MatrixMeanFormat(MeanFormat):
    """One number per matrix."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        stacks = self.held_shape[0] if len(self.matrix) > 2 else 1  # every shard of one matrix needs its mean
        return (Buffer("", (stacks,), torch.float32, by_rows=len(self.matrix) > 2),)

    def by_matrix(self, held: Held) -> Tensor:
        """Return the numbers in a shape that broadcasts over the parameter's rows."""
        return held[""].view(-1, *[1] * (len(self.shape) - 1))

    def expand(self, held: Held, rows: slice, mean_floor: Scalar) -> Tensor:
        means = self.by_matrix(held)
        means = means[rows] if len(self.matrix) > 2 else means
        return means.expand(rows.stop - rows.start, *self.shape[1:])

    def absorb(
        self, held: Held, rows: slice, x: Tensor, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None
    ) -> Tensor | None:
        means = x.flatten(1).mean(1)
        if len(self.matrix) > 2:
            own = held[""][rows]
            own.copy_(own * keep + means * add)
            return None
        share = (means / self.shape[0]).sum(0, keepdim=True)  # divided first, so that shards can be added
        return share if partial is None else partial + share

    def graph_key(self) -> Hashable:
        return super().graph_key() if len(self.matrix) > 2 else self  # the height is part of the code


class RowMean(Codec):
    """The mean of each row, in fp32."""

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
    """The mean of each column, in fp32."""

    name = "col-mean"
    stored = ColMeanFormat


class MatrixMean(RowMean):
    """The mean of each matrix, in fp32."""

    name = "mean"
    stored = MatrixMeanFormat

    def refusal(self, slot: Slot) -> str | None:
        # Elements of a matrix differ by orders of magnitude: a root of their mean is no safe divisor for each of them.
        return None if slot.sets_length else f"it keeps one number per matrix, and {slot.name!r} is for each element"
