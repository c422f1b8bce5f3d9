/* Parameters of 16 bits and their low bits: the C side of `baoc/core/codecs/weights.py`. */
#ifndef BAOC_WEIGHTS_H
#define BAOC_WEIGHTS_H

#include "codec.h"
#include "kernel.h"

/* A weight is widened to an integer whose upper half, rounded to nearest, is the parameter. The remainder is the
 * difference, so the integer is the sum of the two. For bf16 these are the bits of fp32 itself; fp16 counts exponents from
 * another base, and its small numbers are multiples of 2^-40. `param` (BF16 or FP16) and `type` (of the low bits) are
 * known to the compiler. */
#define REBASE 0x38000000          /* fp32 bits minus this are an exponent of fp16 with 23 bits of mantissa */
#define LEAST_NORMAL 0x38800000    /* fp32 bits of 2^-14, the smallest normal number of fp16 */
#define TOP 0x47800000             /* of 65536, where fp16 ends */
#define WIDE_NORMAL (1 << 26)      /* widened 2^-14 */
#define WIDE_INFINITY (31 << 26)

/* Small magnitudes as multiples of `1 / units`. */
INLINE vint in_units(vfloat x, float units) { return nearest_int(smaller_of(magnitude(x), vfloat_of(0x1p-14f)) * units); }

INLINE vint wide_fp16(vfloat x, vint small, vint normal)
{
    const vint wide = choose_int(less_int((vint)magnitude(x), vint_of(LEAST_NORMAL)), small, normal);
    return choose_int(equal(x, x), wide, vint_of(0x7e000000)) | ((vint)x & INT32_MIN);
}

INLINE vint normal_fp16(vfloat x) { return (smaller_int((vint)magnitude(x), vint_of(TOP)) - REBASE) << 3; }

INLINE vint wide_of(int param, vfloat x)
{
    if (param == FP16)
        return wide_fp16(x, in_units(x, 0x1p40f), normal_fp16(x));
    return choose_int(equal(x, x), (vint)x, vint_of(0x7fc00000));
}

INLINE vfloat number_of(int param, vint wide)
{
    if (param != FP16)
        return (vfloat)wide;
    const vint size = wide & INT32_MAX, beyond = smaller_int(size - WIDE_INFINITY, vint_of(1)); /* 1: no number */
    const vint normal = choose_int(less_int(size, vint_of(WIDE_INFINITY)), (size >> 3) + REBASE,
                                   vint_of(0x7f800000) + (beyond << 22));
    const vfloat small = to_float(size) * 0x1p-40f;
    return (vfloat)((vint)choose(less_int(size, vint_of(WIDE_NORMAL)), small, (vfloat)normal) | (wide & INT32_MIN));
}

/* Bits whose upper half is the parameter. */
INLINE vint bits_of_half(vint wide) { return wide + 0x8000; }
INLINE vint bits_of_dithered(vint wide, vuint sequence)
{
    return wide + noise(sequence, BF16_DROPPED) + least_noise(BF16_DROPPED);
}

/* Without a format of low bits it is rounded to nearest, ties to even, as in torch. */
INLINE vint to_even(vint wide) { return wide + 0x7fff + (wide >> 16 & 1); }
INLINE vint bits_of_nearest(int param, vfloat x)
{
    if (param == FP16)
        return wide_fp16(x, in_units(x, 0x1p24f) << 16, to_even(normal_fp16(x)));
    return to_even(wide_of(BF16, x));
}

/* Noise of a remainder of 8 bits is the upper 8 of the sequence's 23. These come at the top of a word: what is above them
 * needs no mask then. */
INLINE vuint rest8_sequence_at(uint32_t phase, int64_t first) { return sequence_at(phase, first) << 9; }
INLINE vuint next_rest8_sequence(vuint sequence) { return sequence + (LANES * PHASE_PER_ELEMENT << 9); }
INLINE vint noise_of_rest8(vuint sequence) { return (vint)(sequence >> 24); }

/* ---- four vectors at once, which takes fewer instructions ---- */

#define FOUR (4 * LANES)

