/* Sums in a fixed number of lanes and a fixed order, whatever the width of vectors is. */
#ifndef BAOC_SUMS_H
#define BAOC_SUMS_H

#include "simd.h"

#define SUM_LANES 16
#define SUM_VECTORS (SUM_LANES / LANES)

typedef struct {
    vfloat part[SUM_VECTORS];
} lanes;

static double sum_of(const lanes *sums, const float *tail, int64_t count, int squared)
{
    double total = 0;
    for (int i = 0; i < SUM_LANES; i++)
        total += (double)sums->part[i / LANES][i % LANES];
    for (int64_t i = 0; i < count; i++)
        total += squared ? (double)tail[i] * (double)tail[i] : (double)tail[i];
    return total;
}

/* An element that is lost already must not take the others with it. */
INLINE vfloat finite_or_zero(vfloat x)
{
    return choose(less(magnitude(x), vfloat_of(INFINITY)), x, vfloat_of(0.0f));
}

static double sum_of_finite_squares(const float *x, int64_t n)
{
    lanes sums = {0};
    int64_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int k = 0; k < SUM_VECTORS; k++) {
            vfloat each = finite_or_zero(load(x + i + k * LANES, LANES));
            sums.part[k] += each * each;
        }
    float tail[SUM_LANES];
    for (int64_t at = i; at < n; at++)
        tail[at - i] = isfinite(x[at]) ? x[at] : 0.0f;
    return sum_of(&sums, tail, n - i, 1);
}

static double sum(const float *x, int64_t n)
{
    lanes sums = {0};
    int64_t i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int k = 0; k < SUM_VECTORS; k++)
            sums.part[k] += load(x + i + k * LANES, LANES);
    return sum_of(&sums, x + i, n - i, 0);
}

#endif
