/* Reading and writing whole runs of stored numbers, and where int8 groups lie. */
#ifndef BAOC_ARRAYS_H
#define BAOC_ARRAYS_H

#include "codec.h"
#include "kernel.h"
#include "planes.h"

/* How many of a vector's lanes are left at element `i` of `n`. */
INLINE int lanes_left(int n, int i) { return n - i < LANES ? n - i : LANES; }

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
    for (int i = 0; i < n; i += LANES)
        store(out + i, decode_bf16(load_u16(data + i, lanes_left(n, i))), lanes_left(n, i));
    return out;
}

/* Writes back what `floats_of` gave. */
static void write_param(const array *stored, int64_t first, int n, float *x)
{
    if (stored->type == FP32) {
        if (stored->planes)
            turn_planes(stored, first, n, x, 1);
        return; /* else updated in place */
    }
    uint16_t ordered[TILE];
    uint16_t *data = stored->planes ? ordered : (uint16_t *)(intptr_t)stored->data + first;
    for (int i = 0; i < n; i += LANES)
        store_16(data + i, round_to_bf16(load(x + i, lanes_left(n, i))), lanes_left(n, i));
    if (stored->planes)
        turn_planes(stored, first, n, ordered, 1);
}

/* The parameter's own 16 bits: in its memory, or gathered from planes into `ordered`. */
INLINE uint16_t *halves_of(const job_words *w, int64_t first, uint16_t *ordered)
{
    return w->param.planes ? ordered : (uint16_t *)(intptr_t)w->param.data + first;
}

/* Loops over vectors of a tile: `whole` for full ones, where loads and stores need no mask, `part` for the rest. */
#define FOR_VECTORS(whole, part)                          \
    do {                                                  \
        int i = 0;                                        \
        for (; i + LANES <= n; i += LANES) {              \
            whole;                                        \
        }                                                 \
        if (i < n) {                                      \
            const int count = n - i;                      \
            part;                                         \
        }                                                 \
    } while (0)

INLINE vfloat joined_16(vint half, vint low) { return (vfloat)((half << 16) + (low << 16 >> 16)); }
INLINE vfloat joined_8(vint half, vint low) { return (vfloat)((half << 16) + (low << 24 >> 16)); }

/* The parameter in fp32, joined with its low bits if they are kept. */
static float *weights_of(const job_words *w, int64_t first, int n, float *out)
{
    if (w->w.type != REST16 && w->w.type != REST8)
        return floats_of(&w->param, first, n, out);
    uint16_t ordered[TILE];
    const uint16_t *half = halves_of(w, first, ordered);
    if (w->param.planes)
        turn_planes(&w->param, first, n, ordered, 0);
    if (w->w.type == REST16) {
        const uint16_t *low = (const uint16_t *)(intptr_t)w->w.data + first;
        FOR_VECTORS(fetch(low + i + FETCHED_AHEAD);
                    store_all(out + i, joined_16(widen_u16(half + i), widen_u16(low + i))),
                    store(out + i, joined_16(load_u16(half + i, count), load_u16(low + i, count)), count));
    } else {
        const uint8_t *low = (const uint8_t *)(intptr_t)w->w.data + first;
        FOR_VECTORS(fetch(low + i + FETCHED_AHEAD);
                    store_all(out + i, joined_8(widen_u16(half + i), widen_u8(low + i))),
                    store(out + i, joined_8(load_u16(half + i, count), load_u8(low + i, count)), count));
    }
    return out;
}

INLINE vint dithered(vfloat x, vuint *sequence)
{
    const vint bits = weight_bits(x) + noise(*sequence, BF16_DROPPED) + least_noise(BF16_DROPPED);
    *sequence = next_sequence(*sequence);
    return (vint)((vuint)bits >> BF16_DROPPED);
}

INLINE vint rounded_to_rest8(vfloat x, vuint *sequence)
{
    const vint bits = weight_bits(x) + noise_of_rest8(*sequence);
    *sequence = next_sequence(*sequence);
    return bits >> 8;
}

INLINE vint half_of(vint bits) { return (vint)((vuint)(bits + 0x8000) >> 16); }
INLINE vint rest8_of(vint kept) { return kept << 24 >> 24; } /* the remainder's bits are those of the number itself */

/* Writes back what `weights_of` gave. */
static void write_weights(const job_words *w, int64_t first, int n, float *x)
{
    if (!w->w.type) {
        write_param(&w->param, first, n, x);
        return;
    }
    uint16_t ordered[TILE];
    uint16_t *half = halves_of(w, first, ordered);
    vuint sequence = sequence_at((uint32_t)w->w_phase, first);
    if (w->w.type == DITHERED) {
        FOR_VECTORS(narrow_16(half + i, dithered(load_all(x + i), &sequence)),
                    store_16(half + i, dithered(load(x + i, count), &sequence), count));
    } else if (w->w.type == REST8) {
        int8_t *low = (int8_t *)(intptr_t)w->w.data + first;
        int i = 0;
        for (; i + 4 * LANES <= n; i += 4 * LANES) { /* packing four vectors at once takes fewer instructions */
            vint rest[4];
            for (int k = 0; k < 4; k++) {
                const vint kept = rounded_to_rest8(load_all(x + i + k * LANES), &sequence);
                narrow_16(half + i + k * LANES, half_of(kept << 8));
                rest[k] = rest8_of(kept);
            }
            store_four_i8(low + i, rest);
        }
        for (; i < n; i += LANES) {
            const int count = lanes_left(n, i);
            const vint kept = rounded_to_rest8(load(x + i, count), &sequence);
            store_16(half + i, half_of(kept << 8), count);
            store_i8(low + i, rest8_of(kept), count);
        }
    } else {
        uint16_t *low = (uint16_t *)(intptr_t)w->w.data + first;
        FOR_VECTORS(const vint bits = weight_bits(load_all(x + i)); narrow_16(half + i, half_of(bits));
                    narrow_16(low + i, bits & 0xffff),
                    const vint bits = weight_bits(load(x + i, count)); store_16(half + i, half_of(bits), count);
                    store_16(low + i, bits & 0xffff, count));
    }
    if (w->param.planes)
        turn_planes(&w->param, first, n, ordered, 1);
}

/* The address of what is needed FETCHED_AHEAD elements after `first`: of rows in planes, the next one's. */
static uintptr_t address_ahead(const array *a, int64_t first)
{
    const int64_t row = a->planes * a->channels, distance = row > TILE ? row : FETCHED_AHEAD;
    return (uintptr_t)(a->data + (first + distance) * (a->type == FP32 ? 4 : 2));
}

/* fp32 gradient to descend on, with L2 decay if there is any. */
static const float *gradient(const job *job, int64_t first, int n, float *out)
{
    const float *g = floats_of(&job->words->grad, first, n, out);
    const float decay = (float)job->scalars->coupled_decay;
    if (!job->words->negate && decay == 0.0f)
        return g;
    float scratch[TILE];
    const float *p = weights_of(job->words, first, n, scratch);
    const float sign = job->words->negate ? -1.0f : 1.0f;
    for (int i = 0; i < n; i += LANES) {
        vfloat signed_g = load(g + i, lanes_left(n, i)) * sign;
        store(out + i, decay == 0.0f ? signed_g : signed_g + load(p + i, lanes_left(n, i)) * decay, lanes_left(n, i));
    }
    return out;
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
