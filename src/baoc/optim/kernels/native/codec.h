/* How numbers are stored, a vector at a time: the C side of `baoc/core/codecs`. */
#ifndef BAOC_CODEC_H
#define BAOC_CODEC_H

#include "simd.h"

/* The numbers of the formats are those of `baoc/core`: rounding.py, spec.py and codecs/quantized.py; tests fail if one side
 * changes. */
#define GROUP 256
#define SPIKE 0x1p56f
#define PHASE_PER_ELEMENT 0x609FD5u
#define IDLE_SHIFT 5
#define LOOSE_IDLE_SHIFT 0

/* ---- dither ---- */

/* The rounding sequence of LANES elements, of which the lower 23 bits count: at flat index `first`, and from there to
 * the next vector's. */
INLINE vuint sequence_at(uint32_t phase, int64_t first)
{
    vuint lane;
    for (uint32_t i = 0; i < LANES; i++)
        lane[i] = i * PHASE_PER_ELEMENT;
    return lane + (phase + (uint32_t)(uint64_t)first * PHASE_PER_ELEMENT);
}

INLINE vuint next_sequence(vuint sequence) { return sequence + LANES * PHASE_PER_ELEMENT; }

/* Noise is added to the bits that a code drops. It has 12 bits and lies half a step away from 0 and 1, so that a value
 * which is representable up to fp32 rounding stays where it is: this half step is the least noise, to which the rest is
 * added. */
INLINE int32_t least_noise(int dropped) { return 1 << (dropped - 13); }
INLINE vint noise(vuint sequence, int dropped) { return (vint)(sequence >> (23 - dropped) & 0xfffu << (dropped - 12)); }

/* ---- bf16 ---- */

#define BF16_DROPPED 16

INLINE vfloat decode_bf16(vint data) { return (vfloat)(data << 16); }

/* bf16 is the upper half of fp32: noise added to the lower half carries into the upper one in the right share of cases. */
INLINE vint encode_bf16(vfloat x, vint noise)
{
    return (vint)(((vuint)x + (vuint)(noise + least_noise(BF16_DROPPED))) >> BF16_DROPPED);
}

/* ---- int8 ---- */

/* A code is the upper bits of an fp32 number, counted from a base that its group's exponent sets, so that codes end with
 * the octave of the group. For signed slots the lowest octave goes down to zero in equal steps: there x has the bits of
 * half + x / 2, where half is the base read as a float; these are the larger bits there and nowhere else. */
#define LEAST_EXPONENT 32
#define MOST_EXPONENT 253
#define SIGNED_DROPPED 19
#define UNSIGNED_DROPPED 20

INLINE int32_t base_of(int is_signed, int exponent)
{
    return ((exponent + 1) << 23) - (is_signed ? 128 << SIGNED_DROPPED : 256 << UNSIGNED_DROPPED);
}

INLINE vfloat decode_signed(vint code, int32_t base)
{
    const vfloat number = (vfloat)((absolute(code) << SIGNED_DROPPED) + base);
    const vfloat size = smaller_of(number, fused_subtract(number, vfloat_of(2.0f), vfloat_of(2 * as_float(base))));
    return (vfloat)((vint)size | (code & INT32_MIN));
}

/* The same for four vectors, divided by SMALL_UNIT: the largest of half precision's small numbers are that much below
 * one, and it keeps the factor that brings them up a finite number. */
#define SMALL_UNIT 0x1p16f

INLINE void decode_four_signed(const int8_t *codes, int32_t base, vfloat *numbers)
{
    const float unit = as_float(base - (1 << 23)); /* half precision counts from 2^-14, and codes from twice the base */
    for (int k = 0; k < 4; k += 2)
        widen_small(codes + k * LANES, numbers + k);
    for (int k = 0; k < 4; k++)
        numbers[k] *= unit;
}

INLINE vfloat decode_unsigned(vint code, int32_t base)
{
    return unless_zero(code, (vfloat)((code << UNSIGNED_DROPPED) + base));
}

/* The bits of |x| from `base` on. */
INLINE vint above_base(vfloat x, int32_t base)
{
    const vfloat size = magnitude(x);
    const vint linear = (vint)fused_add(size, vfloat_of(0.5f), vfloat_of(as_float(base)));
    return larger_int((vint)size, linear) - base;
}

INLINE vint encode_signed(vfloat x, int32_t base, vint noise)
{
    return signed_like((above_base(x, base) + least_noise(SIGNED_DROPPED) + noise) >> SIGNED_DROPPED, x);
}

/* Where elements share a scale, rounding adds little to an idle one, without gradient, of the size `above` zero. `shift` is
 * one of the two above. */
INLINE vint noise_at_rest(vfloat g, vint noise, int dropped, vint above, int shift)
{
    const vint all = noise + least_noise(dropped);
    return choose_int(equal(g, vfloat_of(0.0f)), smaller_int(all, above >> shift), all);
}

INLINE vint encode_signed_at_rest(vfloat x, vfloat g, int32_t base, vint noise, int shift)
{
    const vint above = above_base(x, base);
    return signed_like((above + noise_at_rest(g, noise, SIGNED_DROPPED, above, shift)) >> SIGNED_DROPPED, x);
}

/* Of positive numbers, but for a bound: v must never become zero under a momentum that is not, so its smallest code is
 * LEAST_CODE. */
#define LEAST_CODE 1

INLINE vint encode_positive(vfloat x, int32_t base, vint noise)
{
    return ((vint)x - (base - least_noise(UNSIGNED_DROPPED)) + noise) >> UNSIGNED_DROPPED;
}

INLINE vint encode_unsigned(vfloat x, int32_t base, vint noise)
{
    const vint code = larger_int(encode_positive(x, base, noise), vint_of(LEAST_CODE));
    return smaller_int(code, (vint)x); /* zero stays zero */
}

#endif
