/* What needs all of a matrix: factors of v, and Adafactor's first look at the whole update. */
#ifndef BAOC_FACTORS_H
#define BAOC_FACTORS_H

#include "arrays.h"
#include "sums.h"
#include "tile.h"

/* Adds the squares of part of a line, in fp32 or bf16, to sums over columns, if there are any; returns their own sum. */
INLINE double absorb_part(int type, const void *g, int n, float *col_sums)
{
    const uintptr_t size = type == BF16 ? 2 : 4;
    lanes row = {0};
    int i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES) {
        fetch((const void *)((uintptr_t)g + size * (uintptr_t)(i + FETCHED_AHEAD))); /* processors stop at a page's end */
        for (int k = 0; k < SUM_VECTORS; k++) {
            const int at = i + k * LANES;
            const vfloat square = square_without_spikes(numbers_at(type, g, at, LANES));
            row.part[k] += square;
            if (col_sums)
                store(col_sums + at, load(col_sums + at, LANES) + square, LANES);
        }
    }
    float tail[SUM_LANES];
    for (int at = i; at < n; at += LANES)
        store(tail + at - i, without_spikes(numbers_at(type, g, at, lanes_left(n, at))), LANES);
    for (int at = i; at < n && col_sums; at++)
        col_sums[at] += tail[at - i] * tail[at - i];
    return sum_of(&row, tail, n - i, 1);
}

/* Adds the squared gradients of some lines of one matrix to sums over its columns, if there are any, and sets the means of
 * its rows. */
static void ISA(absorb)(const job *job, int64_t first, int64_t lines, float *row_means, float *col_sums)
{
    const int64_t cols = job->words->cols;
    float scratch[TILE];
    for (int64_t line = 0; line < lines; line++) {
        double total = 0;
        for (int64_t column = 0; column < cols; column += TILE) {
            const int n = (int)(cols - column < TILE ? cols - column : TILE);
            float *sums = col_sums ? col_sums + column : NULL;
            const uint16_t *stored = bf16_gradient(job, first + line * cols + column);
            if (stored) {
                total += sums ? absorb_part(BF16, stored, n, sums) : absorb_part(BF16, stored, n, NULL);
            } else {
                const float *g = gradient(job, first + line * cols + column, n, NULL, scratch);
                total += sums ? absorb_part(FP32, g, n, sums) : absorb_part(FP32, g, n, NULL);
            }
        }
        row_means[line] = (float)(total / (double)cols);
    }
}

static void encode_factor(const array *stored, int64_t row, int64_t first, int n, float *x, uint32_t phase)
{
    if (stored->type == FP32) {
        memcpy((float *)(intptr_t)stored->data + first, x, sizeof(float) * (size_t)n);
        return;
    }
    if (stored->type == BF16) {
        for (int i = 0; i < n; i += LANES) {
            const vint each = noise(sequence_at(phase, first + i), BF16_DROPPED);
            store_16((uint16_t *)(intptr_t)stored->data + first + i, encode_bf16(load(x + i, lanes_left(n, i)), each),
                     lanes_left(n, i));
        }
        return;
    }
    group_cursor cursor = group_at(row, GROUP, first);
    const slot s = {.data = NULL, .fresh = x, .phase = phase};
    for (int done = 0, end; done < n; done = end) {
        uint8_t *exponent = (uint8_t *)(intptr_t)stored->exponents + cursor.group;
        vint top = {0};
        end = done + next_group(&cursor);
        for (int i = done; i < end; i += LANES)
            top = larger_int(top, (vint)load(x + i, lanes_left(end, i)));
        *exponent = exponent_of(&s, UNSIGNED_DROPPED, first, done, end, largest_lane(top));
        for (int i = done; i < end; i += LANES) {
            const vint each = noise(sequence_at(phase, first + i), UNSIGNED_DROPPED);
            const vint code = encode_unsigned(load(x + i, lanes_left(end, i)), base_at(0, *exponent), each);
            store_u8((uint8_t *)(intptr_t)stored->data + first + i, code, lanes_left(end, i));
        }
    }
}

static void ISA(read_factor)(const array *factor, int64_t row, int64_t first, int64_t n, float *out)
{
    for (int64_t done = 0, width; done < n; done += width) {
        width = n - done < TILE ? n - done : TILE;
        const float *x = read_v(factor, row, first + done, (int)width, out + done);
        if (x != out + done)
            memcpy(out + done, x, sizeof(float) * (size_t)width);
    }
}

