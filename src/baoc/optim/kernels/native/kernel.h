/* What each instruction set provides, and how tensors are cut into tiles. */
#ifndef BAOC_KERNEL_H
#define BAOC_KERNEL_H

#include "job.h"

#define TILE 1024 /* elements: a tile's gradient, slots and parameter fit the L1 cache as fp32 */
#define FETCHED_AHEAD (2 * TILE) /* elements between what is worked on and what memory is asked for */

typedef struct {
    double direction, param;
} squares;

/* The factors of the root of v, or of its inverse for Adafactor, for one stack of matrices. */
typedef struct {
    int64_t first; /* flat index */
    float *row;    /* (matrices, rows) */
    float *col;    /* (matrices, cols) */
} factors;

typedef struct {
    void (*update)(const job *, const factors *, double factor, int64_t first, int64_t n);
    squares (*measure)(const job *, const factors *, int64_t first, int64_t n);
    void (*balance)(const job *, int64_t first, int64_t lines, int rows, float *row, const float *col, float *col_sums);
    void (*absorb)(const job *, int64_t first, int64_t lines, float *row_means, float *col_sums);
    void (*blend)(const array *, const job *, int64_t row, int64_t first, int64_t n, float *means);
    void (*read_factor)(const array *, int64_t row, int64_t first, int64_t n, float *out);
    void (*normalise)(float *col, int64_t cols, double mean_floor);
    void (*take_root)(float *factor, int64_t n, int inverse);
} kernel;

/* Tiles hold whole int8 groups: several whole rows, or a piece of one that starts and ends on a group. */
static inline int64_t tile_width(const job_words *w, int64_t first, int64_t left)
{
    int64_t width = w->row > TILE ? w->row - first % w->row : TILE - TILE % w->row;
    width = width < TILE ? width : TILE;
    return width < left ? width : left;
}

#endif
