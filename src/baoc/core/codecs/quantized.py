"""Quantized formats: int8 with one exponent byte per group of up to 256 elements, and int4 with one fp32 scale per 64.

**int8.** A code is the upper bits of an fp32 number, counted from the exponent of its group. An unsigned slot has 3
mantissa bits over the 32 octaves below the group's largest number. A signed slot has a sign and 4 mantissa bits over 7
octaves, and below them equal steps down to zero, like subnormal numbers. Adding noise to the bits that are dropped is
dithering of the value, within an octave and across its edge, without a root, a division or a table. The exponent of a
group is that of its largest number *after rounding*, so a carry into the next octave is kept, and storing a decoded
value again gives the same bytes. ``docs/results/int8_formats.md`` has the measurements behind this choice.

**int4.** A signed slot only: two codes per byte, linear and dithered, because the large elements of a momentum matter
most. Byte ``j`` of a group holds elements ``j`` and ``j + 32``, so each half of the bits is a run of elements. The last
group of a row is padded, and the padding is counted. Rows so short that int8 would be smaller are stored as int8.

Groups run along the flattened trailing dims of each dim-0 row and never cross rows. So a shard on dim 0 holds whole
groups, and a plan means the same for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from baoc.core.codecs.base import BF16Format, Codec, Format, FP32Format, Held
from baoc.core.rounding import NOISE_ONE, Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Shape, Slot

INT8_GROUP = 256
MIN_ROW = 8
"""Shorter rows are not grouped. The rows of a vector are single elements."""

SPARSE = 16
"""A group has underflowed if at most one of this many elements has a nonzero code."""

LEAST_EXPONENT, MOST_EXPONENT = 32, 253
"""Exponents of a group, biased as in fp32: the smallest code of an unsigned slot must be a normal number, and the
largest of a signed slot a finite one. The distance from the least is stored, so a group of zeros stores a zero."""

MANTISSA = 23  # bits of fp32
_NOISE = 16  # bits


@dataclass(frozen=True)
class Grid:
    """The fp32 numbers that have codes: ``count`` of them, up to the end of the group's octave.

    Args:
        mantissa: mantissa bits that are kept.
        count: number of codes.
    """

    mantissa: int
    count: int

    @property
    def dropped(self) -> int:
        """Mantissa bits of fp32 that are dropped."""
        return MANTISSA - self.mantissa

    def base(self, exponents: Tensor) -> Tensor:
        """Return the bits of the fp32 number from which codes count, as int32.

        Args:
            exponents: biased exponent of each group, as int32.
        """
        return ((exponents + 1) << MANTISSA) - (self.count << self.dropped)


SIGNED = Grid(mantissa=4, count=128)
UNSIGNED = Grid(mantissa=3, count=256)


@dataclass(frozen=True)
class Int8Format(Format):
    """One code per element and one exponent per group of up to 256."""

    groups = True
    view_dims = 2

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        shape = self.held_shape
        groups = -(-math.prod(shape[1:]) // INT8_GROUP)
        return (
            Buffer("codes", shape, torch.int8 if self.slot.signed else torch.uint8),
            Buffer("exponents", (shape[0], groups), torch.uint8),
        )

    @property
    def grid(self) -> Grid:
        """The numbers that have codes."""
        return SIGNED if self.slot.signed else UNSIGNED

    def decode(self, held: Held, rows: slice) -> Tensor:
        codes = held["codes"][rows]
        grouped = to_groups(codes.int())  # (rows, groups, width)
        exponents = held["exponents"][rows].int().unsqueeze(-1) + LEAST_EXPONENT  # (rows, groups, 1)
        base = self.grid.base(exponents)
        number = ((grouped.abs() << self.grid.dropped) + base).view(torch.float32)
        if self.slot.signed:
            size = torch.minimum(number, 2 * (number - base.view(torch.float32)))  # see with_equal_steps
            value = torch.where(grouped < 0, -size, size)
        else:
            value = torch.where(grouped > 0, number, 0.0)
        return from_groups(value, codes.shape)

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        codes, grid = held["codes"][rows], self.grid
        grouped = to_groups(value)  # (rows, groups, width)
        noise = to_groups(rounding.noise(rows.start, tuple(value.shape), value.device)) << (grid.dropped - _NOISE)
        size = grouped.abs()
        bits = size.view(torch.int32)
        exponents = (bits + noise).amax(-1, keepdim=True) >> MANTISSA
        exponents = exponents.clamp(LEAST_EXPONENT, MOST_EXPONENT)
        base = grid.base(exponents)
        if self.slot.signed:
            bits = with_equal_steps(size, bits, base)
        above = bits - base
        if rounding.idle is not None:
            noise = torch.where(to_groups(rounding.idle), torch.minimum(noise, above >> rounding.idle_shift), noise)
        code = (above + noise) >> grid.dropped
        if self.slot.signed:
            code = torch.where(grouped < 0, -code, code).clamp(-128, 127)
        else:  # v must not become zero under a nonzero momentum, so its smallest code is above zero
            code = torch.where(grouped > 0, code.clamp(1, 255), 0)
        codes.copy_(from_groups(code, codes.shape))
        held["exponents"][rows].copy_(exponents.squeeze(-1) - LEAST_EXPONENT)

    def problem(self, held: Held) -> str | None:
        most = MOST_EXPONENT - LEAST_EXPONENT
        return f"exponents above {most}" if bool((held["exponents"] > most).any()) else None

    def underflowed(self, held: Held, rows: slice) -> Tensor:
        codes = to_groups(held["codes"][rows])  # (rows, groups, width)
        used = (codes != 0).sum(-1)
        is_at_end = held["exponents"][rows] == MOST_EXPONENT - LEAST_EXPONENT
        if self.slot.signed:
            return is_at_end | ((used > 0) & (used * SPARSE <= codes.shape[-1]))
        return is_at_end | ((codes == 1).sum(-1) * 2 > used)  # the smallest code stands for all smaller numbers

    def graph_key(self) -> Hashable:
        return type(self), self.slot.signed


def with_equal_steps(size: Tensor, bits: Tensor, base: Tensor) -> Tensor:
    """Return the bits of a size, with equal steps down to zero in the lowest octave of codes.

    That octave starts at ``base``, read as a float. In it, ``x`` gets the bits of ``base + x / 2``. They are larger
    than its own bits below ``2 * base``, and smaller above, so the maximum of the two is right everywhere.
    """
    return torch.maximum(bits, (size * 0.5 + base.view(torch.float32)).view(torch.int32))


class Int8(Codec):
    """8 bits per element. Rows shorter than 8 are stored as bf16."""

    name = "int8"
    bits = 8

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        if math.prod(shape) < SMALL_NUMEL:
            return FP32Format(slot, shape, rows)
        return (Int8Format if fits(shape) else BF16Format)(slot, shape, rows)


class Int8Any(Int8):
    """8 bits per element in matrices of any size, for models that consist of small ones."""

    name = "int8a"

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        return Int8Format(slot, shape, rows) if fits(shape) else super().at(shape, slot, rows)


def fits(shape: Shape) -> bool:
    """Return whether the rows of a shape are long enough for groups."""
    return len(shape) > 1 and math.prod(shape[1:]) >= MIN_ROW


def to_groups(x: Tensor) -> Tensor:
    """Split rows into int8 groups.

    Args:
        x: shape ``(rows, *trailing)``.

    Returns:
        Shape ``(rows, groups, width)``, the last group padded with zeros.
    """
    flat = x.flatten(1)
    if flat.shape[1] <= INT8_GROUP:
        return flat.unsqueeze(1)
    padding = (INT8_GROUP - flat.shape[1] % INT8_GROUP) % INT8_GROUP
    groups = (flat.shape[1] + padding) // INT8_GROUP  # not -1: a shard may have no rows
    return (F.pad(flat, (0, padding)) if padding else flat).view(x.shape[0], groups, INT8_GROUP)


def from_groups(x: Tensor, shape: torch.Size) -> Tensor:
    """Undo :func:`to_groups`.

    Args:
        x: shape ``(rows, groups, width)``.
        shape: the shape ``(rows, *trailing)`` to return.
    """
    return x.flatten(1)[:, : math.prod(shape[1:])].view(shape)


INT4_GROUP = 64
INT4_HALF = INT4_GROUP // 2
INT4_TOP = 7
INT4_ZERO = 8  # added to a code in [-7, 7] to make it a nibble
INT4_SMALLEST_SCALE = 2.0**-100
"""With a smaller scale, the inverse would overflow."""


@dataclass(frozen=True)
class Int4Format(Format):
    """Two codes per byte and one fp32 scale per group of 64."""

    groups = True
    scale_dtype: ClassVar[torch.dtype] = torch.float32

    @property
    def row(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def group(self) -> int:
        """Number of elements that share a scale, an even number."""
        return INT4_GROUP

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        rows, groups = self.held_shape[0], -(-self.row // self.group)
        codes = Buffer("codes", (rows, groups * self.group // 2), torch.uint8)
        return codes, Buffer("scales", (rows, groups), self.scale_dtype)

    def decode(self, held: Held, rows: slice) -> Tensor:
        scales = held["scales"][rows].float().unsqueeze(-1)
        value = self._level(self._nibbles(held, rows)) * scales  # (rows, groups, group)
        return value.flatten(1)[:, : self.row].view(-1, *self.shape[1:])

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        x = self._grouped(value)  # (rows, groups, group)
        noise = self._grouped(rounding.noise(rows.start, tuple(value.shape), value.device))
        top = x.abs().amax(-1, keepdim=True)
        scales = self._scales(top, noise[..., :1])
        level = x.abs() * (INT4_TOP / scales.clamp(min=INT4_SMALLEST_SCALE))
        if rounding.idle is not None:
            most = (level * (NOISE_ONE >> rounding.idle_shift)).floor()
            noise = torch.where(self._grouped(rounding.idle), torch.minimum(noise, most), noise)
        code = level.floor()
        code = self._settled(code + ((level - code) * NOISE_ONE + noise >= NOISE_ONE), x.abs() == top, scales)
        self._store(held, rows, torch.where(x < 0, -code, code) + INT4_ZERO, scales)

    def _nibbles(self, held: Held, rows: slice) -> Tensor:
        """Return the stored codes in [0, 15], uint8, shape ``(rows, groups, group)``."""
        packed = held["codes"][rows]
        halves = packed.view(packed.shape[0], -(-self.row // self.group), 1, self.group // 2)
        return torch.cat((halves & 15, halves >> 4), 2).flatten(2)

    def _store(self, held: Held, rows: slice, nibbles: Tensor, scales: Tensor) -> None:
        """Store codes in [0, 15], shape ``(rows, groups, group)``, and scales, shape ``(rows, groups, 1)``."""
        low, high = nibbles.to(torch.uint8).tensor_split(2, -1)  # (rows, groups, group / 2)
        held["codes"][rows].copy_((low | high << 4).flatten(1))
        held["scales"][rows].copy_(scales.squeeze(-1))

    def _level(self, nibbles: Tensor) -> Tensor:
        """Return what codes stand for, as a share of the scale: exactly 1 for the top code."""
        return (nibbles.float() - INT4_ZERO) * (1.0 / INT4_TOP)

    def _scales(self, top: Tensor, noise: Tensor) -> Tensor:
        """Return the scales of groups, in fp32, from their largest magnitudes."""
        return top.clamp(min=INT4_SMALLEST_SCALE) * (top > 0)

    def _settled(self, code: Tensor, is_top: Tensor, scales: Tensor) -> Tensor:
        """Return magnitudes of codes, with the largest element of each group on the top code."""
        return code  # which it has, because it is the scale

    def _grouped(self, x: Tensor) -> Tensor:
        groups = -(-self.row // self.group)  # not -1 in the view: a shard may have no rows
        return F.pad(x.flatten(1), (0, -self.row % self.group)).view(x.shape[0], groups, self.group)

    def problem(self, held: Held) -> str | None:
        scales = held["scales"]
        return None if bool((scales.isfinite() & (scales >= 0)).all()) else "scales that are not finite numbers >= 0"

    def underflowed(self, held: Held, rows: slice) -> Tensor:
        used = (self._nibbles(held, rows) != INT4_ZERO).sum(-1)
        return (held["scales"][rows] > 0) & (used > 0) & (used * SPARSE <= self.group)

    def graph_key(self) -> Hashable:
        return type(self), self.shape[1:]


class Int4(Codec):
    """4 bits per element of a signed slot."""

    name = "int4"
    bits = 4

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        wider = Int8()
        if len(shape) < 2 or math.prod(shape) < SMALL_NUMEL:
            return wider.at(shape, slot, rows)
        is_smaller = Int4Format(slot, shape).nbytes < wider.at(shape, slot).nbytes
        return Int4Format(slot, shape, rows) if is_smaller else wider.at(shape, slot, rows)

    def refusal(self, slot: Slot) -> str | None:
        return None if slot.signed else f"it is linear, and {slot.name!r} spans too many orders of magnitude"
