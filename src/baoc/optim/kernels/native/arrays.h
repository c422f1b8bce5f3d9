/* Reading and writing whole runs of stored numbers, and where int8 groups lie. */
#ifndef BAOC_ARRAYS_H
#define BAOC_ARRAYS_H

#include "codec.h"
#include "kernel.h"
#include "planes.h"
#include "weights.h"

/* How many of a vector's lanes are left at element `i` of `n`. */
INLINE int lanes_left(int n, int i) { return n - i < LANES ? n - i : LANES; }

/* A vector of dense numbers from element `i` on. */
INLINE vfloat numbers_at(int type, const void *data, int i, int count)
{
    return type == BF16 ? decode_bf16(load_u16((const uint16_t *)data + i, count)) : load((const float *)data + i, count);
}

/* Decodes bf16, and returns the bits of the largest magnitude. */
INLINE int32_t widen(const uint16_t *from, int n, float *out)
{
    vint largest[2] = {{0}};
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        vint bits[2];
        widen_upper(from + i, bits);
        for (int k = 0; k < 2; k++) {
            largest[k] = larger_int(largest[k], bits[k] & INT32_MAX);
            store_all(out + i + k * LANES, (vfloat)bits[k]);
        }
    }
    for (; i < n; i += LANES) {
        const vfloat x = decode_bf16(load_u16(from + i, lanes_left(n, i)));
        largest[0] = larger_int(largest[0], (vint)magnitude(x));
        store(out + i, x, lanes_left(n, i));
    }
    return largest_lane(larger_int(largest[0], largest[1]));
}

/* At most TILE numbers, in logical order: where they are, or in `out`. */
static float *floats_of(const array *stored, int64_t first, int n, float *out)
{
    if (stored->type == FP32 && !stored->planes)
        return (float *)(intptr_t)stored->data + first;
    if (stored->type == FP32) {
        turn_planes(stored, first, n, out, 0);
        return out;
    }
    uint16_t ordered[TILE];
    const uint16_t *data = (const uint16_t *)(intptr_t)stored->data + first;
    if (stored->planes) {
        turn_planes(stored, first, n, ordered, 0);
        data = ordered;
    }
    if (stored->type == FP16)
        join(FP16, NO_ARRAY, data, NULL, n, out);
    else
        widen(data, n, out);
    return out;
}

/* The parameter's own 16 bits: in its memory, or gathered from planes into `ordered`. */
INLINE uint16_t *halves_of(const job_words *w, int64_t first, uint16_t *ordered)
{
    return w->param.planes ? ordered : (uint16_t *)(intptr_t)w->param.data + first;
}

/* The parameter in fp32, joined with its low bits if they are kept. */
static float *weights_of(const job_words *w, int64_t first, int n, float *out)
{
    if (w->w.type != REST16 && w->w.type != REST8)
        return floats_of(&w->param, first, n, out);
    uint16_t ordered[TILE];
    const uint16_t *half = halves_of(w, first, ordered);
    if (w->param.planes)
        turn_planes(&w->param, first, n, ordered, 0);
    if (w->param.type == FP16)
        join_stored(FP16, w, first, n, half, out);
    else
        join_stored(BF16, w, first, n, half, out);
    return out;
}

/* Writes back what `weights_of` gave. */
static void write_weights(const job_words *w, int64_t first, int n, float *x)
{
    if (w->param.type == FP32) {
        if (w->param.planes)
            turn_planes(&w->param, first, n, x, 1);
        return; /* else updated in place */
    }
    uint16_t ordered[TILE];
    uint16_t *half = halves_of(w, first, ordered);
    if (w->param.type == FP16)
        split_stored(FP16, w, first, n, x, half);
    else
        split_stored(BF16, w, first, n, x, half);
    if (w->param.planes)
        turn_planes(&w->param, first, n, ordered, 1);
}

/* The address of what is needed FETCHED_AHEAD elements after `first`: of rows in planes, the next one's. */
static uintptr_t address_ahead(const array *a, int64_t first)
{
    const int64_t row = a->planes * a->channels, distance = row > TILE ? row : FETCHED_AHEAD;
    return (uintptr_t)(a->data + (first + distance) * (a->type == FP32 ? 4 : 2));
}

