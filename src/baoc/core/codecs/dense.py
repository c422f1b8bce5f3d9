"""Dense formats: one number per element, in fp32 or bf16."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from baoc.core.spec import SMALL_NUMEL, Buffer, Codec, Rounding, Shape, Slot


class FP32(Codec):
    name = "fp32"
    bits = 32
    view_dims = 1

    def layout(self, shape: Shape, slot: Slot) -> tuple[Buffer, ...]:
        return (Buffer("", shape, torch.float32),)

    def decode(self, buffers: Mapping[str, Tensor], rows: slice) -> Tensor:
        return buffers[""][rows]

    def encode(self, buffers: Mapping[str, Tensor], rows: slice, value: Tensor, rounding: Rounding) -> None:
        buffers[""][rows].copy_(value)


class BF16(Codec):
    name = "bf16"
    bits = 16
    view_dims = 1

    def resolve(self, shape: Shape) -> Codec:
        return FP32() if math.prod(shape) < SMALL_NUMEL else self

    def layout(self, shape: Shape, slot: Slot) -> tuple[Buffer, ...]:
        return (Buffer("", shape, torch.bfloat16),)

    def decode(self, buffers: Mapping[str, Tensor], rows: slice) -> Tensor:
        return buffers[""][rows].float()

    def encode(self, buffers: Mapping[str, Tensor], rows: slice, value: Tensor, rounding: Rounding) -> None:
        # bf16 is the upper half of fp32: noise added to the lower half carries into the upper one in the right share
        # of cases, away from zero for either sign; dropping the lower half is then exact.
        bits = value.contiguous().view(torch.int32)
        noise = rounding.noise(rows.start, tuple(value.shape), value.device)
        buffers[""][rows].copy_(((bits + noise) & -0x10000).view(torch.float32))
