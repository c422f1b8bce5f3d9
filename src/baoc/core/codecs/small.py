"""Formats for small models: they save memory in tensors of any size, with rows of any length.

The other formats keep tensors below 4096 elements in fp32, or pad short rows. That does not matter in a large model. In
a model that consists of such tensors (a field, tables of short rows, directly optimized points), it leaves a budget no
choice but rules without state. C and Triton know ``bf16a``; the others run in torch operations or compiled.

**fp8.** A code is the upper bits of an fp32 number, counted from a fixed exponent, so elements share nothing and even
vectors can have it. Large matrices are stored as int8, whose exponents adapt. A signed slot has a sign and two mantissa
bits over 32 octaves, from 2^-25 to 2^7, and below them equal steps down to zero, which are smaller than Adam's usual
eps of 1e-8. An unsigned slot has two mantissa bits over 64 octaves, from 2^-50 to 2^14, the squares of the former.
Larger numbers get the largest code, which amounts to clipping gradients at about 100. Codes are far apart, but
dithered: averages over steps are right.

**int4a.** As int4, but groups have at most 32 elements and end with their row, and a scale is a bf16 number. It is
dithered as well, and the largest element of a group always has the top code.

**log4.** For a second moment: an element is zero or one of 15 powers of two, counted down from the largest element of
its group, so each element keeps a second moment of its own where a factored one costs something
(`docs/results/zoo.md`). Groups are those of int4a. The scale is the largest element, not a power of two: when all
elements decay alike, the scale does, and codes stay as they are. Smaller elements have the smallest code, because a
smaller one would divide a momentum by next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.core.codecs.base import BF16, BF16Format, Codec, Format, Held
from baoc.core.codecs.quantized import (
    INT4_GROUP,
    INT4_SMALLEST_SCALE,
    INT4_TOP,
    MANTISSA,
    Grid,
    Int4,
    Int4Format,
    Int8Format,
    fits,
    with_equal_steps,
)
from baoc.core.rounding import Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Shape, Slot

SHORT_GROUP = 32
MIN_SHORT_ROW = 4
"""Shorter rows are stored as bf16: with a scale of their own, they would not be smaller."""

_SIGNED, _UNSIGNED = Grid(mantissa=2, count=128), Grid(mantissa=2, count=256)
_TOP_SIGNED, _TOP_UNSIGNED = 127 + 6, 127 + 13  # biased exponents of the last octave
_LOG4_TOP, _BIAS = 15, 127
_BF16_MOST = torch.finfo(torch.bfloat16).max
_NOISE = 16  # bits
_SHUFFLE = 0x9E37  # odd, so that multiples of it modulo 2^16 are a permutation


@dataclass(frozen=True)
class FP8Format(Format):
    """One code per element: a float of 8 bits with a wide range."""

    view_dims = 1

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("", self.held_shape, torch.int8 if self.slot.signed else torch.uint8),)

    def decode(self, held: Held, rows: slice) -> Tensor:
        codes, grid = held[""][rows].int(), self._grid
        base = self._base(codes)
        number = ((codes.abs() << grid.dropped) + base).view(torch.float32)
        if not self.slot.signed:
            return torch.where(codes > 0, number, 0.0)
        size = torch.minimum(number, 2 * (number - base.view(torch.float32)))  # see with_equal_steps
        return torch.where(codes < 0, -size, size)

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        grid, size = self._grid, value.abs().contiguous()
        base = self._base(size)
        bits = with_equal_steps(size, size.view(torch.int32), base) if self.slot.signed else size.view(torch.int32)
        above = (bits - base).clamp(min=0)
        noise = rounding.noise(rows.start, tuple(value.shape), value.device) << (grid.dropped - _NOISE)
        code = (above + noise) >> grid.dropped
        if self.slot.signed:
            code = code.clamp(max=grid.count - 1)
            code = torch.where(value < 0, -code, code)
        else:  # v must not become zero under a nonzero momentum, so its smallest code is above zero
            code = torch.where(value > 0, code.clamp(1, grid.count - 1), 0)
        held[""][rows].copy_(code)

    @property
    def _grid(self) -> Grid:
        return _SIGNED if self.slot.signed else _UNSIGNED

    def _base(self, like: Tensor) -> Tensor:
        """Return the bits of the number from which codes count, as an int32 tensor of no dims."""
        top = _TOP_SIGNED if self.slot.signed else _TOP_UNSIGNED
        return self._grid.base(torch.full((), top, dtype=torch.int32, device=like.device))

    def problem(self, held: Held) -> str | None:
        return "a code of -128" if self.slot.signed and bool((held[""] == -128).any()) else None

    def graph_key(self) -> Hashable:
        return type(self), self.slot.signed


@dataclass(frozen=True)
class ShortInt4Format(Int4Format):
    """Two codes per byte and one bf16 scale per group of up to 32, which ends with its row."""

    scale_dtype = torch.bfloat16

    @property
    def group(self) -> int:
        return min(SHORT_GROUP, self.row + self.row % 2)

    def _scales(self, top: Tensor, noise: Tensor) -> Tensor:
        return dithered_scales(top, noise)

    def _settled(self, code: Tensor, is_top: Tensor, scales: Tensor) -> Tensor:
        # Storing a decoded group again must find the same scale, so one element has to be as large as it.
        code = code.clamp(max=INT4_TOP)
        return torch.where(is_top & (scales > INT4_SMALLEST_SCALE), INT4_TOP, code)


@dataclass(frozen=True)
class Log4Format(ShortInt4Format):
    """The same bytes as :class:`ShortInt4Format`, with powers of two as codes."""

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        x = self._grouped(value)  # (rows, groups, group)
        noise = self._grouped(rounding.noise(rows.start, tuple(value.shape), value.device))
        top = x.amax(-1, keepdim=True)
        scales = dithered_scales(top, noise[..., :1])
        # mantissas count linearly from one power of two to the next, so noise carries with the right frequency
        share = (x / scales.clamp(min=INT4_SMALLEST_SCALE)).clamp(max=1.0).view(torch.int32)
        code = ((share + (noise << (MANTISSA - _NOISE))) >> MANTISSA) + _LOG4_TOP - _BIAS
        # Storing a decoded group again must find the same scale, so one element has to be as large as it.
        code = torch.where(x == top, _LOG4_TOP, code.clamp(1, _LOG4_TOP))
        self._store(held, rows, torch.where(x > 0, code, 0), scales)

    def _level(self, nibbles: Tensor) -> Tensor:
        sizes = ((nibbles.int() - _LOG4_TOP + _BIAS) << MANTISSA).view(torch.float32)
        return torch.where(nibbles > 0, sizes, 0.0)

    def underflowed(self, held: Held, rows: slice) -> Tensor:
        codes = self._nibbles(held, rows)
        return (codes == 1).sum(-1) * 2 > (codes > 0).sum(-1)  # the smallest code stands for all smaller numbers


def dithered_scales(top: Tensor, noise: Tensor) -> Tensor:
    """Return the scales of groups as numbers that bf16 can hold, in fp32.

    As in :class:`BF16Format`, noise carries from the lower half of the bits into the upper half with the right
    frequency. It is shuffled, because the first element of the group rounds with it too.

    Args:
        top: largest magnitudes of groups.
        noise: of each group's first element.
    """
    bits = top.clamp(min=INT4_SMALLEST_SCALE).view(torch.int32)
    dithered = ((bits + (noise * _SHUFFLE & 0xFFFF)) & -0x10000).view(torch.float32)
    return dithered.clamp(max=_BF16_MOST) * (top > 0)


class BF16Any(BF16):
    """16 bits per element in tensors of any size."""

    name = "bf16a"

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        return BF16Format(slot, shape, rows)


class FP8(Codec):
    """8 bits per element: as int8, but as floats in small tensors, vectors and short rows."""

    name = "fp8"
    bits = 8

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        is_grouped = fits(shape) and math.prod(shape) >= SMALL_NUMEL
        return (Int8Format if is_grouped else FP8Format)(slot, shape, rows)


class Int4Any(Int4):
    """4 bits per element of a signed slot: as int4 where that is as small, and packed in small or short matrices."""

    name = "int4a"

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        if len(shape) < 2 or math.prod(shape[1:]) < MIN_SHORT_ROW:
            return BF16Format(slot, shape, rows)
        is_grouped = math.prod(shape) >= SMALL_NUMEL and math.prod(shape[1:]) % INT4_GROUP == 0
        return (Int4Format if is_grouped else ShortInt4Format)(slot, shape, rows)


class Log4(Codec):
    """4 bits per element of a second moment in matrices of any size. Vectors and short rows are stored as fp8."""

    name = "log4"
    bits = 4

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        is_short = len(shape) < 2 or math.prod(shape[1:]) < MIN_SHORT_ROW
        return (FP8Format if is_short else Log4Format)(slot, shape, rows)

    def refusal(self, slot: Slot) -> str | None:
        return f"it stores powers of two, and {slot.name!r} has signs" if slot.signed else None
