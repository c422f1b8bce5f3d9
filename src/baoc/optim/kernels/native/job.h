/* What one parameter's step needs. Python fills the two structs from flat arrays, so every member is 64 bits wide and
 * their order is that of the constants `_NUMBERS` ... `_V_COL` and of `_SCALARS` in __init__.py. */
#ifndef BAOC_JOB_H
#define BAOC_JOB_H

#include <stdint.h>

enum type { FP32 = 1, BF16 = 2, INT8 = 3, FACTORED = 4 }; /* 0: the array is not there */
enum mechanism { SGD, MOMENTUM, ADAM, ADAFACTOR };

/* One stored array: dense numbers, or codes with one scale per group. */
typedef struct {
    int64_t type;
    int64_t data;   /* address */
    int64_t scales; /* address, or 0 */
} array;

typedef struct {
    int64_t mechanism;
    int64_t numel;
    int64_t row;    /* elements of one dim-0 row: int8 groups do not cross rows */
    int64_t outer;  /* what factors are kept for: `outer` stacks of `matrices` of `rows` x `cols` */
    int64_t matrices;
    int64_t rows;
    int64_t cols;
    int64_t scalars; /* which of the job_scalars are its own */
    int64_t negate;  /* maximize */
    int64_t m_phase;
    int64_t v_phase;
    array param;
    array grad;
    array m;
    array v;        /* of type FACTORED: its numbers are in the next two */
    array v_row;    /* (outer, matrices, rows) */
    array v_col;    /* (outer, matrices, cols) */
} job_words;

typedef struct {
    double step, shrink, coupled_decay;
    double m_keep, m_add, v_keep, v_add;
    double m_mass, v_mass_sqrt, eps;                     /* adam */
    double v_floor, v_mean_floor, min_param_rms, clip;   /* factored, adafactor */
} job_scalars;

typedef struct {
    const job_words *words;
    const job_scalars *scalars;
} job;

#endif
