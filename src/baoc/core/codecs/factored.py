"""Adafactor's rank-1 format: the means of a non-negative slot over its last dim and over its second-to-last one.

The means are linear in the slot, so blending them is the same as blending the slot and taking the means again: this
codec advances by itself and never builds the full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from baoc.core.codecs.dense import BF16, FP32
from baoc.core.codecs.int8 import Int8
from baoc.core.spec import SMALL_NUMEL, Buffer, Codec, Rounding, Scalar, Shape, Slot, WholeCodec


class Factored(WholeCodec):
    name = "factored"
    bits = 32
    inner: Codec = FP32()
    """How the two factors are stored."""

    def resolve(self, shape: Shape) -> Codec:
        if len(shape) < 2:
            return self.inner.resolve(shape)
        return self if math.prod(shape) >= SMALL_NUMEL else Factored()

    def layout(self, shape: Shape, slot: Slot) -> tuple[Buffer, ...]:
        row, col = shape[:-1], shape[:-2] + shape[-1:]
        return tuple(
            Buffer(_join(factor, buffer.name), buffer.shape, buffer.dtype)
            for factor, factor_shape in (("row", row), ("col", col))
            for buffer in self._factor_codec(factor_shape).layout(factor_shape, slot)
        )

    def expand(self, buffers: Mapping[str, Tensor], rows: slice, mean_floor: Scalar) -> Tensor:
        row = self._read(buffers, "row", rows)  # (rows, *batch, R) or (rows,)
        col = self._read(buffers, "col", rows if row.dim() > 1 else slice(None))  # (rows, *batch, C) or (C,)
        # Both factors have the same grand mean; the column's is the one that every shard on dim 0 knows.
        col = col / col.mean(-1, keepdim=True).clamp(min=mean_floor)
        return row.unsqueeze(-1) * col.unsqueeze(-2)

    def encode(self, buffers: Mapping[str, Tensor], rows: slice, value: Tensor, rounding: Rounding) -> None:
        partial = self.absorb(buffers, rows, value, 0.0, 1.0, rounding, None)
        self.finish(buffers, 0.0, 1.0, rounding, partial)

    def absorb(
        self,
        buffers: Mapping[str, Tensor],
        rows: slice,
        x: Tensor,
        keep: Scalar,
        add: Scalar,
        rounding: Rounding,
        partial: Tensor | None,
    ) -> Tensor | None:
        self._blend(buffers, "row", rows, x.mean(-1), keep, add, rounding)
        if x.dim() > 2:  # dim 0 is a batch dim: its rows have columns of their own
            self._blend(buffers, "col", rows, x.mean(-2), keep, add, rounding)
            return None
        # Rows are divided before they are summed, so that a shard's partial sums can be added up as they are.
        share = x.sum(0) / buffers["row"].shape[0]  # (C,)
        return share if partial is None else partial + share

    def finish(
        self, buffers: Mapping[str, Tensor], keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None
    ) -> None:
        if partial is not None:
            self._blend(buffers, "col", slice(0, partial.shape[0]), partial, keep, add, rounding)

    def _factor_codec(self, shape: Shape) -> Codec:
        # The parameter as a whole decides what counts as small; a factor only needs rows that int8 can group.
        return BF16() if isinstance(self.inner, Int8) and not Int8.fits(shape) else self.inner

    def _read(self, buffers: Mapping[str, Tensor], factor: str, rows: slice) -> Tensor:
        codec, stored = _stored(buffers, factor)
        return codec.decode(stored, rows)

    def _blend(
        self,
        buffers: Mapping[str, Tensor],
        factor: str,
        rows: slice,
        x: Tensor,
        keep: Scalar,
        add: Scalar,
        rounding: Rounding,
    ) -> None:
        codec, stored = _stored(buffers, factor)
        codec.encode(stored, rows, codec.decode(stored, rows) * keep + x * add, Rounding(rounding.phase))


class FactoredBF16(Factored):
    name = "factored-bf16"
    bits = 16
    inner = BF16()


class FactoredInt8(Factored):
    name = "factored-int8"
    bits = 8
    inner = Int8()


def _join(factor: str, buffer: str) -> str:
    return f"{factor}.{buffer}" if buffer else factor


def _stored(buffers: Mapping[str, Tensor], factor: str) -> tuple[Codec, dict[str, Tensor]]:
    """The codec a factor is stored with, read off its buffers, and those buffers under the codec's own names."""
    if factor in buffers:
        return (BF16() if buffers[factor].dtype == torch.bfloat16 else FP32()), {"": buffers[factor]}
    return Int8(), {name: buffers[_join(factor, name)] for name in ("codes", "scales")}
