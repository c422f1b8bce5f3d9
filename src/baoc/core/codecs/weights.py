"""The low bits of 16-bit parameters: slot ``w``. Kernels join both, update the sum in fp32, and split it again.

A 16-bit weight that is rounded to nearest after each step loses every update below half of its last bit, and small
learning rates lose nearly all. These codecs keep what rounding removes (2 bytes: all of it; 1 byte: its upper half), or
round so that updates arrive on average (``sr``, no bytes).

The weight is widened to an integer of 32 bits: its own 16, and 16 more bits of mantissa. For bf16 these are the bits of
fp32 itself. fp16 has fewer exponents than fp32, so its numbers are moved first: exactly for magnitudes from 2^-17 to
65536; smaller ones become multiples of 2^-40, and larger ones infinite, as in torch. The parameter is the upper half of
the integer, rounded to nearest (ties away from zero), and the remainder is the difference, a signed integer. So the
parameter is always the rounded weight, and neither half needs a carry bit from the other. The split is the one of
``store_param_remainders`` in https://github.com/NVIDIA/TransformerEngine.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from baoc.core.codecs.base import Codec, Format, Held
from baoc.core.rounding import Rounding
from baoc.core.spec import Buffer, Shape, Slot

PARAM = "param"
"""The name under which :class:`WeightFormat` finds the parameter among its buffers."""

NAN, NAN_FP16 = 0x7FC00000, 0x7E000000  # quiet NaNs without payload, which no rounding can carry into other numbers
_MAGNITUDE = 0x7FFFFFFF
LEAST_NORMAL = 0x38800000  # fp32 bits of 2^-14, the smallest normal number of fp16
TOP = 0x47800000  # of 65536, where fp16 ends
REBASE = 0x38000000  # fp32 bits minus this are an exponent of fp16 with 23 bits of mantissa
NORMAL_FP16, INF_FP16 = 1 << 26, 31 << 26  # widened 2^-14, and what comes after 65504
SUBNORMAL_UNIT = 2.0**40


@dataclass(frozen=True)
class WeightFormat(Format):
    """What is kept of a parameter beside its own 16 bits.

    ``held`` has the parameter too, under :data:`PARAM`: decoding joins the two, and encoding writes both.
    """

    shares = False
    view_dims = 1
    remainder_bits: ClassVar[int] = 0

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return ()

    def decode(self, held: Held, rows: slice) -> Tensor:
        param = held[PARAM][rows]
        wide = param.contiguous().view(torch.int16).to(torch.int32) << 16
        if self.buffers:
            wide = wide + (held[""][rows].to(torch.int32) << 16 - self.remainder_bits)
        return from_wide(wide, param.dtype)

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        param, dropped = held[PARAM][rows], 16 - self.remainder_bits
        wide = to_wide(value, param.dtype)
        if dropped:
            noise = rounding.noise(rows.start, tuple(value.shape), value.device) >> self.remainder_bits
            wide = (wide + noise) >> dropped << dropped
        upper = (wide + 0x8000 if self.buffers else wide) >> 16
        param.copy_(upper.to(torch.int16).view(param.dtype))
        if self.buffers:
            held[""][rows].copy_((wide - (upper << 16)) >> dropped)

    def graph_key(self) -> Hashable:
        return type(self)


@dataclass(frozen=True)
class Rest16Format(WeightFormat):
    """All 16 bits: parameter and remainder are the exact fp32 weight."""

    rounds = False
    remainder_bits = 16

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("", self.held_shape, torch.int16),)


@dataclass(frozen=True)
class Rest8Format(WeightFormat):
    """8 more bits of mantissa. Steps round them so that updates arrive on average."""

    remainder_bits = 8

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("", self.held_shape, torch.int8),)


@dataclass(frozen=True)
class StochasticFormat(WeightFormat):
    """No remainder: steps round the parameter itself so that updates arrive on average."""


@dataclass(frozen=True)
class NearestFormat(WeightFormat):
    """No remainder, and rounding to nearest, as in torch: updates below half of the last bit are lost."""

    def decode(self, held: Held, rows: slice) -> Tensor:
        return held[PARAM][rows].float()

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        held[PARAM][rows].copy_(value)


class _WeightCodec(Codec):
    format: ClassVar[type[WeightFormat]]

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        return self.format(slot, shape, rows)

    def exact(self) -> str:
        return "16"

    def refusal(self, slot: Slot) -> str | None:
        return None if slot.of_weight else "it stores the low bits of 16-bit parameters (slot 'w')"


class Rest16(_WeightCodec):
    """2 bytes: training is bitwise equal to training of fp32 parameters."""

    name, bits, format = "16", 16, Rest16Format


class Rest8(_WeightCodec):
    """1 byte: the weight has a relative error of at most 2^-16."""

    name, bits, format = "8", 8, Rest8Format


class Stochastic(_WeightCodec):
    """No bytes: dithered rounding, a function of an element's index and the number of steps."""

    name, bits, format = "sr", 16, StochasticFormat


