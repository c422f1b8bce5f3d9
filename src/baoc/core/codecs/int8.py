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
from baoc.core.rounding import Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Shape, Slot

GROUP = 256
MIN_ROW = 8
"""Rows shorter than this (vectors too: their rows are single elements) have too little in common to share numbers."""

LEAST_EXPONENT, MOST_EXPONENT = 32, 254
"""Of a group, biased as fp32's are: below, the smallest code of v would not be a normal number. Their distance from the
least is stored, so a group of zeros has a zero there too."""

_MANTISSA = 23  # bits of fp32
_NOISE = 16  # bits
_SIGNED_STEP, _UNSIGNED_STEP = _MANTISSA - 4, _MANTISSA - 3
"""Bits of fp32 that are dropped: codes stand for multiples of ``1 << step`` among fp32's bits."""
_LINEAR_OCTAVE = 7
"""So far below a group's exponent stands the code 0 of m, if it were the power of two that its bits say."""
_LARGEST = {True: 127, False: 255}


@dataclass(frozen=True)
class Int8Format(Format):
    view_dims = 2

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        shape = self.held_shape
        groups = -(-math.prod(shape[1:]) // GROUP)
        return (
            Buffer("codes", shape, torch.int8 if self.slot.signed else torch.uint8),
            Buffer("exponents", (shape[0], groups), torch.uint8),
        )

    def decode(self, held: Held, rows: slice) -> Tensor:
        codes = held["codes"][rows]
        grouped = to_groups(codes.int())  # (rows, groups, width)
        exponents = held["exponents"][rows].int().unsqueeze(-1) + LEAST_EXPONENT  # (rows, groups, 1)
        if not self.slot.signed:
            bits = (grouped << _UNSIGNED_STEP) + _unsigned_base(exponents)
            return from_groups(torch.where(grouped > 0, bits.view(torch.float32), 0.0), codes.shape)
        base = _signed_base(exponents)
        number = ((grouped.abs() << _SIGNED_STEP) + base).view(torch.float32)
        size = torch.minimum(number, 2 * (number - base.view(torch.float32)))
        return from_groups(torch.where(grouped < 0, -size, size), codes.shape)

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        codes, signed = held["codes"][rows], self.slot.signed
        step = _SIGNED_STEP if signed else _UNSIGNED_STEP
        grouped = to_groups(value)  # (rows, groups, width)
        noise = to_groups(rounding.noise(rows.start, tuple(value.shape), value.device)) << (step - _NOISE)
        size = grouped.abs()
        bits = size.view(torch.int32)
        exponents = (bits + noise).amax(-1, keepdim=True) >> _MANTISSA
        exponents = exponents.clamp(LEAST_EXPONENT, MOST_EXPONENT)
        if signed:
            base = _signed_base(exponents)
            # half of it above half of where equal steps end: an octave lower than the bits of all that is not below
            linear = (size * 0.5 + base.view(torch.float32)).view(torch.int32)
            code = (torch.maximum(bits, linear) + noise - base) >> step
        else:
            code = (bits + noise - _unsigned_base(exponents)) >> step
        code = code.clamp(max=_LARGEST[signed])
        if signed:
            code = torch.where(grouped < 0, -code, code)
        else:  # v must never become zero under a momentum that is not: its smallest code is above zero
            code = torch.where(grouped > 0, code.clamp(min=1), 0)
        codes.copy_(from_groups(code, codes.shape))
        held["exponents"][rows].copy_(exponents.squeeze(-1) - LEAST_EXPONENT)

    def problem(self, held: Held) -> str | None:
        most = MOST_EXPONENT - LEAST_EXPONENT
        return f"exponents above {most}" if bool((held["exponents"] > most).any()) else None

    def graph_key(self) -> Hashable:
        return type(self), self.slot.signed


def _signed_base(exponents: Tensor) -> Tensor:
    """The bits from which codes of m count. As a float, half of where equal steps end."""
    return (exponents - _LINEAR_OCTAVE) << _MANTISSA


def _unsigned_base(exponents: Tensor) -> Tensor:
    """The bits from which codes of v count: those of its largest code end the octave of the group."""
    return ((exponents + 1) << _MANTISSA) - (1 << 8 + _UNSIGNED_STEP)


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
    return (F.pad(flat, (0, padding)) if padding else flat).view(x.shape[0], -1, GROUP)


def from_groups(x: Tensor, shape: torch.Size) -> Tensor:
    return x.flatten(1)[:, : math.prod(shape[1:])].view(shape)
