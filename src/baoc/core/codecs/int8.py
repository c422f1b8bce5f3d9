"""Eight bits per element with one fp32 scale per group of up to 256 elements.

Codes are companded: ``|m| / scale`` is stored as its square root and ``v / scale`` as its fourth root, so relative
precision is kept over 4 (m) and 9 (v) decimal orders and decoding is two multiplications, with no table. Codes are
dithered in the value domain. The choice is by measurement: see ``docs/results/int8_formats.md``.

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
from baoc.core.rounding import NOISE_ONE, Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Shape, Slot

GROUP = 256
MIN_ROW = 8
"""Rows shorter than this (vectors too: their rows are single elements) would pay more for scales than for codes."""

SMALLEST_SCALE = 2.0**-96
"""Below it the number of levels per unit would overflow."""


@dataclass(frozen=True)
class _Companding:
    """A code is the root of a *level*, and a value is a level in units of ``scale / levels``."""

    top: int
    power: int  # 2 or 4

    @property
    def levels(self) -> float:
        return float(self.top**self.power)

    def raised(self, root: Tensor) -> Tensor:
        return root * root.abs() if self.power == 2 else (root * root).square()

    def root(self, level: Tensor) -> Tensor:
        return level.sqrt() if self.power == 2 else level.sqrt().sqrt()


_SIGNED = _Companding(127, 2)
_UNSIGNED = _Companding(255, 4)


@dataclass(frozen=True)
class Int8Format(Format):
    view_dims = 2

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        shape = self.held_shape
        groups = -(-math.prod(shape[1:]) // GROUP)
        return (
            Buffer("codes", shape, torch.int8 if self.slot.signed else torch.uint8),
            Buffer("scales", (shape[0], groups), torch.float32),
        )

    @property
    def _companding(self) -> _Companding:
        return _SIGNED if self.slot.signed else _UNSIGNED

    def decode(self, held: Held, rows: slice) -> Tensor:
        codes = held["codes"][rows]
        scales = held["scales"][rows].unsqueeze(-1)  # (rows, groups, 1)
        unit = to_groups(codes.float()) * (1.0 / self._companding.top)  # (rows, groups, width), in [-1, 1]
        return from_groups(self._companding.raised(unit) * scales, codes.shape)

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        codes, companding = held["codes"][rows], self._companding
        grouped = to_groups(value)  # (rows, groups, width)
        top = grouped.abs().amax(-1, keepdim=True)
        scales = top.clamp(min=SMALLEST_SCALE) * (top > 0)
        level = grouped.abs() * (companding.levels / scales.clamp(min=SMALLEST_SCALE))
        below = companding.root(level).floor()
        low, high = companding.raised(below), companding.raised(below + 1)
        noise = to_groups(rounding.noise(rows.start, tuple(value.shape), value.device))
        threshold = (NOISE_ONE - noise) * (1.0 / NOISE_ONE)
        code = below + (level - low >= threshold * (high - low))
        if self.slot.signed:
            code = torch.where(grouped < 0, -code, code)
        else:  # v must never become zero under a momentum that is not: its smallest code is above zero
            code = torch.where(grouped > 0, code.clamp(min=1), code)
        codes.copy_(from_groups(code, codes.shape))
        held["scales"][rows].copy_(scales.squeeze(-1))

    def problem(self, held: Held) -> str | None:
        scales = held["scales"]
        return None if bool((scales.isfinite() & (scales >= 0)).all()) else "scales that are not finite numbers >= 0"

    def graph_key(self) -> Hashable:
        return type(self), self.slot.signed


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