class Nearest(_WeightCodec):
    """No bytes: what ``torch.optim`` does."""

    name, bits, format = "none", 16, NearestFormat


def split(value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the 16-bit parameter of fp32 numbers, and all of their low bits.

    Args:
        value: fp32 numbers.
        dtype: bf16 or fp16.

    Returns:
        The parameter, and int16 remainders.

    Example:
        >>> param, low = split(torch.tensor([1.0, 1.001]), torch.bfloat16)
        >>> param.tolist(), low.tolist()
        ([1.0, 1.0], [0, 8389])
    """
    wide = to_wide(value, dtype)
    upper = (wide + 0x8000) >> 16
    return upper.to(torch.int16).view(dtype), (wide - (upper << 16)).to(torch.int16)


def low_bits_as(dtype: torch.dtype, codes: Tensor) -> Tensor:
    """Return remainders as those of another format. The parameter they belong to stays as it is.

    Args:
        dtype: int16 or int8.
        codes: remainders, int16 or int8.

    Returns:
        The remainders. A largest one that would round into the parameter becomes the largest code.

    Example:
        >>> low_bits_as(torch.int8, torch.tensor([-32768, 130, 32767], dtype=torch.int16)).tolist()
        [-128, 1, 127]
    """
    if codes.dtype == dtype:
        return codes
    wide = codes.to(torch.int32)
    return (wide << 8 if dtype == torch.int16 else (wide + 128 >> 8).clamp(max=127)).to(dtype)


def to_wide(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 numbers as 32-bit integers whose upper halves are the bits of a 16-bit dtype, before rounding.

    Args:
        value: fp32 numbers.
        dtype: bf16 or fp16.

    Returns:
        int32 numbers in the shape of ``value``: a sign and a magnitude, as in a float.
    """
    bits = value.contiguous().view(torch.int32)
    if dtype == torch.bfloat16:
        return torch.where(value.isnan(), NAN, bits)
    magnitude = bits & _MAGNITUDE
    normal = (magnitude.clamp(max=TOP) - REBASE) << 3
    tiny = (value.abs().clamp(max=2.0**-14) * SUBNORMAL_UNIT).round().to(torch.int32)
    wide = torch.where(magnitude >= LEAST_NORMAL, normal, tiny)
    wide = torch.where(value.isnan(), NAN_FP16, wide)
    return wide | (bits & ~_MAGNITUDE)


def from_wide(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 numbers of :func:`to_wide`.

    Args:
        wide: int32 numbers.
        dtype: bf16 or fp16.

    Returns:
        fp32 numbers.
    """
    if dtype == torch.bfloat16:
        return wide.view(torch.float32)
    magnitude = wide & _MAGNITUDE
    normal = ((magnitude >> 3) + REBASE).view(torch.float32)
    value = torch.where(magnitude >= NORMAL_FP16, normal, magnitude.to(torch.float32) * (1 / SUBNORMAL_UNIT))
    value = torch.where(magnitude == INF_FP16, torch.inf, torch.where(magnitude > INF_FP16, torch.nan, value))
    return torch.where(wide < 0, -value, value)
