"""Values in memory: fp32, bf16, fp16, int8 and int4, bit for bit as :mod:`baoc.core.codecs` stores them.

Rounding uses integer operations, which give the same result on every device: Triton's own casts to bf16 round
differently on a GPU and in the interpreter. Division and square roots are correctly rounded only by their explicit
names, :func:`quotient` and :func:`root`.

A tile is ``(segments, SEGMENT)`` elements. A segment is one group of int8, or four groups of int4.
"""

import triton
import triton.language as tl

from baoc.core import rounding
from baoc.core.codecs import quantized, weights

PHASE_PER_ELEMENT = tl.constexpr(rounding.PHASE_PER_ELEMENT)
PHASE_MASK = tl.constexpr(rounding.PHASE_MASK)
NOISE_SHIFT = tl.constexpr(rounding.PHASE_BITS - 16)
NOISE_MARGIN = tl.constexpr(rounding.NOISE_MARGIN)
SIZE = tl.constexpr(0x7FFFFFFF)  # all bits of fp32 but the sign
BF16_NAN = tl.constexpr(0x7FC0)
INFINITY = tl.constexpr(0x7F800000)  # the bits of fp32
WIDE_NAN = tl.constexpr(weights.NAN_FP16)
WIDE_INFINITY = tl.constexpr(weights.INF_FP16)
WIDE_NORMAL = tl.constexpr(weights.NORMAL_FP16)
REBASE = tl.constexpr(weights.REBASE)
LEAST_NORMAL = tl.constexpr(weights.LEAST_NORMAL)
TOP_FP16 = tl.constexpr(weights.TOP)
UNITS = tl.constexpr(weights.SUBNORMAL_UNIT)
PER_UNIT = tl.constexpr(1.0 / weights.SUBNORMAL_UNIT)
WHOLE = tl.constexpr(2.0**23)  # from here on, fp32 has no fraction
NOISE_ONE = tl.constexpr(rounding.NOISE_ONE)
IDLE_SHIFT = tl.constexpr(rounding.IDLE_SHIFT)
LOOSE_IDLE_SHIFT = tl.constexpr(rounding.LOOSE_IDLE_SHIFT)

SEGMENT = tl.constexpr(quantized.INT8_GROUP)
LEAST_EXPONENT = tl.constexpr(quantized.LEAST_EXPONENT)
MOST_EXPONENT = tl.constexpr(quantized.MOST_EXPONENT)
MANTISSA = tl.constexpr(quantized.MANTISSA)
SIGNED_DROPPED = tl.constexpr(quantized.SIGNED.dropped)
SIGNED_BELOW = tl.constexpr(quantized.SIGNED.count << quantized.SIGNED.dropped)
UNSIGNED_DROPPED = tl.constexpr(quantized.UNSIGNED.dropped)
UNSIGNED_BELOW = tl.constexpr(quantized.UNSIGNED.count << quantized.UNSIGNED.dropped)