/* factor <- keep * factor + add * mean, for `n` numbers from flat index `first` on, which starts a row of the factor.
 * `means` becomes what was stored, decoded. */
static void ISA(blend)(const array *factor, const job *job, int64_t row, int64_t first, int64_t n, float *means)
{
    const float keep = (float)job->scalars->v_keep, add = (float)job->scalars->v_add;
    for (int64_t done = 0, width; done < n; done += width) {
        width = n - done < TILE ? n - done : TILE;
        float scratch[TILE];
        const float *old = read_v(factor, row, first + done, (int)width, scratch);
        for (int64_t i = 0; i < width; i++)
            means[done + i] = old[i] * keep + means[done + i] * add;
        encode_factor(factor, row, first + done, (int)width, means + done, (uint32_t)job->words->v_phase);
    }
    ISA(read_factor)(factor, row, first, n, means);
}

/* Divides the columns of a matrix by their mean. */
static void ISA(normalise)(float *col, int64_t cols, double mean_floor)
{
    const float mean = (float)(sum(col, cols) / (double)cols);
    const float least = mean < (float)mean_floor ? (float)mean_floor : mean;
    for (int64_t i = 0; i < cols; i++)
        col[i] = col[i] / least;
}

/* A factor becomes its root, or the inverse of its root: then so does their product. */
static void ISA(take_root)(float *factor, int64_t n, int inverse)
{
    for (int64_t i = 0; i < n; i++)
        factor[i] = inverse ? 1.0f / sqrtf(factor[i]) : sqrtf(factor[i]);
}

/* The squared direction of Adafactor, of which v's root would only be squared again. */
INLINE vfloat squared_direction(int v_type, const numbers *c, vfloat raw, vfloat v)
{
    const vfloat g = without_spikes(raw);
    if (v_type == FACTORED) {
        const vfloat direction_ = direction(ADAFACTOR, 0, FACTORED, c, g, v, v);
        return direction_ * direction_;
    }
    const vfloat fresh = fused_add(v, vfloat_of(c->v_keep), g * g * c->v_add), floor = vfloat_of(c->v_floor);
    return g * g / choose(less(fresh, floor), floor, fresh);
}

INLINE double sum_of_squared_directions(int v_type, const numbers *c, const float *g, const float *v, int n)
{
    lanes sums = {0};
    int i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int k = 0; k < SUM_VECTORS; k++) {
            const int at = i + k * LANES;
            sums.part[k] += squared_direction(v_type, c, load(g + at, LANES), load(v + at, LANES));
        }
    float tail[SUM_LANES + LANES];
    for (int at = i; at < n; at += LANES)
        store(tail + at - i, squared_direction(v_type, c, load(g + at, lanes_left(n, at)), load(v + at, lanes_left(n, at))), LANES);
    return sum_of(&sums, tail, n - i, 0);
}

static squares measure_tile(const job *job, const factors *f, const numbers *c, int64_t first, int n)
{
    const job_words *w = job->words;
    float g_scratch[TILE], v_scratch[TILE], p_scratch[TILE];
    const float *p = weights_of(w, first, n, p_scratch), *g = gradient(job, first, n, p, g_scratch);
    squares result = {0, sum_of_finite_squares(p, n)};
    if (w->v.type == FACTORED) {
        expand(w, f, first - f->first, n, v_scratch);
        result.direction = sum_of_squared_directions(FACTORED, c, g, v_scratch, n);
    } else {
        const float *v = read_v(&w->v, w->row, first, n, v_scratch);
        result.direction = sum_of_squared_directions(FP32, c, g, v, n);
    }
    return result;
}

static squares ISA(measure)(const job *job, const factors *f, int64_t first, int64_t n)
{
    numbers c = numbers_of(job, 1.0);
    c.step = 1.0f;
    squares total = {0, 0};
    for (int64_t done = 0, width; done < n; done += width) {
        width = tile_width(job->words, first + done, n - done);
        squares part = measure_tile(job, f, &c, first + done, (int)width);
        total.direction += part.direction;
        total.param += part.param;
    }
    return total;
}

#endif
