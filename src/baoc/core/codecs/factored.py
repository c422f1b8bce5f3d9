"""Adafactor's rank-1 format: the means of a non-negative slot over the columns and over the rows of its matrices.

A convolution's kernels are flattened, so that its factors are small: one number for each output, and one for each
weight of an output. ``torch.optim.Adafactor`` takes the last two dims instead; a slot that must equal it says so.

The means are linear in the slot, so blending them is the same as blending the slot and taking the means again: this
format advances by itself and never builds the full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from torch import Tensor

from baoc.core.codecs.base import Codec, Format, Held, SummedFormat, joined
from baoc.core.codecs.dense import BF16, FP32, BF16Format, FP32Format
from baoc.core.codecs.int8 import Int8, Int8Format, fits
from baoc.core.roles import matrix_shape
from baoc.core.rounding import NEAREST, Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Scalar, Shape, Slot


@dataclass(frozen=True)
class FactoredFormat(SummedFormat):
    inner: type[Format] = FP32Format  # how the two factors are stored
    matrix: Shape = field(init=False, repr=False, compare=False)
    """The parameter's shape as factors see it: ``(*stacks, rows, cols)``, with its own dim 0."""
    row: Format = field(init=False, repr=False, compare=False)
    col: Format = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        matrix = self.shape if self.slot.torch_dims else matrix_shape(self.shape)
        cols = self._factor(matrix[:-2] + matrix[-1:], None if len(matrix) == 2 else self.rows)
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "row", self._factor(matrix[:-1], self.rows))
        object.__setattr__(self, "col", cols)  # of one matrix, every shard needs all columns
        super().__post_init__()

    def _factor(self, shape: Shape, rows: int | None) -> Format:
        # The parameter as a whole decides what counts as small; a factor only needs rows that int8 can group.
        inner = BF16Format if self.inner is Int8Format and not fits(shape) else self.inner
        return inner(self.slot, shape, rows)

    @property
    def factors(self) -> tuple[tuple[str, Format], ...]:
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
        # Both factors have the same grand mean; the column's is the one that every shard on dim 0 knows.
        col = col / col.mean(-1, keepdim=True).clamp(min=mean_floor)
        return unflattened(row.unsqueeze(-1) * col.unsqueeze(-2), self.matrix, self.shape)

    def absorb(
        self, held: Held, rows: slice, x: Tensor, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None
    ) -> Tensor | None:
        x = flattened(x, self.matrix, self.shape)
        _blend(self.row, _part(held, "row", self.row), rows, x.mean(-1), keep, add, rounding)
        if x.dim() > 2:  # dim 0 is a batch dim: its rows have columns of their own
            _blend(self.col, _part(held, "col", self.col), rows, x.mean(-2), keep, add, rounding)
            return None
        # Rows are divided before they are summed, so that a shard's partial sums can be added up as they are. Their
        # number is read off the tensor where that is all of them, so that a traced graph serves every height.
        height = self.shape[0] if self.rows is not None else next(iter(_part(held, "row", self.row).values())).shape[0]
        share = x.sum(0) / height  # (C,)
        return share if partial is None else partial + share

    def finish(self, held: Held, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None) -> None:
        if partial is not None:  # of one matrix, whose columns every shard has
            cols = slice(0, partial.shape[0])
            _blend(self.col, _part(held, "col", self.col), cols, partial, keep, add, Rounding(rounding.phase))

    def adopted(self, found: Held) -> dict[str, Tensor] | None:
        """From factors of the last two dims, and from int8 factors of an earlier format."""
        before = replace(self, slot=replace(self.slot, torch_dims=True))
        parts: dict[str, Tensor] = {}
        for name, factor in before.factors:
            mine = {own: found[joined(name, own)] for own in _own_names(found, name)}
            if not _fits(factor, mine):
                mine = factor.adopted(mine) or {}
            parts |= {joined(name, own): tensor for own, tensor in mine.items()}
        if set(parts) != {buffer.name for buffer in before.buffers}:
            return None
        if before == self or before.matrix == self.matrix:
            return parts
        held = self.zeros(next(iter(parts.values())).device)
        partial = None
        for row in range(self.held_shape[0]):
            rows = slice(row, row + 1)
            partial = self.absorb(held, rows, before.decode(parts, rows), 0.0, 1.0, NEAREST, partial)
        self.finish(held, 0.0, 1.0, NEAREST, partial)
        return held

    def problem(self, held: Held) -> str | None:
        problems = (factor.problem(_part(held, name, factor)) for name, factor in self.factors)
        return next((problem for problem in problems if problem), None)

    def graph_key(self) -> Hashable:
        seen = self.matrix == self.shape or self.shape[1:]
        return type(self), self.row.graph_key(), self.col.graph_key(), seen, self.rows is None or self


def flattened(x: Tensor, matrix: Shape, shape: Shape) -> Tensor:
    """Rows of a parameter as rows of its matrices. One that is such already is left alone: a graph fits all shapes."""
    return x if matrix == shape else x.reshape(-1, *matrix[1:])


def unflattened(x: Tensor, matrix: Shape, shape: Shape) -> Tensor:
    """And back."""
    return x if matrix == shape else x.reshape(-1, *shape[1:])


def _own_names(found: Held, factor: str) -> list[str]:
    return [key[len(factor) + 1 :] for key in found if key == factor or key.startswith(f"{factor}.")]


def _fits(stored: Format, found: Held) -> bool:
    return {each.name: each.shape for each in stored.buffers} == {k: tuple(t.shape) for k, t in found.items()}


def _part(held: Held, name: str, factor: Format) -> dict[str, Tensor]:
    return {buffer: held[joined(name, buffer)] for buffer, _ in factor.keys}


def _blend(factor: Format, held: Held, rows: slice, x: Tensor, keep: Scalar, add: Scalar, rounding: Rounding) -> None:
    factor.encode(held, rows, factor.decode(held, rows) * keep + x * add, rounding)


class Factored(Codec):
    name = "factored"
    bits = 32
    factored = True
    inner: type[Format] = FP32Format
    dense: Codec = FP32()
    """What a vector gets."""

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
    name = "factored-bf16"
    bits = 16
    inner = BF16Format
    dense = BF16()


class FactoredInt8(Factored):
    name = "factored-int8"
    bits = 8
    inner = Int8Format
    dense = Int8()
