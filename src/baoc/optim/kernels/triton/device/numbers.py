"""Numbers in memory and the noise that rounds them, in integer operations, which are the same on every device.

Triton's own casts to bf16 round in one way on a GPU and in another in its interpreter; division and roots are
approximate unless asked for by name.
"""

import triton
import triton.language as tl

from baoc.core import rounding

PHASE_PER_ELEMENT = tl.constexpr(rounding.PHASE_PER_ELEMENT)
PHASE_MASK = tl.constexpr(rounding.PHASE_MASK)
NOISE_SHIFT = tl.constexpr(rounding.PHASE_BITS - 16)
NOISE_MARGIN = tl.constexpr(rounding.NOISE_MARGIN)
SIZE = tl.constexpr(0x7FFFFFFF)  # the bits of fp32 without the sign
BF16_NAN = tl.constexpr(0x7FC0)


@triton.jit
def pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to numbers of a type at an address (int64)."""
    found = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(found, 16) if ALIGNED else found  # then whole vectors are loaded


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
    """The noise of :class:`baoc.core.rounding.Rounding` for elements by their number; of int32, low bits are enough."""
    here = (element.to(tl.int32) * PHASE_PER_ELEMENT + phase) & PHASE_MASK
    return ((here >> NOISE_SHIFT) & (-2 * NOISE_MARGIN)) | NOISE_MARGIN


@triton.jit
def load_dense(address, offset, mask, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """fp32 values of fp32 or bf16 numbers."""
    if FORMAT == "bf16":
        half = tl.load(pointer(address, tl.int16, ALIGNED) + offset, mask=mask, other=0)
        return float_of(half.to(tl.int32) << 16)
    else:
        return tl.load(pointer(address, tl.float32, ALIGNED) + offset, mask=mask, other=0.0)


@triton.jit
def store_dense(address, offset, mask, value, noise, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Store state; bf16 is rounded up where noise carries into its upper half. Returns what is stored."""
    if FORMAT == "bf16":
        half = (bits_of(value) + noise) >> 16
        tl.store(pointer(address, tl.int16, ALIGNED) + offset, half.to(tl.int16), mask=mask)
        return float_of(half << 16)
    else:
        tl.store(pointer(address, tl.float32, ALIGNED) + offset, value, mask=mask)
        return value


@triton.jit
def store_nearest(address, offset, mask, value, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Store a parameter; to bf16 as torch rounds: to nearest, to even between two."""
    if FORMAT == "bf16":
        bits = bits_of(value)
        half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(value == value, half, BF16_NAN)
        tl.store(pointer(address, tl.int16, ALIGNED) + offset, half.to(tl.int16), mask=mask)
    else:
        tl.store(pointer(address, tl.float32, ALIGNED) + offset, value, mask=mask)