INLINE void join_four(int param, int type, const uint16_t *half, const void *low, float *out)
{
    vint wide[4];
    for (int k = 0; k < 4; k += 2)
        widen_upper(half + k * LANES, wide + k);
    for (int k = 0; k < 4; k++) {
        if (type == REST8)
            wide[k] += widen_i8((const int8_t *)low + k * LANES) << 8;
        else if (type == REST16)
            wide[k] += widen_u16((const uint16_t *)low + k * LANES) << 16 >> 16;
        store_all(out + k * LANES, number_of(param, wide[k]));
    }
}

INLINE void split_four(int param, int type, const float *x, vuint *sequence, uint16_t *half, void *low)
{
    vint bits[4];
    for (int k = 0; k < 4; k++) {
        const vfloat each = load_all(x + k * LANES);
        bits[k] = type ? wide_of(param, each) : bits_of_nearest(param, each);
        if (type == REST8) {
            bits[k] += noise_of_rest8(*sequence);
            *sequence = next_rest8_sequence(*sequence);
        } else if (type == DITHERED) {
            bits[k] = bits_of_dithered(bits[k], *sequence);
            *sequence = next_sequence(*sequence);
        }
    }
    if (type == REST8)
        store_second_bytes((int8_t *)low, bits); /* the remainder's bits are those of the number itself */
    for (int k = 0; k < 4; k += 2) {
        if (type == REST16)
            store_lower((uint16_t *)low + k * LANES, bits + k);
        if (type == REST16 || type == REST8) {
            bits[k] = bits_of_half(bits[k]);
            bits[k + 1] = bits_of_half(bits[k + 1]);
        }
        store_upper(half + k * LANES, bits + k);
    }
}

INLINE int low_bytes(int type) { return type == REST16 ? 2 : type == REST8; }

/* `out` has room for a whole tile, and so for what comes after the last number. */
INLINE void join(int param, int type, const uint16_t *half, const char *low, int n, float *out)
{
    const int each = low_bytes(type);
    int i = 0;
    for (; i + FOUR <= n; i += FOUR) {
        for (int byte = 0; byte < FOUR * each; byte += LINE)
            fetch(low + (i + FETCHED_AHEAD) * each + byte);
        join_four(param, type, half + i, low + i * each, out + i);
    }
    if (i < n) {
        uint16_t last[FOUR] = {0}, last_low[FOUR] = {0};
        memcpy(last, half + i, (size_t)(n - i) * 2);
        if (each)
            memcpy(last_low, low + i * each, (size_t)((n - i) * each));
        join_four(param, type, last, last_low, out + i);
    }
}

INLINE void split(int param, int type, const float *x, int n, vuint sequence, uint16_t *half, char *low)
{
    const int each = low_bytes(type);
    int i = 0;
    for (; i + FOUR <= n; i += FOUR)
        split_four(param, type, x + i, &sequence, half + i, low + i * each);
    if (i < n) {
        float numbers[FOUR] = {0};
        uint16_t last[FOUR], last_low[FOUR];
        memcpy(numbers, x + i, sizeof(float) * (size_t)(n - i));
        split_four(param, type, numbers, &sequence, last, last_low);
        memcpy(half + i, last, (size_t)(n - i) * 2);
        if (each)
            memcpy(low + i * each, last_low, (size_t)((n - i) * each));
    }
}

/* The low bits that belong to elements from `first` on. */
INLINE char *low_at(const job_words *w, int64_t first)
{
    return (char *)(intptr_t)w->w.data + first * low_bytes((int)w->w.type);
}

/* Whatever the low bits are, if there are any: */
INLINE void join_stored(int param, const job_words *w, int64_t first, int n, const uint16_t *half, float *out)
{
    if (w->w.type == REST16)
        join(param, REST16, half, low_at(w, first), n, out);
    else
        join(param, REST8, half, low_at(w, first), n, out);
}

INLINE void split_stored(int param, const job_words *w, int64_t first, int n, const float *x, uint16_t *half)
{
    const uint32_t phase = (uint32_t)w->w_phase;
    if (w->w.type == REST16)
        split(param, REST16, x, n, (vuint){0}, half, low_at(w, first));
    else if (w->w.type == REST8)
        split(param, REST8, x, n, rest8_sequence_at(phase, first), half, low_at(w, first));
    else if (w->w.type == DITHERED)
        split(param, DITHERED, x, n, sequence_at(phase, first), half, NULL);
    else
        split(param, NO_ARRAY, x, n, (vuint){0}, half, NULL);
}

#endif
