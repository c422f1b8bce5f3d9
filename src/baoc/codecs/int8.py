"""Eight bits per element with one fp32 scale per group of up to 256 elements.

Codes are companded: ``|m| / scale`` is stored as its square root and ``v / scale`` as its fourth root, so relative
precision is kept over 4 (m) and 9 (v) decimal orders and decoding is two multiplications, with no table. Codes are
dithered in the value domain. The choice is by measurement: see ``docs/results/int8_formats.md``.

Groups run along the flattened trailing dims of each dim-0 row and never cross rows: a shard on dim 0 holds whole
groups, so a plan means the same on one process and on many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from baoc.codecs.dense import BF16, FP32
from baoc.spec import FP32_TINY, NOISE_ONE, SMALL_NUMEL, Buffer, Codec, Rounding, Shape, Slot

GROUP = 256
MIN_ROW = 8
"""Rows shorter than this (vectors too: their rows are single elements) would pay more for scales than for codes."""

_MAX_SIGNED = 127
_MAX_UNSIGNED = 255


class Int8(Codec):
    name = "int8"
    bits = 8
    view_dims = 2

    def resolve(self, shape: Shape) -> Codec:
        if math.prod(shape) < SMALL_NUMEL:
            return FP32()
        return self if self.fits(shape) else BF16()

    @staticmethod
    def fits(shape: Shape) -> bool:
        return len(shape) > 1 and math.prod(shape[1:]) >= MIN_ROW

    def layout(self, shape: Shape, slot: Slot) -> tuple[Buffer, ...]:
        groups = -(-math.prod(shape[1:]) // GROUP)
        return (
            Buffer("codes", shape, torch.int8 if slot.signed else torch.uint8),
            Buffer("scales", (shape[0], groups), torch.float32),
        )

    def decode(self, buffers: Mapping[str, Tensor], rows: slice) -> Tensor:
        codes = buffers["codes"][rows]
        scales = buffers["scales"][rows].unsqueeze(-1)  # (rows, groups, 1)
        signed = codes.dtype == torch.int8
        unit = to_groups(codes.float()) * (1.0 / (_MAX_SIGNED if signed else _MAX_UNSIGNED))  # (rows, groups, width)
        return from_groups(_expand(unit, signed) * scales, codes.shape)

    def encode(self, buffers: Mapping[str, Tensor], rows: slice, value: Tensor, rounding: Rounding) -> None:
        codes = buffers["codes"][rows]
        signed = codes.dtype == torch.int8
        grouped = to_groups(value)  # (rows, groups, width)
        scales = grouped.abs().amax(-1, keepdim=True)
        ratio = grouped.abs() / scales.clamp(min=FP32_TINY)  # in [0, 1]
        top = _MAX_SIGNED if signed else _MAX_UNSIGNED
        root = ratio.sqrt() if signed else ratio.sqrt().sqrt()
        below = (root * top).floor().clamp(max=top - 1)
        low, high = (_expand(code * (1.0 / top), signed) for code in (below, below + 1))
        fraction = (ratio - low) / (high - low)
        noise = to_groups(rounding.noise(rows.start, tuple(value.shape), value.device))
        code = below + (fraction * NOISE_ONE + noise >= NOISE_ONE)
        # v must never become zero under a momentum that is not: its smallest code is above zero.
        code = torch.where(grouped < 0, -code, code) if signed else torch.where(ratio > 0, code.clamp(min=1), code)
        codes.copy_(from_groups(code, codes.shape))
        buffers["scales"][rows].copy_(scales.squeeze(-1))


def _expand(unit: Tensor, signed: bool) -> Tensor:
    """The companding curve: a code as a share of the largest one -> a value as a share of the scale."""
    return unit * unit.abs() if signed else (unit * unit).square()


def to_groups(x: Tensor) -> Tensor:
    """(rows, *trailing) -> (rows, groups, width), the last group padded with zeros."""
    flat = x.reshape(x.shape[0], -1)
    width = min(GROUP, flat.shape[1])
    padding = (width - flat.shape[1] % width) % width
    return (F.pad(flat, (0, padding)) if padding else flat).view(x.shape[0], -1, width)


def from_groups(x: Tensor, shape: torch.Size) -> Tensor:
    return x.reshape(x.shape[0], -1)[:, : math.prod(shape[1:])].view(shape)
