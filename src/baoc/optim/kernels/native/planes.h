/* Tensors in torch's channels_last formats. There a row is `planes` (kernel height x width) planes of `channels`
 * numbers, while state, groups and factors go by a tensor's logical order, in which each channel has its planes side by
 * side: the two are each other's transpose. */
#ifndef BAOC_PLANES_H
#define BAOC_PLANES_H

#include "job.h"
#include "simd.h"

/* to[j * to_step + i] = from[i * from_step + j] for 8 x 8 numbers. */
#if defined(USE_AVX512) || defined(USE_AVX2)
#define BLOCK 8

INLINE __m256 two_halves(const float *low, const float *high)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

/* Four columns of a block, from column `j` on. */
INLINE void turn_half(const float *from, int64_t from_step, float *to, int64_t to_step)
{
    const __m256 a = two_halves(from, from + 4 * from_step), b = two_halves(from + from_step, from + 5 * from_step);
    const __m256 c = two_halves(from + 2 * from_step, from + 6 * from_step);
    const __m256 d = two_halves(from + 3 * from_step, from + 7 * from_step);
    const __m256 low_ab = _mm256_unpacklo_ps(a, b), high_ab = _mm256_unpackhi_ps(a, b);
    const __m256 low_cd = _mm256_unpacklo_ps(c, d), high_cd = _mm256_unpackhi_ps(c, d);
    _mm256_storeu_ps(to, _mm256_shuffle_ps(low_ab, low_cd, 0x44));
    _mm256_storeu_ps(to + to_step, _mm256_shuffle_ps(low_ab, low_cd, 0xee));
    _mm256_storeu_ps(to + 2 * to_step, _mm256_shuffle_ps(high_ab, high_cd, 0x44));
    _mm256_storeu_ps(to + 3 * to_step, _mm256_shuffle_ps(high_ab, high_cd, 0xee));
}

INLINE void turn_block(const float *from, int64_t from_step, float *to, int64_t to_step)
{
    turn_half(from, from_step, to, to_step);
    turn_half(from + 4, from_step, to + 4 * to_step, to_step);
}
#else
#define BLOCK INT32_MAX /* no vectors: the edge is all there is */

INLINE void turn_block(const float *from, int64_t from_step, float *to, int64_t to_step)
{
    (void)from, (void)from_step, (void)to, (void)to_step;
}
#endif

/* The transpose of rows x cols numbers, one by one; the longer way is the inner loop. */
#define UNROLLED _Pragma("GCC unroll 8")
#define DEFINE_TURN_EACH(name, element)                                                                             \
    static void name(const element *from, int64_t from_step, element *to, int64_t to_step, int64_t rows, int64_t cols) \
    {                                                                                                               \
        if (rows > cols) {                                                                                          \
            for (int64_t j = 0; j < cols; j++)                                                                      \
                UNROLLED for (int64_t i = 0; i < rows; i++)                                                         \
                    to[j * to_step + i] = from[i * from_step + j];                                                  \
        } else {                                                                                                    \
            for (int64_t i = 0; i < rows; i++)                                                                      \
                UNROLLED for (int64_t j = 0; j < cols; j++)                                                         \
                    to[j * to_step + i] = from[i * from_step + j];                                                  \
        }                                                                                                           \
    }
DEFINE_TURN_EACH(turn_16, uint16_t)
DEFINE_TURN_EACH(turn_each, float)

static void turn_32(const float *from, int64_t from_step, float *to, int64_t to_step, int64_t rows, int64_t cols)
{
    const int64_t whole_rows = rows - rows % BLOCK, whole_cols = cols - cols % BLOCK;
    for (int64_t j = 0; j < whole_cols; j += BLOCK)
        for (int64_t i = 0; i < whole_rows; i += BLOCK)
            turn_block(from + i * from_step + j, from_step, to + j * to_step + i, to_step);
    turn_each(from + whole_rows * from_step, from_step, to + whole_rows, to_step, rows - whole_rows, whole_cols);
    turn_each(from + whole_cols, from_step, to + whole_cols * to_step, to_step, rows, cols - whole_cols);
}

/* Copies elements [first, first + n) of a tensor between memory and logical order, in which `ordered` has them. */
static void turn_planes(const array *a, int64_t first, int n, void *ordered, int to_memory)
{
    const int64_t planes = a->planes, channels = a->channels, row = planes * channels;
    for (int64_t done = 0, count; done < n; done += count) {
        const int64_t column = (first + done) % row, channel = column / planes, plane = column % planes;
        const int64_t left = n - done, start = first + done - column + plane * channels + channel;
        int64_t width = 1, height = planes - plane < left ? planes - plane : left; /* of one channel */
        if (plane == 0 && left >= planes) {
            width = left / planes < channels - channel ? left / planes : channels - channel;
            height = planes;
        }
        count = width * height;
        if (a->type == FP32) {
            float *memory = (float *)(intptr_t)a->data + start, *here = (float *)ordered + done;
            if (to_memory)
                turn_32(here, planes, memory, channels, width, height);
            else
                turn_32(memory, channels, here, planes, height, width);
        } else {
            uint16_t *memory = (uint16_t *)(intptr_t)a->data + start, *here = (uint16_t *)ordered + done;
            if (to_memory)
                turn_16(here, planes, memory, channels, width, height);
            else
                turn_16(memory, channels, here, planes, height, width);
        }
    }
}

#endif
