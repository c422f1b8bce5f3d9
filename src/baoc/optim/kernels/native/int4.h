/* Four bits per element, the C side of `baoc/core/codecs/int4.py`. A tile's codes become floats and floats become codes
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

INLINE vfloat to_float(vint x) { return __builtin_convertvector(x, vfloat); }

/* Where a group's codes and scale are, and how many of its elements are there. */
typedef struct {
    uint8_t *codes;
    float *scale;
    int width;
} int4_group;

static int4_group int4_group_at(const array *stored, int64_t row, int64_t element, int left)
{
    const int64_t groups = (row + INT4_GROUP - 1) / INT4_GROUP, column = element % row;
    const int64_t index = element / row * groups + column / INT4_GROUP;
    const int64_t width = row - column < INT4_GROUP ? row - column : INT4_GROUP;
    int4_group group = {(uint8_t *)(intptr_t)stored->data + index * INT4_HALF,
                        (float *)(intptr_t)stored->scales + index, (int)(width < left ? width : left)};
    return group;
}

/* How many of the lanes at element `i` of a group are there. */
INLINE int lanes_there(int width, int i) { return width <= i ? 0 : lanes_left(width, i); }

static void unpack_int4(const array *stored, int64_t row, int64_t first, int n, float *out)
{
    int4_group group;
    for (int done = 0; done < n; done += group.width) {
        group = int4_group_at(stored, row, first + done, n - done);
        for (int i = 0; i < INT4_HALF; i += LANES) {
            const vint both = load_u8(group.codes + i, LANES);
            const vfloat low = to_float((both & 15) - INT4_ZERO), high = to_float((both >> 4) - INT4_ZERO);
            const int low_count = lanes_there(group.width, i), high_count = lanes_there(group.width, i + INT4_HALF);
            if (low_count)
                store(out + done + i, low * (1 / INT4_TOP) * *group.scale, low_count);
            if (high_count)
                store(out + done + i + INT4_HALF, high * (1 / INT4_TOP) * *group.scale, high_count);
        }
    }
}

/* A nibble for each lane; idle elements (without gradient) are rounded toward zero. */
INLINE vint int4_codes(const float *x, const float *g, float per_unit, uint32_t phase, int64_t element, int count)
{
    if (!count)
        return vint_of(INT4_ZERO);
    const vfloat value = load(x, count);
    const vint level = __builtin_convertvector(magnitude(value) * per_unit * (float)(1 << INT4_DROPPED), vint);
    const vint dither = choose_int(equal(load(g, count), vfloat_of(0.0f)), vint_of(0),
                                   noise(sequence_at(phase, element), INT4_DROPPED));
    const vint code = (level + dither + least_noise(INT4_DROPPED)) >> INT4_DROPPED;
    return signed_like(code, value) + INT4_ZERO;
}

static void pack_int4(const array *stored, int64_t row, int64_t first, int n, const float *x, const float *g, uint32_t phase)
{
    int4_group group;
    for (int done = 0; done < n; done += group.width) {
        group = int4_group_at(stored, row, first + done, n - done);
        vint top = {0};
        for (int i = 0; i < group.width; i += LANES)
            top = larger_int(top, (vint)magnitude(load(x + done + i, lanes_left(group.width, i))));
        const int32_t bits = largest_lane(top);
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        const float least = scale > INT4_SMALLEST_SCALE ? scale : INT4_SMALLEST_SCALE, per_unit = INT4_TOP / least;
        *group.scale = bits ? least : 0.0f;
        for (int i = 0; i < INT4_HALF; i += LANES) {
            const int low = done + i, high = low + INT4_HALF;
            const vint low_codes = int4_codes(x + low, g + low, per_unit, phase, first + low, lanes_there(group.width, i));
            const vint high_codes = int4_codes(x + high, g + high, per_unit, phase, first + high,
                                               lanes_there(group.width, i + INT4_HALF));
            narrow_u8(group.codes + i, low_codes | high_codes << 4);
        }
    }
}

#endif