INT4_GROUP = tl.constexpr(quantized.INT4_GROUP)
HALF = tl.constexpr(quantized.INT4_HALF)
QUARTERS = tl.constexpr(quantized.INT8_GROUP // quantized.INT4_GROUP)  # groups of int4 in a segment
TOP = tl.constexpr(float(quantized.INT4_TOP))
PER_TOP = tl.constexpr(1.0 / quantized.INT4_TOP)
ZERO = tl.constexpr(quantized.INT4_ZERO)
SMALLEST_SCALE = tl.constexpr(quantized.INT4_SMALLEST_SCALE)


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to values of a type at an int64 address."""
    found = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(found, 16) if ALIGNED else found  # the hint makes vector loads possible


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def root(x):
    return tl.sqrt_rn(x)


@triton.jit
def quotient(x, y):
    return tl.div_rn(x, y)


@triton.jit
def noise_at(element, phase):
    """Return the noise of :class:`baoc.core.rounding.Rounding` for element indices. The low 32 bits are enough."""
    here = (element.to(tl.int32) * PHASE_PER_ELEMENT + phase) & PHASE_MASK
    return ((here >> NOISE_SHIFT) & (-2 * NOISE_MARGIN)) | NOISE_MARGIN


@triton.jit
def load_dense(address, offset, mask, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Load fp32, bf16 or fp16 values as fp32."""
    if FORMAT == "bf16" or FORMAT == "fp16":
        half = tl.load(pointer(address, tl.int16, ALIGNED) + offset, mask=mask, other=0)
        return number_of(half.to(tl.int32) << 16, FORMAT)
    else:
        return tl.load(pointer(address, tl.float32, ALIGNED) + offset, mask=mask, other=0.0)


@triton.jit
def store_dense(address, offset, mask, value, noise, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Store state and return what was stored. bf16 rounds up where the noise carries into the upper half."""
    if FORMAT == "bf16":
        half = (bits_of(value) + noise) >> 16
        tl.store(pointer(address, tl.int16, ALIGNED) + offset, half.to(tl.int16), mask=mask)
        return float_of(half << 16)
    else:
        tl.store(pointer(address, tl.float32, ALIGNED) + offset, value, mask=mask)
        return value


@triton.jit
def store_nearest(address, offset, mask, value, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Store a parameter. bf16 and fp16 round to nearest, ties to even, as torch does."""
    if FORMAT == "bf16":
        bits = bits_of(value)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(value == value, half, BF16_NAN)
        tl.store(pointer(address, tl.int16, ALIGNED) + offset, half.to(tl.int16), mask=mask)
    elif FORMAT == "fp16":
        tl.store(pointer(address, tl.float16, ALIGNED) + offset, value.to(tl.float16), mask=mask)
    else:
        tl.store(pointer(address, tl.float32, ALIGNED) + offset, value, mask=mask)


@triton.jit
def wide_of(value, PARAM: tl.constexpr):
    """Return the integer whose upper half is the parameter: ``to_wide`` of :mod:`baoc.core.codecs.weights`."""
    bits = bits_of(value)
    if PARAM == "fp16":
        size = bits & SIZE
        tiny = tl.minimum(float_of(size), 2.0**-14) * UNITS
        tiny = tl.where(tiny < WHOLE, (tiny + WHOLE) - WHOLE, tiny).to(tl.int32)  # to nearest, ties to even
        wide = tl.where(size >= LEAST_NORMAL, (tl.minimum(size, TOP_FP16) - REBASE) << 3, tiny)
        return tl.where(value == value, wide, WIDE_NAN) | (bits & ~SIZE)
    else:
        return tl.where(value == value, bits, BF16_NAN << 16)


@triton.jit
def number_of(wide, PARAM: tl.constexpr):
    """Return the fp32 number of a widened weight."""
    if PARAM == "fp16":
        size = wide & SIZE
        beyond = tl.where(size == WIDE_INFINITY, INFINITY, BF16_NAN << 16)
        bits = tl.where(size < WIDE_INFINITY, (size >> 3) + REBASE, beyond)
        bits = tl.where(size < WIDE_NORMAL, bits_of(size.to(tl.float32) * PER_UNIT), bits)
        return float_of(bits | (wide & ~SIZE))
    else:
        return float_of(wide)


@triton.jit
def load_weight(address, low_at, offset, mask, PARAM: tl.constexpr, W: tl.constexpr, ALIGNED: tl.constexpr):
    """Load a parameter as fp32, joined with its low bits: see :mod:`baoc.core.codecs.weights`."""
    if W == "16" or W == "8":
        half = tl.load(pointer(address, tl.int16, ALIGNED) + offset, mask=mask, other=0)
        low = tl.load(pointer(low_at, tl.int16 if W == "16" else tl.int8, ALIGNED) + offset, mask=mask, other=0)
        return number_of((half.to(tl.int32) << 16) + (low.to(tl.int32) << (0 if W == "16" else 8)), PARAM)
    else:
        return load_dense(address, offset, mask, PARAM, ALIGNED)


@triton.jit
def store_weight(
    address, low_at, offset, mask, value, noise, PARAM: tl.constexpr, W: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store a parameter and its low bits. ``noise`` rounds to 8 low bits, or to none."""
    if W == "none":
        store_nearest(address, offset, mask, value, PARAM, ALIGNED)
    else:
        bits = wide_of(value, PARAM)
        if W == "sr":
            half = (bits + noise) >> 16
        else:
            if W == "8":
                bits = ((bits + (noise >> 8)) >> 8) << 8
            half = (bits + 0x8000) >> 16
            low = bits - (half << 16)
            if W == "8":
                tl.store(pointer(low_at, tl.int8, ALIGNED) + offset, (low >> 8).to(tl.int8), mask=mask)
            else:
                tl.store(pointer(low_at, tl.int16, ALIGNED) + offset, low.to(tl.int16), mask=mask)
        tl.store(pointer(address, tl.int16, ALIGNED) + offset, half.to(tl.int16), mask=mask)


@triton.jit
def int8_base(exponents, SIGNED: tl.constexpr):
    """Return the fp32 bits from which codes count."""
    return ((exponents + 1) << MANTISSA) - (SIGNED_BELOW if SIGNED else UNSIGNED_BELOW)


@triton.jit
def int8_values(codes, exponents, SIGNED: tl.constexpr):
    """Decode int32 codes, shape (segments, SEGMENT), with exponents, shape (segments, 1), to fp32."""
    base = int8_base(exponents, SIGNED)
    if SIGNED:
        number = float_of((tl.abs(codes) << SIGNED_DROPPED) + base)
        size = tl.minimum(number, 2 * (number - float_of(base)))
        return tl.where(codes < 0, -size, size)
    else:
        return tl.where(codes > 0, float_of((codes << UNSIGNED_DROPPED) + base), 0.0)


@triton.jit
def int8_codes(value, noise, grad, mask, SIGNED: tl.constexpr, SHIFT: tl.constexpr):
    """Encode values as (codes, exponents), both int32. The size of a signed value without gradient limits its noise."""
    dropped: tl.constexpr = SIGNED_DROPPED if SIGNED else UNSIGNED_DROPPED
    bits = bits_of(value) & SIZE
    shifted = noise << (dropped - 16)
    top = tl.max(tl.where(mask, bits + shifted, 0), axis=1, keep_dims=True) >> MANTISSA
    exponents = tl.minimum(tl.maximum(top, LEAST_EXPONENT), MOST_EXPONENT)
    base = int8_base(exponents, SIGNED)
    if SIGNED:  # codes of the lowest octave are equally spaced down to zero
        above = tl.maximum(bits, bits_of(float_of(bits) * 0.5 + float_of(base))) - base
        code = (above + tl.where(grad == 0.0, tl.minimum(shifted, above >> SHIFT), shifted)) >> dropped
        return tl.minimum(tl.maximum(tl.where(value < 0, -code, code), -128), 127), exponents
    else:
        code = (bits + shifted - base) >> dropped
        return tl.where(value > 0, tl.minimum(tl.maximum(code, 1), 255), 0), exponents


@triton.jit
def load_int8(codes_at, exponents_at, offset, segment, inside, mask, SIGNED: tl.constexpr, ALIGNED: tl.constexpr):
    """Load int8 values as fp32. ``inside`` masks segments, shape (segments, 1); ``mask`` masks elements."""
    codes = tl.load(pointer(codes_at, tl.int8 if SIGNED else tl.uint8, ALIGNED) + offset, mask=mask, other=0)
    exponents = tl.load(pointer(exponents_at, tl.uint8, False) + segment, mask=inside, other=0)
    return int8_values(codes.to(tl.int32), exponents.to(tl.int32) + LEAST_EXPONENT, SIGNED)


@triton.jit
def store_int8(
    codes_at, exponents_at, offset, segment, inside, mask, value, noise, grad,
    SIGNED: tl.constexpr, SHIFT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store values as int8."""
    codes, exponents = int8_codes(value, noise, grad, mask, SIGNED, SHIFT)
    narrow = codes.to(tl.int8 if SIGNED else tl.uint8)
    tl.store(pointer(codes_at, tl.int8 if SIGNED else tl.uint8, ALIGNED) + offset, narrow, mask=mask)
    tl.store(pointer(exponents_at, tl.uint8, False) + segment, (exponents - LEAST_EXPONENT).to(tl.uint8), mask=inside)


@triton.jit
def load_int4(codes_at, scales_at, row, part, row_len, inside, ALIGNED: tl.constexpr):
    """Load int4 values as fp32. ``row`` and ``part`` (the segment within its row) have shape (segments, 1)."""
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
def store_int4(
    codes_at, scales_at, row, part, row_len, inside, value, noise, grad, SHIFT: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store values as int4. ``value`` is zero in the padding of a row's last group, which is stored as zeros."""
    count: tl.constexpr = value.shape[0] * QUARTERS
    x = tl.reshape(value, (count, INT4_GROUP))
    size = tl.abs(x)
    top = float_of(tl.max(bits_of(size), axis=1, keep_dims=True))  # (groups, 1)
    least = tl.maximum(top, SMALLEST_SCALE)
    level = size * (quotient(least * 0.0 + 1.0, least) * TOP)
    code = tl.floor(level)
    noise = tl.reshape(noise, (count, INT4_GROUP)).to(tl.float32)
    is_idle = tl.reshape(grad, (count, INT4_GROUP)) == 0.0
    noise = tl.where(is_idle, tl.minimum(noise, tl.floor(level * (NOISE_ONE >> SHIFT))), noise)
    rise = (level - code) * NOISE_ONE + noise >= NOISE_ONE
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
