"""Formats whose elements share numbers: the int8 and int4 of :mod:`baoc.core.codecs`, bit for bit.

A tile is ``(segments, SEGMENT)`` elements. A segment is a group of int8, or four of int4.
"""

import triton
import triton.language as tl

from baoc.core.codecs import int4, int8
from baoc.core.rounding import NOISE_ONE as _NOISE_ONE
from baoc.optim.kernels.triton.device.numbers import SIZE, bits_of, float_of, pointer, quotient

SEGMENT = tl.constexpr(int8.GROUP)
LEAST_EXPONENT = tl.constexpr(int8.LEAST_EXPONENT)
MOST_EXPONENT = tl.constexpr(int8.MOST_EXPONENT)
MANTISSA = tl.constexpr(int8.MANTISSA)
SIGNED_DROPPED = tl.constexpr(int8.SIGNED.dropped)
SIGNED_BELOW = tl.constexpr(int8.SIGNED.count << int8.SIGNED.dropped)
UNSIGNED_DROPPED = tl.constexpr(int8.UNSIGNED.dropped)
UNSIGNED_BELOW = tl.constexpr(int8.UNSIGNED.count << int8.UNSIGNED.dropped)
NOISE_ONE = tl.constexpr(_NOISE_ONE)

INT4_GROUP = tl.constexpr(int4.GROUP)
HALF = tl.constexpr(int4.HALF)
QUARTERS = tl.constexpr(int8.GROUP // int4.GROUP)  # groups of int4 in a segment
TOP = tl.constexpr(float(int4.TOP))
PER_TOP = tl.constexpr(1.0 / int4.TOP)
ZERO = tl.constexpr(int4.ZERO)
SMALLEST_SCALE = tl.constexpr(int4.SMALLEST_SCALE)


@triton.jit
def int8_base(exponents, SIGNED: tl.constexpr):
    """The bits of fp32 from which codes count."""
    return ((exponents + 1) << MANTISSA) - (SIGNED_BELOW if SIGNED else UNSIGNED_BELOW)


@triton.jit
def int8_values(codes, exponents, SIGNED: tl.constexpr):
    """fp32 values of int32 codes, shape (segments, SEGMENT), and exponents, shape (segments, 1)."""
    base = int8_base(exponents, SIGNED)
    if SIGNED:
        number = float_of((tl.abs(codes) << SIGNED_DROPPED) + base)
        size = tl.minimum(number, 2 * (number - float_of(base)))
        return tl.where(codes < 0, -size, size)
    else:
        return tl.where(codes > 0, float_of((codes << UNSIGNED_DROPPED) + base), 0.0)


@triton.jit
def int8_codes(value, noise, mask, SIGNED: tl.constexpr):
    """(codes, exponents) of values, both int32."""
    dropped: tl.constexpr = SIGNED_DROPPED if SIGNED else UNSIGNED_DROPPED
    bits = bits_of(value) & SIZE
    shifted = noise << (dropped - 16)
    top = tl.max(tl.where(mask, bits + shifted, 0), axis=1, keep_dims=True) >> MANTISSA
    exponents = tl.minimum(tl.maximum(top, LEAST_EXPONENT), MOST_EXPONENT)
    base = int8_base(exponents, SIGNED)
    if SIGNED:  # the lowest octave of codes goes down to zero in equal steps
        bits = tl.maximum(bits, bits_of(float_of(bits) * 0.5 + float_of(base)))
        code = (bits + shifted - base) >> dropped
        return tl.minimum(tl.maximum(tl.where(value < 0, -code, code), -128), 127), exponents
    else:
        code = (bits + shifted - base) >> dropped
        return tl.where(value > 0, tl.minimum(tl.maximum(code, 1), 255), 0), exponents


@triton.jit
def load_int8(codes_at, exponents_at, offset, segment, inside, mask, SIGNED: tl.constexpr, ALIGNED: tl.constexpr):
    """``inside``: of segments, shape (segments, 1); ``mask``: of elements."""
    codes = tl.load(pointer(codes_at, tl.int8 if SIGNED else tl.uint8, ALIGNED) + offset, mask=mask, other=0)
    exponents = tl.load(pointer(exponents_at, tl.uint8, False) + segment, mask=inside, other=0)
    return int8_values(codes.to(tl.int32), exponents.to(tl.int32) + LEAST_EXPONENT, SIGNED)


@triton.jit
def store_int8(
    codes_at, exponents_at, offset, segment, inside, mask, value, noise, SIGNED: tl.constexpr, ALIGNED: tl.constexpr
):
    """Returns the values that are stored."""
    codes, exponents = int8_codes(value, noise, mask, SIGNED)
    narrow = codes.to(tl.int8 if SIGNED else tl.uint8)
    tl.store(pointer(codes_at, tl.int8 if SIGNED else tl.uint8, ALIGNED) + offset, narrow, mask=mask)
    tl.store(pointer(exponents_at, tl.uint8, False) + segment, (exponents - LEAST_EXPONENT).to(tl.uint8), mask=inside)
    return int8_values(codes, exponents, SIGNED)


@triton.jit
def load_int4(codes_at, scales_at, row, part, row_len, inside, ALIGNED: tl.constexpr):
    """``row`` and ``part``: of segments, shape (segments, 1); a segment is a part of a row."""
    groups = (row_len + INT4_GROUP - 1) // INT4_GROUP
    lane = tl.arange(0, SEGMENT)[None, :]
    group = part * QUARTERS + lane // INT4_GROUP
    held = inside & (group < groups)
    place = row.to(tl.int64) * groups + group
    packed = tl.load(pointer(codes_at, tl.uint8, ALIGNED) + place * HALF + lane % HALF, mask=held, other=0)
    nibble = (packed.to(tl.int32) >> ((lane // HALF) % 2 * 4)) & 15
    scales = tl.load(pointer(scales_at, tl.float32, False) + place, mask=held, other=0.0)
    return (nibble - ZERO).to(tl.float32) * PER_TOP * scales


@triton.jit
def store_int4(codes_at, scales_at, row, part, row_len, inside, value, noise, ALIGNED: tl.constexpr):
    """Padding of a row's last group is stored as zeros are; ``value`` has zeros there."""
    count: tl.constexpr = value.shape[0] * QUARTERS
    x = tl.reshape(value, (count, INT4_GROUP))
    size = tl.abs(x)
    top = float_of(tl.max(bits_of(size), axis=1, keep_dims=True))  # (groups, 1)
    least = tl.maximum(top, SMALLEST_SCALE)
    level = size * (quotient(least * 0.0 + 1.0, least) * TOP)
    code = tl.floor(level)
    rise = (level - code) * NOISE_ONE + tl.reshape(noise, (count, INT4_GROUP)).to(tl.float32) >= NOISE_ONE
    code = tl.where(rise, code + 1.0, code)
    nibble = tl.where(x < 0, -code, code).to(tl.int32) + ZERO
    halves = tl.reshape(nibble, (count, 2, HALF)) << (tl.arange(0, 2)[None, :, None] * 4)
    packed = tl.sum(halves, axis=1)  # (groups, HALF)

    groups = (row_len + INT4_GROUP - 1) // INT4_GROUP
    quarter = part * QUARTERS + tl.arange(0, QUARTERS)[None, :]  # (segments, QUARTERS)
    held = tl.reshape(inside & (quarter < groups), (count, 1))
    place = tl.reshape(row.to(tl.int64) * groups + quarter, (count, 1))
    to = pointer(codes_at, tl.uint8, ALIGNED) + place * HALF + tl.arange(0, HALF)[None, :]
    tl.store(to, packed.to(tl.uint8), mask=held)
    tl.store(pointer(scales_at, tl.float32, False) + place, tl.where(top > 0, least, 0.0), mask=held)