/* The gradient in memory if it is bf16 and only has to be decoded, else NULL. */
static const uint16_t *bf16_gradient(const job *job, int64_t first)
{
    const job_words *w = job->words;
    const int is_plain = !w->grad.planes && !w->negate && (float)job->scalars->coupled_decay == 0.0f;
    return w->grad.type == BF16 && is_plain ? (const uint16_t *)(intptr_t)w->grad.data + first : NULL;
}

/* fp32 gradient to descend on, with L2 decay if there is any. `p` has the weights, or is NULL: then they are read here. */
static const float *gradient(const job *job, int64_t first, int n, const float *p, float *out)
{
    const float *g = floats_of(&job->words->grad, first, n, out);
    const float decay = (float)job->scalars->coupled_decay;
    if (!job->words->negate && decay == 0.0f)
        return g;
    float scratch[TILE];
    if (!p && decay != 0.0f)
        p = weights_of(job->words, first, n, scratch);
    const float sign = job->words->negate ? -1.0f : 1.0f;
    for (int i = 0; i < n; i += LANES) {
        vfloat signed_g = load(g + i, lanes_left(n, i)) * sign;
        store(out + i, decay == 0.0f ? signed_g : signed_g + load(p + i, lanes_left(n, i)) * decay, lanes_left(n, i));
    }
    return out;
}

static int has_spike(const float *g, int n)
{
    vint most = {0};
    for (int i = 0; i < n; i += LANES)
        most = larger_int(most, (vint)magnitude(load(g + i, lanes_left(n, i))));
    return largest_lane(most) >= bits_of(SPIKE);
}

/* The same, and whether it has a spike: in bf16 this is found while decoding. */
static const float *checked_gradient(const job *job, int64_t first, int n, const float *p, float *out, int *spiked)
{
    const uint16_t *stored = bf16_gradient(job, first);
    if (stored) {
        *spiked = widen(stored, n, out) >= bits_of(SPIKE);
        return out;
    }
    const float *g = gradient(job, first, n, p, out);
    *spiked = has_spike(g, n);
    return g;
}

/* The gradient as the state sees it where elements share numbers: without what would spoil them for all. */
INLINE vmask is_sane(vfloat g) { return less(magnitude(g), vfloat_of(SPIKE)); }
INLINE vfloat without_spikes(vfloat g) { return keep_lanes(is_sane(g), g); }
INLINE vfloat square_without_spikes(vfloat g) { return keep_lanes(less(g * g, vfloat_of(SPIKE * SPIKE)), g * g); }
INLINE float without_spike(float g) { return fabsf(g) < SPIKE ? g : 0.0f; }

/* Visits groups of `most` elements, or fewer at the end of a row, from the start of one on. */
typedef struct {
    int64_t row, most, column, group;
} group_cursor;

static group_cursor group_at(int64_t row, int64_t most, int64_t first)
{
    int64_t groups = (row + most - 1) / most;
    group_cursor at = {row, most, first % row, first / row * groups + first % row / most};
    return at;
}

static int next_group(group_cursor *at)
{
    int width = (int)(at->row - at->column < at->most ? at->row - at->column : at->most);
    at->column = at->column + width == at->row ? 0 : at->column + width;
    at->group++;
    return width;
}

/* What a group's exponent is stored as: a group of zeros has a zero there too. */
static uint8_t stored_exponent(int32_t top)
{
    const int exponent = top >> 23;
    return (uint8_t)((exponent < LEAST_EXPONENT ? LEAST_EXPONENT : exponent > MOST_EXPONENT ? MOST_EXPONENT : exponent) -
                     LEAST_EXPONENT);
}

INLINE int32_t base_at(int is_signed, uint8_t stored) { return base_of(is_signed, stored + LEAST_EXPONENT); }

static const float *read_v(const array *stored, int64_t row, int64_t first, int n, float *out)
{
    if (stored->type != INT8)
        return floats_of(stored, first, n, out);
    group_cursor at = group_at(row, GROUP, first);
    const uint8_t *codes = (const uint8_t *)(intptr_t)stored->data + first;
    for (int done = 0, width; done < n; done += width) {
        const int32_t base = base_at(0, ((const uint8_t *)(intptr_t)stored->exponents)[at.group]);
        width = next_group(&at);
        for (int i = 0; i < width; i += LANES) {
            const int count = lanes_left(width, i);
            store(out + done + i, decode_unsigned(load_u8(codes + done + i, count), base), count);
        }
    }
    return out;
}

#endif
