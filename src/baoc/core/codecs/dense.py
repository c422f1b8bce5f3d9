"""Dense formats: one number per element, in fp32 or bf16."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.core.codecs.base import Codec, Format, Held
from baoc.core.rounding import Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Shape, Slot


@dataclass(frozen=True)
class FP32Format(Format):
    rounds = False
    shares = False
    view_dims = 1

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("", self.held_shape, torch.float32),)

    def decode(self, held: Held, rows: slice) -> Tensor:
        return held[""][rows]

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        held[""][rows].copy_(value)

    def problem(self, held: Held) -> str | None:
        return "negative numbers" if not self.slot.signed and bool((held[""] < 0).any()) else None

    def graph_key(self) -> Hashable:
        return type(self)


@dataclass(frozen=True)
class BF16Format(FP32Format):
    rounds = True

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("", self.held_shape, torch.bfloat16),)

    def decode(self, held: Held, rows: slice) -> Tensor:
        return held[""][rows].float()

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        # bf16 is the upper half of fp32: noise added to the lower half carries into the upper one in the right share
        # of cases, away from zero for either sign; dropping the lower half is then exact.
        bits = value.contiguous().view(torch.int32)
        noise = rounding.noise(rows.start, tuple(value.shape), value.device)
        held[""][rows].copy_(((bits + noise) & -0x10000).view(torch.float32))


class FP32(Codec):
    name = "fp32"
    bits = 32

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        return FP32Format(slot, shape, rows)


class BF16(Codec):
    name = "bf16"
    bits = 16

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        return (FP32Format if math.prod(shape) < SMALL_NUMEL else BF16Format)(slot, shape, rows)
