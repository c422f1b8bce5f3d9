/* Sums over rows and columns of a direction that is never held as a whole: the C side of `balance.py`. */
#ifndef BAOC_BALANCE_H
#define BAOC_BALANCE_H

#include <float.h>

#include "arrays.h"
#include "int4.h"
#include "mechanism.h"
#include "sums.h"

/* Old values of a signed slot. */
static const float *read_m(const array *stored, int64_t row, int64_t first, int n, float *out)
{
    if (stored->type == INT4) {
        unpack_int4(stored, row, first, n, out);
        return out;
    }
    if (stored->type != INT8)
        return floats_of(stored, first, n, out);
    group_cursor at = group_at(row, GROUP, first);
    const int8_t *codes = (const int8_t *)(intptr_t)stored->data + first;
    for (int done = 0, width; done < n; done += width) {
        const int32_t base = base_at(1, ((const uint8_t *)(intptr_t)stored->exponents)[at.group]);
        width = next_group(&at);
        for (int i = 0; i < width; i += LANES)
            store(out + done + i, decode_signed(load_i8(codes + done + i, lanes_left(width, i)), base), lanes_left(width, i));
    }
    return out;
}

/* The direction of some elements, of which nothing is stored. `first` starts a tile. */
static void peek(const job *job, const numbers *c, int64_t first, int n, float *out)
{
    const job_words *w = job->words;
    float g_scratch[TILE], m_scratch[TILE];
    const float *g = gradient(job, first, n, NULL, g_scratch);
    const float *m = w->m.type ? read_m(&w->m, w->row, first, n, m_scratch) : NULL;
    for (int i = 0; i < n; i += LANES) {
        const int count = lanes_left(n, i);
        const vfloat clean = without_spikes(load(g + i, count));
        vfloat fresh = {0};
        if (m)
            fresh = fused_add(load(m + i, count), vfloat_of(c->m_keep), clean * c->m_add);
        store(out + i, look_ahead(c, clean, fresh), count);
    }
}

INLINE double sum_of_scaled_squares(const float *x, const float *scale, int n)
{
    lanes sums = {0};
    int i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int k = 0; k < SUM_VECTORS; k++) {
            const vfloat each = load(x + i + k * LANES, LANES) * load(scale + i + k * LANES, LANES);
            sums.part[k] += each * each;
        }
    float tail[SUM_LANES];
    for (int at = i; at < n; at++)
        tail[at - i] = x[at] * scale[at];
    return sum_of(&sums, tail, n - i, 1);
}

/* Some lines of one matrix. With `rows`, finds the factors that bring them to one size, given those of columns; then, with
 * `col_sums`, adds up the squares of each column. */
static void ISA(balance)(const job *job, int64_t first, int64_t lines, int rows, float *row, const float *col, float *col_sums)
{
    const numbers c = numbers_of(job, 1.0);
    const int64_t cols = job->words->cols;
    float part[TILE];
    for (int64_t line = 0; line < lines; line++) {
        const int64_t start = first + line * cols;
        double total = 0;
        for (int64_t column = 0; column < cols && rows; column += TILE) {
            const int n = (int)(cols - column < TILE ? cols - column : TILE);
            peek(job, &c, start + column, n, part);
            total += sum_of_scaled_squares(part, col + column, n);
        }
        if (rows) {
            const float mean = (float)(total / (double)cols);
            row[line] = 1.0f / sqrtf(mean < FLT_MIN ? FLT_MIN : mean);
        }
        for (int64_t column = 0; column < cols && col_sums; column += TILE) {
            const int n = (int)(cols - column < TILE ? cols - column : TILE);
            peek(job, &c, start + column, n, part);
            for (int i = 0; i < n; i++) {
                const float each = part[i] * row[line];
                col_sums[column + i] += each * each;
            }
        }
    }
}

#endif
