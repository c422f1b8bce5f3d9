/* How numbers are stored, a vector at a time: the C side of `baoc/core/codecs`. */
#ifndef BAOC_CODEC_H
#define BAOC_CODEC_H

#include "simd.h"

/* The numbers of the formats are those of `baoc/core`: rounding.py, spec.py and codecs/int8.py; tests fail if one side
 * changes. */
#define GROUP 256
#define SPIKE 0x1p56f
#define PHASE_PER_ELEMENT 0x609FD5u

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

/* How a value between two codes rounds: up if the fraction of the gap below it is at least the threshold. Thresholds
 * have 12 bits and lie half a step away from 0 and 1, so that a value which is representable up to fp32 rounding stays
 * where it is. */
#define LARGEST_THRESHOLD (1 - 8 / 65536.0f)

/* One above the threshold, since that takes no further operation. */
INLINE vfloat threshold_plus_one(vuint sequence)
{
    return (vfloat)((~sequence & 0x7ff800u) | 0x3f800400u); /* the bits of a float in [1, 2) */
}

/* ---- bf16 ---- */

INLINE vfloat decode_bf16(vint data) { return (vfloat)(data << 16); }

/* bf16 is the upper half of fp32: noise added to the lower half carries into the upper one in the right share of cases.
 * The noise is 1 - threshold, in units of that half. */
INLINE vint encode_bf16(vfloat x, vint noise) { return (vint)(((vuint)x + (vuint)noise) >> 16); }

#define LEAST_NOISE 8

INLINE vint noise(vuint sequence) { return (vint)(((sequence >> 7) & 0xfff0u) | 8u); }

/* To nearest, ties to even, as torch rounds parameters. */
INLINE vint round_to_bf16(vfloat x)
{
    vuint bits = (vuint)x;
    vint rounded = (vint)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    return choose_int(equal(x, x), rounded, vint_of(0x7fc0));
}

/* ---- int8 ---- */

/* Codes are roots of `level = |value| / scale` in units that make them whole numbers: level = code ** 2 for signed slots,
 * code ** 4 for the others. */
#define SIGNED_LEVELS (127.0f * 127.0f)
#define UNSIGNED_LEVELS (255.0f * 255.0f * 255.0f * 255.0f)
#define SMALLEST_SCALE 0x1p-96f /* below it, levels per unit would overflow */

/* Levels; times `scale / SIGNED_LEVELS` or `scale / UNSIGNED_LEVELS` they are values. */
INLINE vfloat decode_signed(vint code)
{
    vfloat root = to_float(code);
    return root * magnitude(root);
}

INLINE vfloat decode_unsigned(vint code)
{
    vfloat root = to_float(code);
    vfloat square = root * root;
    return square * square;
}

/* Both encoders take the code below a value, from its root, and ask how far it is to the next one in the value domain,
 * without a division: level - f(below) >= threshold * (f(below + 1) - f(below)). Roots come from the caller, which can
 * have them ready in time. */

INLINE vfloat level_of_signed(vfloat x, float levels_per_unit) { return magnitude(x) * levels_per_unit; }

INLINE vint encode_signed(vfloat x, vfloat level, vfloat level_root, vfloat threshold_plus_one)
{
    vint below = truncate(level_root);
    vfloat low = to_float(below);
    vfloat gap = fused_add(low, vfloat_of(2.0f), vfloat_of(1.0f)); /* (b + 1) ** 2 - b ** 2 */
    vfloat wanted = fused_subtract(threshold_plus_one, gap, gap);
    vint code = add_one(at_most(wanted, minus_product(level, low, low)), below);
    vint negated = (vint)-(vuint)code; /* unsigned: the code of a NaN may be the smallest int */
    return choose_int(less(x, vfloat_of(0.0f)), negated, code);
}

/* Takes the second and the fourth root of the level. */
INLINE vint encode_unsigned(vfloat level_root, vfloat level_fourth_root, vfloat threshold_plus_one)
{
    vint below = truncate(level_fourth_root);
    vfloat low = to_float(below);
    vfloat square = low * low;
    vfloat middle = low + 0.5f;
    vfloat gap = middle * fused_add(middle * 4.0f, middle, vfloat_of(1.0f)); /* (b + 1) ** 4 - b ** 4 */
    vfloat wanted = fused_subtract(threshold_plus_one, gap, gap);
    vint code = add_one(at_most(wanted, fused_subtract(level_root, level_root, square * square)), below);
    /* v must never become zero under a momentum that is not: its smallest code is above zero */
    return larger_int(code, smaller_int((vint)level_root, vint_of(1)));
}

#endif
