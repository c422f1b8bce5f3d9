"""Eight bits per element: a small float, with one exponent byte per group of up to 256 elements.

A code is the upper bits of an fp32 number, counted from the exponent of its group. ``v`` has 3 mantissa bits over 32
octaves below the group's largest number. ``m`` has a sign and 4 mantissa bits over 7 octaves, and below them, as
subnormal numbers have, equal steps down to zero. Adding noise to the bits that are dropped is dithering in the value
domain, within an octave and across its edge: neither way takes a root, a division or a table. A group's exponent is
that of its largest number *once rounded*, so a carry into the next octave is kept, and what was stored is stored alike
again. The choice is by measurement: see ``docs/results/int8_formats.md``.

Groups run along the flattened trailing dims of each dim-0 row and never cross rows: a shard on dim 0 holds whole
groups, so a plan means the same on one process and on many.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baoc.core.codecs.base import Codec, Format, Held
from baoc.core.codecs.dense import BF16Format, FP32Format
from baoc.core.rounding import NEAREST, Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Shape, Slot

GROUP = 256
MIN_ROW = 8
"""Rows shorter than this (vectors too: their rows are single elements) have too little in common to share numbers."""

SPARSE = 16
"""A group of which no more than one element in so many has a code other than zero is strained."""

LEAST_EXPONENT, MOST_EXPONENT = 32, 253
"""Of a group, biased as fp32's are: the smallest code of v must be a normal number and the largest of m a finite one.
The distance from the least is stored, so a group of zeros has a zero there too."""

MANTISSA = 23  # bits of fp32
_NOISE = 16  # bits
_ADOPTED_NUMEL = 1 << 20  # elements at once


@dataclass(frozen=True)
class Grid:
    """Which fp32 numbers have codes: ``count`` of them, up to the end of the group's octave."""

    mantissa: int  # bits that are kept
    count: int

    @property
    def dropped(self) -> int:
        """Bits of fp32 that are not kept."""
        return MANTISSA - self.mantissa

    def base(self, exponents: Tensor) -> Tensor:
        """The bits of fp32 from which codes count."""
        return ((exponents + 1) << MANTISSA) - (self.count << self.dropped)


SIGNED = Grid(mantissa=4, count=128)
UNSIGNED = Grid(mantissa=3, count=256)


@dataclass(frozen=True)
class Int8Format(Format):
    groups = True
    view_dims = 2

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        shape = self.held_shape
        groups = -(-math.prod(shape[1:]) // GROUP)
        return (
            Buffer("codes", shape, torch.int8 if self.slot.signed else torch.uint8),
            Buffer("exponents", (shape[0], groups), torch.uint8),
        )

    @property
    def grid(self) -> Grid:
        return SIGNED if self.slot.signed else UNSIGNED

    def decode(self, held: Held, rows: slice) -> Tensor:
        codes = held["codes"][rows]
        grouped = to_groups(codes.int())  # (rows, groups, width)
        exponents = held["exponents"][rows].int().unsqueeze(-1) + LEAST_EXPONENT  # (rows, groups, 1)
        base = self.grid.base(exponents)
        number = ((grouped.abs() << self.grid.dropped) + base).view(torch.float32)
        if self.slot.signed:
            size = torch.minimum(number, 2 * (number - base.view(torch.float32)))  # see _with_equal_steps
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
            bits = _with_equal_steps(size, bits, base)
        code = (bits + noise - base) >> grid.dropped
        if self.slot.signed:
            code = torch.where(grouped < 0, -code, code).clamp(-128, 127)
        else:  # v must never become zero under a momentum that is not: its smallest code is above zero
            code = torch.where(grouped > 0, code.clamp(1, 255), 0)
        codes.copy_(from_groups(code, codes.shape))
        held["exponents"][rows].copy_(exponents.squeeze(-1) - LEAST_EXPONENT)

    def adopted(self, found: Held) -> dict[str, Tensor] | None:
        """From companded codes with one fp32 scale per group: squares, or for v fourth powers, of shares of it."""
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        if shapes != {"codes": self.held_shape, "scales": self.buffers[1].shape}:
            return None
        held = self.zeros(found["codes"].device)
        height = max(1, _ADOPTED_NUMEL // max(1, math.prod(self.held_shape[1:])))
        for start in range(0, self.held_shape[0], height):
            rows = slice(start, min(start + height, self.held_shape[0]))
            share = found["codes"][rows].float() / (127 if self.slot.signed else 255)
            raised = share * share.abs() if self.slot.signed else share.square().square()
            value = to_groups(raised) * found["scales"][rows].unsqueeze(-1)
            self.encode(held, rows, from_groups(value, share.shape), NEAREST)
        return held

    def problem(self, held: Held) -> str | None:
        most = MOST_EXPONENT - LEAST_EXPONENT
        return f"exponents above {most}" if bool((held["exponents"] > most).any()) else None

    def strained(self, held: Held, rows: slice) -> Tensor:
        codes = to_groups(held["codes"][rows])  # (rows, groups, width)
        used = (codes != 0).sum(-1)
        is_at_end = held["exponents"][rows] == MOST_EXPONENT - LEAST_EXPONENT
        if self.slot.signed:
            return is_at_end | ((used > 0) & (used * SPARSE <= codes.shape[-1]))
        return is_at_end | ((codes == 1).sum(-1) * 2 > used)  # v's smallest code stands for all that is smaller

    def graph_key(self) -> Hashable:
        return type(self), self.slot.signed


def _with_equal_steps(size: Tensor, bits: Tensor, base: Tensor) -> Tensor:
    """The bits of a size, but that the lowest octave of codes goes down to zero in equal steps.

    It begins at ``base``, read as a float, and would go up to twice that. There ``x`` has the bits of ``base + x / 2``,
    which are larger than its own there and nowhere above: the larger ones are right everywhere.
    """
    return torch.maximum(bits, (size * 0.5 + base.view(torch.float32)).view(torch.int32))


class Int8(Codec):
    name = "int8"
    bits = 8

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        if math.prod(shape) < SMALL_NUMEL:
            return FP32Format(slot, shape, rows)
        return (Int8Format if fits(shape) else BF16Format)(slot, shape, rows)


def fits(shape: Shape) -> bool:
    """Rows are long enough to share scales."""
    return len(shape) > 1 and math.prod(shape[1:]) >= MIN_ROW


def to_groups(x: Tensor) -> Tensor:
    """(rows, *trailing) -> (rows, groups, width), the last group padded with zeros."""
    flat = x.flatten(1)
    if flat.shape[1] <= GROUP:
        return flat.unsqueeze(1)
    padding = (GROUP - flat.shape[1] % GROUP) % GROUP
    groups = (flat.shape[1] + padding) // GROUP  # not -1: a shard may have no rows
    return (F.pad(flat, (0, padding)) if padding else flat).view(x.shape[0], groups, GROUP)


def from_groups(x: Tensor, shape: torch.Size) -> Tensor:
    return x.flatten(1)[:, : math.prod(shape[1:])].view(shape)
