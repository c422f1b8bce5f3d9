"""Four bits per element of a signed slot: two codes per byte, one fp32 scale per group of 64.

Codes are linear and dithered, as those of a momentum may be: what matters of it are its large elements. Byte ``j`` of a
group holds its elements ``j`` and ``j + 32``, so that either half of the bytes' bits is a run of elements. The last
group of a row is padded, and the padding is counted; rows so short that int8 would be smaller are int8.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from baoc.core.codecs.base import Codec, Format, Held
from baoc.core.codecs.int8 import SPARSE, Int8
from baoc.core.rounding import NOISE_ONE, Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Shape, Slot

GROUP = 64
HALF = GROUP // 2
TOP = 7
ZERO = 8  # what is added to a code in [-7, 7] to make it a nibble
SMALLEST_SCALE = 2.0**-100
"""Below it, codes per unit would overflow."""


@dataclass(frozen=True)
class Int4Format(Format):
    groups = True

    @property
    def row(self) -> int:
        """Elements in a row."""
        return math.prod(self.shape[1:])

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        rows, groups = self.held_shape[0], -(-self.row // GROUP)
        return Buffer("codes", (rows, groups * HALF), torch.uint8), Buffer("scales", (rows, groups), torch.float32)

    def decode(self, held: Held, rows: slice) -> Tensor:
        packed = held["codes"][rows]
        height = packed.shape[0]
        halves = packed.view(height, -1, 1, HALF)  # (rows, groups, 1, HALF)
        codes = torch.cat((halves & 15, halves >> 4), 2).flatten(2).float() - ZERO  # (rows, groups, GROUP)
        value = codes * (1.0 / TOP) * held["scales"][rows].unsqueeze(-1)  # in this order the top code is the scale
        return value.flatten(1)[:, : self.row].view(height, *self.shape[1:])

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        x = self._grouped(value)  # (rows, groups, GROUP)
        noise = self._grouped(rounding.noise(rows.start, tuple(value.shape), value.device))
        top = x.abs().amax(-1, keepdim=True)
        scales = top.clamp(min=SMALLEST_SCALE) * (top > 0)
        level = x.abs() * (TOP / scales.clamp(min=SMALLEST_SCALE))
        code = level.floor()
        code = code + ((level - code) * NOISE_ONE + noise >= NOISE_ONE)
        nibbles = (torch.where(x < 0, -code, code) + ZERO).to(torch.uint8)
        low, high = nibbles[..., :HALF], nibbles[..., HALF:]  # (rows, groups, HALF)
        held["codes"][rows].copy_((low | high << 4).flatten(1))
        held["scales"][rows].copy_(scales.squeeze(-1))

    def _grouped(self, x: Tensor) -> Tensor:
        return F.pad(x.flatten(1), (0, -self.row % GROUP)).view(x.shape[0], -1, GROUP)

    def problem(self, held: Held) -> str | None:
        scales = held["scales"]
        return None if bool((scales.isfinite() & (scales >= 0)).all()) else "scales that are not finite numbers >= 0"

    def strained(self, held: Held, rows: slice) -> Tensor:
        halves = held["codes"][rows].view(rows.stop - rows.start, -1, HALF)  # (rows, groups, HALF)
        used = ((halves & 15) != ZERO).sum(-1) + ((halves >> 4) != ZERO).sum(-1)
        return (held["scales"][rows] > 0) & (used > 0) & (used * SPARSE <= GROUP)

    def graph_key(self) -> Hashable:
        return type(self), self.shape[1:]


class Int4(Codec):
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
