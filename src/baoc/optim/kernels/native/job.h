/* What one parameter's step needs. Python fills the two structs from flat arrays, so every member is 64 bits wide. Their
 * names stand here and nowhere else: module.c hands these lists to Python. */
#ifndef BAOC_JOB_H
#define BAOC_JOB_H

#include <stdint.h>

#define TYPES(X) X(FP32) X(BF16) X(INT8) X(INT4) X(FACTORED) \
    X(FP16) /* of parameters and gradients only */ \
    X(REST16) X(REST8) X(DITHERED) /* the low bits of a parameter */ /* from 1 on; 0: the array is not there */
#define MECHANISMS(X) X(SGD) X(MOMENTUM) X(ADAM) X(ADAFACTOR) X(LION) X(BALANCED) \
    X(AHEAD) /* writes Nesterov's look ahead to `param`, and makes no update of it */

/* One stored array: dense numbers, or codes with one exponent (int8) or scale (int4) per group, all three of them
 * addresses. `planes` and `channels` tell how a parameter or gradient lies in memory, see planes.h; 0: in its order. */
#define ARRAY_PARTS(X) X(type) X(data) X(exponents) X(scales) X(planes) X(channels)

#define JOB_NUMBERS(X) \
    X(mechanism) X(numel) \
    X(row)                                 /* elements of one dim-0 row: int8 groups do not cross rows */ \
    X(outer) X(matrices) X(rows) X(cols)   /* what factors are kept for: `outer` stacks of `matrices` of `rows` x `cols` */ \
    X(scalars)                             /* which of the job_scalars are its own */ \
    X(negate)                              /* maximize */ \
    X(turns) X(row_turns)                  /* balanced: how often lines are brought to one size; bit i: turn i is rows' */ \
    X(m_phase) X(v_phase) X(w_phase)

/* `v` of type FACTORED has its numbers in `v_row`, (outer, matrices, rows), and `v_col`, (outer, matrices, cols); one of
 * them alone makes it a mean along one axis. Balanced updates have factors too, and none of them is stored. `w` has what
 * rounding removed from a parameter of 16 bits; without it, the parameter is rounded to nearest. */
#define JOB_ARRAYS(X) X(param) X(grad) X(m) X(v) X(v_row) X(v_col) X(w)

#define JOB_SCALARS(X) \
    X(step) X(shrink) X(coupled_decay) X(m_keep) X(m_add) X(v_keep) X(v_add) \
    X(m_mass) X(v_mass_sqrt) X(eps)                         /* adam */ \
    X(of_m) X(of_grad)                                      /* lion, balanced, ahead */ \
    X(v_floor) X(v_mean_floor) X(min_param_rms) X(clip)     /* factored, adafactor */

#define ENTRY(name) name,
#define WORD(name) int64_t name;
#define ARRAY(name) array name;
#define NUMBER(name) double name;

enum type { NO_ARRAY, TYPES(ENTRY) };
enum mechanism { MECHANISMS(ENTRY) };

typedef struct {
    ARRAY_PARTS(WORD)
} array;

typedef struct {
    JOB_NUMBERS(WORD)
    JOB_ARRAYS(ARRAY)
} job_words;

typedef struct {
    JOB_SCALARS(NUMBER)
} job_scalars;

typedef struct {
    const job_words *words;
    const job_scalars *scalars;
    int *spiked; /* set to 1, by any thread, where a gradient is beyond SPIKE or no number */
} job;

#endif
