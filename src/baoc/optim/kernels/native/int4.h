/* Four bits per element, the C side of `baoc/core/codecs/quantized.py`. A tile's codes become floats and floats become codes
 * again: between them a slot is as good as fp32, so no other loop knows of this format. */
#ifndef BAOC_INT4_H
#define BAOC_INT4_H

#include "arrays.h"

#define INT4_GROUP 64
#define INT4_HALF (INT4_GROUP / 2) /* byte j of a group holds its elements j and j + 32 */
#define INT4_TOP 7.0f
#define INT4_ZERO 8
#define INT4_SMALLEST_SCALE 0x1p-100f
#define INT4_DROPPED 16 /* bits below the point of a level */

INLINE void unpack_group(const uint8_t *codes, float scale, float *out)
{
    for (int i = 0; i < INT4_HALF; i += LANES) {
        const vint both = widen_u8(codes + i);
        store_all(out + i, to_float((both & 15) - INT4_ZERO) * (1 / INT4_TOP) * scale);
        store_all(out + i + INT4_HALF, to_float((both >> 4) - INT4_ZERO) * (1 / INT4_TOP) * scale);
    }
}

/* Here and below, `first` starts a group; one that ends with its row goes through a padded copy. */
static void unpack_int4(const array *stored, int64_t row, int64_t first, int n, float *out)
{
    group_cursor at = group_at(row, INT4_GROUP, first);
    for (int done = 0, width; done < n; done += width) {
        const uint8_t *codes = (const uint8_t *)(intptr_t)stored->data + at.group * INT4_HALF;
        const float scale = ((const float *)(intptr_t)stored->scales)[at.group];
        width = next_group(&at);
        if (width == INT4_GROUP) {
            unpack_group(codes, scale, out + done);
        } else {
            float padded[INT4_GROUP];
            unpack_group(codes, scale, padded);
            memcpy(out + done, padded, sizeof(float) * (size_t)width);
        }
    }
}

/* Dithered codes in [-7, 7]. `units` is how many of the bits below a level's point make one. */
INLINE vint int4_codes(const float *x, const float *g, float units, vuint sequence, int shift)
{
    const vfloat value = load_all(x);
    const vint level = to_int(magnitude(value) * units);
    const vint dither = noise_at_rest(load_all(g), noise(sequence, INT4_DROPPED), INT4_DROPPED, level, shift);
    return signed_like((level + dither) >> INT4_DROPPED, value);
}

/* Returns the group's scale. */
INLINE float pack_group(const float *x, const float *g, vuint sequence, int shift, uint8_t *codes)
{
    vint top = {0};
    for (int i = 0; i < INT4_GROUP; i += LANES)
        top = larger_int(top, (vint)magnitude(load_all(x + i)));
    const float largest = as_float(largest_lane(top));
    const float scale = largest > INT4_SMALLEST_SCALE ? largest : INT4_SMALLEST_SCALE;
    const float units = INT4_TOP / scale * (float)(1 << INT4_DROPPED);
    for (int i = 0; i < INT4_HALF; i += LANES, sequence = next_sequence(sequence)) {
        const vint low = int4_codes(x + i, g + i, units, sequence, shift);
        const vint high =
            int4_codes(x + i + INT4_HALF, g + i + INT4_HALF, units, sequence + INT4_HALF * PHASE_PER_ELEMENT, shift);
        narrow_u8(codes + i, low + (high << 4) + (INT4_ZERO << 4 | INT4_ZERO));
    }
    return largest == 0.0f ? 0.0f : scale;
}

static void pack_int4(const array *stored, int64_t row, int64_t first, int n, const float *x, const float *g,
                      uint32_t phase, int shift)
{
    group_cursor at = group_at(row, INT4_GROUP, first);
    for (int done = 0, width; done < n; done += width) {
        uint8_t *codes = (uint8_t *)(intptr_t)stored->data + at.group * INT4_HALF;
        float *scale = (float *)(intptr_t)stored->scales + at.group;
        const vuint sequence = sequence_at(phase, first + done);
        width = next_group(&at);
        if (width == INT4_GROUP) {
            *scale = pack_group(x + done, g + done, sequence, shift, codes);
        } else {
            float padded_x[INT4_GROUP] = {0}, padded_g[INT4_GROUP] = {0};
            memcpy(padded_x, x + done, sizeof(float) * (size_t)width);
            memcpy(padded_g, g + done, sizeof(float) * (size_t)width);
            *scale = pack_group(padded_x, padded_g, sequence, shift, codes);
        }
    }
}

#endif
