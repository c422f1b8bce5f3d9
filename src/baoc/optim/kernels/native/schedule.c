/* Who does what: cuts jobs into spans, and hands spans to threads.
 *
 * The cut depends on shapes alone and every sum is added up in the order of its spans, so results do not depend on the
 * number of threads.
 */
#include "schedule.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#define SPAN (1 << 16)   /* elements handed to a thread at once */
#define STRIPS 16        /* parts of a matrix whose column sums are made side by side */
#define SMALL (1 << 15)  /* a tensor below this is not worth a meeting of threads */

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* A job whose elements depend on sums over all of them. */
static int is_whole(const job_words *w) { return w->mechanism == ADAFACTOR || w->v.type == FACTORED; }

/* ---- spans ---- */

/* A span is some whole rows, or a piece of a long one. */
static int64_t span_width(const job_words *w) { return w->row >= SPAN ? SPAN : SPAN - SPAN % w->row; }

static int64_t spans_per_row(const job_words *w) { return w->row > SPAN ? divided_up(w->row, SPAN) : 0; }

static int64_t span_count(const job_words *w)
{
    int64_t per_row = spans_per_row(w);
    return per_row ? w->numel / w->row * per_row : divided_up(w->numel, span_width(w));
}

static void span_at(const job_words *w, int64_t index, int64_t *first, int64_t *n)
{
    int64_t per_row = spans_per_row(w);
    if (per_row) {
        int64_t column = index % per_row * SPAN;
        *first = index / per_row * w->row + column;
        *n = smaller(SPAN, w->row - column);
    } else {
        *first = index * span_width(w);
        *n = smaller(span_width(w), w->numel - *first);
    }
}

/* ---- whole jobs ---- */

/* The threads that work on one job together; a team of one needs no barriers. */
typedef struct {
    int rank, size;
} team;

static void meet(team team)
{
    if (team.size > 1) {
#ifdef _OPENMP
#pragma omp barrier
#endif
    }
}

/* Scratch memory of a whole job, shared by its team. */
typedef struct {
    float *row;        /* one matrix: (rows); stacks: one (matrices, rows) for each of the team */
    float *col;        /* one matrix: (cols); stacks: one (matrices, cols) for each of the team */
    float *partial;    /* one matrix: (STRIPS, cols); balanced stacks: as col */
    squares *sums;     /* one for each span, or stack */
} scratch;

/* Factors of more than one matrix: each stack has its own, so threads need not meet over them. A single matrix counts as
 * a stack if its factors are int8, since a group of them spans strips and has one exponent. */
static int is_stack(const job_words *w)
{
    return w->v.type == FACTORED &&
           (w->outer > 1 || w->matrices > 1 || w->v_row.type == INT8 || w->v_col.type == INT8);
}

static int64_t strip_count(const job_words *w) { return smaller(STRIPS, w->rows); }

static int64_t sum_count(const job_words *w) { return is_stack(w) ? w->outer : span_count(w); }

static size_t scratch_bytes(const job_words *w, int threads, scratch *parts, char *base)
{
    size_t copies = is_stack(w) ? (size_t)threads : 1;
    size_t row = 0, col = 0, partial = 0;
    if (w->v.type == FACTORED) {
        row = copies * (size_t)(w->matrices * w->rows);
        col = copies * (size_t)(w->matrices * w->cols);
        partial = !is_stack(w) ? (size_t)(strip_count(w) * w->cols) : w->mechanism == BALANCED ? col : 0;
    }
    size_t sums = w->mechanism == ADAFACTOR ? (size_t)sum_count(w) : 0;
    if (parts) {
        parts->sums = (squares *)base;
        parts->row = (float *)(parts->sums + sums);
        parts->col = parts->row + row;
        parts->partial = parts->col + col;
    }
    return sums * sizeof(squares) + (row + col + partial) * sizeof(float);
}

static void fill_ones(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = 1.0f;
}

static void take_inverse_roots(float *means, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        means[i] = 1.0f / sqrtf(means[i] < FLT_MIN ? FLT_MIN : means[i]);
}

/* Means over columns, from the sums of all strips. */
static void add_strips(const job_words *w, scratch *s)
{
    memcpy(s->col, s->partial, sizeof(float) * (size_t)w->cols);
    for (int64_t strip = 1; strip < strip_count(w); strip++)
        for (int64_t i = 0; i < w->cols; i++)
            s->col[i] += s->partial[strip * w->cols + i];
    for (int64_t i = 0; i < w->cols; i++)
        s->col[i] /= (float)w->rows;
}

/* Rows alone: each one's factor is known as soon as it is absorbed, so it is updated while it is in the cache. */
static int is_by_rows(const job_words *w) { return w->mechanism == ADAM && w->v_row.type == FP32 && !w->v_col.type; }

static void run_rows(const job *job, const kernel *k, team team, scratch *s)
{
    const job_words *w = job->words;
    const int64_t strips = strip_count(w), height = SPAN / w->cols + 1;
    const factors f = {0, s->row, s->col};
    if (team.rank == 0)
        fill_ones(s->col, w->cols);
    meet(team);
    for (int64_t strip = team.rank; strip < strips; strip += team.size) {
        const int64_t end = (strip + 1) * w->rows / strips;
        for (int64_t from = strip * w->rows / strips, lines; from < end; from += lines) {
            lines = smaller(height, end - from);
            k->absorb(job, from * w->cols, lines, s->row + from, NULL);
            k->blend(&w->v_row, job, w->rows, from, lines, s->row + from);
            k->take_root(s->row + from, lines, 0);
            k->update(job, &f, 1.0, from * w->cols, lines * w->cols);
        }
    }
}

/* One matrix: strips of rows, then columns added up over the strips. */
static void absorb_matrix(const job *job, const kernel *k, team team, scratch *s)
{
    const job_words *w = job->words;
    const int64_t strips = strip_count(w);
    for (int64_t strip = team.rank; strip < strips; strip += team.size) {
        int64_t from = strip * w->rows / strips, to = (strip + 1) * w->rows / strips;
        float *col_sums = s->partial + strip * w->cols;
        memset(col_sums, 0, sizeof(float) * (size_t)w->cols);
        k->absorb(job, from * w->cols, to - from, s->row + from, col_sums);
        if (w->v_row.type)
            k->blend(&w->v_row, job, w->rows, from, to - from, s->row + from);
        else
            fill_ones(s->row + from, to - from);
        k->take_root(s->row + from, to - from, w->mechanism == ADAFACTOR);
    }
    meet(team);
    if (team.rank == 0) {
        add_strips(w, s);
        if (w->v_col.type)
            k->blend(&w->v_col, job, w->cols, 0, w->cols, s->col);
        else
            fill_ones(s->col, w->cols);
        if (w->v_row.type && w->v_col.type)
            k->normalise(s->col, w->cols, job->scalars->v_mean_floor);
        k->take_root(s->col, w->cols, w->mechanism == ADAFACTOR);
    }
    meet(team);
}

/* Which lines are brought to one size at a turn, and at the next one in the same pass: rows first, then columns. */
typedef struct {
    int rows, cols;
} turn;

static turn turn_at(const job_words *w, int64_t *at)
{
    turn now = {(int)(w->row_turns >> *at & 1), 0};
    *at += now.rows;
    if (*at < w->turns && !(w->row_turns >> *at & 1)) {
        now.cols = 1;
        *at += 1;
    }
    return now;
}

/* One matrix: factors that bring its rows and columns to one size, turn by turn. */
static void balance_matrix(const job *job, const kernel *k, team team, scratch *s)
{
    const job_words *w = job->words;
    const int64_t strips = strip_count(w);
    if (team.rank == 0) {
        fill_ones(s->row, w->rows);
        fill_ones(s->col, w->cols);
    }
    meet(team);
    for (int64_t at = 0; at < w->turns;) {
        const turn now = turn_at(w, &at);
        for (int64_t strip = team.rank; strip < strips; strip += team.size) {
            int64_t from = strip * w->rows / strips, to = (strip + 1) * w->rows / strips;
            float *col_sums = s->partial + strip * w->cols;
            memset(col_sums, 0, sizeof(float) * (size_t)w->cols);
            k->balance(job, from * w->cols, to - from, now.rows, s->row + from, s->col, now.cols ? col_sums : NULL);
        }
        meet(team);
        if (team.rank == 0 && now.cols) {
            add_strips(w, s);
            take_inverse_roots(s->col, w->cols);
        }
        meet(team);
    }
}

static factors stack_factors(const job_words *w, team team, const scratch *s, int64_t outer)
{
    factors f = {outer * w->matrices * w->rows * w->cols, s->row + team.rank * w->matrices * w->rows,
                 s->col + team.rank * w->matrices * w->cols};
    return f;
}

/* From what is stored to what the update needs. */
static void prepare_stack(const job *job, const kernel *k, const factors *f)
{
    const job_words *w = job->words;
    for (int64_t i = 0; i < w->matrices && w->v_row.type && w->v_col.type; i++)
        k->normalise(f->col + i * w->cols, w->cols, job->scalars->v_mean_floor);
    k->take_root(f->row, w->matrices * w->rows, w->mechanism == ADAFACTOR);
    k->take_root(f->col, w->matrices * w->cols, w->mechanism == ADAFACTOR);
}

static void absorb_stack(const job *job, const kernel *k, const factors *f, int64_t outer)
{
    const job_words *w = job->words;
    memset(f->col, 0, sizeof(float) * (size_t)(w->matrices * w->cols));
    for (int64_t i = 0; i < w->matrices; i++)
        k->absorb(job, f->first + i * w->rows * w->cols, w->rows, f->row + i * w->rows, f->col + i * w->cols);
    for (int64_t i = 0; i < w->matrices * w->cols; i++)
        f->col[i] /= (float)w->rows;
    if (w->v_row.type)
        k->blend(&w->v_row, job, w->matrices * w->rows, outer * w->matrices * w->rows, w->matrices * w->rows, f->row);
    else
        fill_ones(f->row, w->matrices * w->rows);
    if (w->v_col.type)
        k->blend(&w->v_col, job, w->matrices * w->cols, outer * w->matrices * w->cols, w->matrices * w->cols, f->col);
    else
        fill_ones(f->col, w->matrices * w->cols);
}

static void balance_stack(const job *job, const kernel *k, const factors *f, float *col_sums)
{
    const job_words *w = job->words;
    fill_ones(f->row, w->matrices * w->rows);
    fill_ones(f->col, w->matrices * w->cols);
    for (int64_t i = 0; i < w->matrices; i++) {
        float *row = f->row + i * w->rows, *col = f->col + i * w->cols;
        for (int64_t at = 0; at < w->turns;) {
            const turn now = turn_at(w, &at);
            memset(col_sums, 0, sizeof(float) * (size_t)w->cols);
            k->balance(job, f->first + i * w->rows * w->cols, w->rows, now.rows, row, col, now.cols ? col_sums : NULL);
            if (now.cols) {
                for (int64_t column = 0; column < w->cols; column++)
                    col[column] = col_sums[column] / (float)w->rows;
                take_inverse_roots(col, w->cols);
            }
        }
    }
}

static void read_stack(const job *job, const kernel *k, const factors *f, int64_t outer)
{
    const job_words *w = job->words;
    int64_t rows = w->matrices * w->rows, cols = w->matrices * w->cols;
    k->read_factor(&w->v_row, rows, outer * rows, rows, f->row);
    k->read_factor(&w->v_col, cols, outer * cols, cols, f->col);
    prepare_stack(job, k, f);
}

/* Adafactor's factor on the step length. All sums are added up in the order of their spans, by every thread alike. */
static double step_factor(const job *job, const scratch *s)
{
    squares total = {0, 0};
    for (int64_t i = 0; i < sum_count(job->words); i++) {
        total.direction += s->sums[i].direction;
        total.param += s->sums[i].param;
    }
    double numel = (double)job->words->numel;
    double param_rms = sqrt(total.param / numel);
    double ratio = sqrt(total.direction / numel) / job->scalars->clip;
    double least = job->scalars->min_param_rms;
    /* written so that a NaN stays one */
    return (param_rms < least ? least : param_rms) / (ratio < 1.0 ? 1.0 : ratio);
}

static void run_stack(const job *job, const kernel *k, team team, scratch *s)
{
    const job_words *w = job->words;
    const int64_t numel = w->matrices * w->rows * w->cols;
    const int normalizes = w->mechanism == ADAFACTOR;
    for (int64_t outer = team.rank; outer < w->outer; outer += team.size) {
        factors f = stack_factors(w, team, s, outer);
        if (w->mechanism == BALANCED) {
            balance_stack(job, k, &f, s->partial + team.rank * w->matrices * w->cols);
        } else {
            absorb_stack(job, k, &f, outer);
            prepare_stack(job, k, &f);
        }
        if (normalizes)
            s->sums[outer] = k->measure(job, &f, f.first, numel);
        else
            k->update(job, &f, 1.0, f.first, numel);
    }
    if (!normalizes)
        return;
    meet(team);
    const double factor = step_factor(job, s);
    for (int64_t outer = team.rank; outer < w->outer; outer += team.size) {
        factors f = stack_factors(w, team, s, outer);
        read_stack(job, k, &f, outer);
        k->update(job, &f, factor, f.first, numel);
    }
}

static void run_whole(const job *job, const kernel *k, team team, scratch *s)
{
    const job_words *w = job->words;
    if (is_stack(w)) {
        run_stack(job, k, team, s);
        return;
    }
    if (w->v.type == FACTORED && is_by_rows(w)) {
        run_rows(job, k, team, s);
        return;
    }
    factors f = {0, s->row, s->col};
    if (w->mechanism == BALANCED)
        balance_matrix(job, k, team, s);
    else if (w->v.type == FACTORED)
        absorb_matrix(job, k, team, s);
    double factor = 1.0;
    int64_t first, n;
    if (w->mechanism == ADAFACTOR) {
        for (int64_t span = team.rank; span < span_count(w); span += team.size) {
            span_at(w, span, &first, &n);
            s->sums[span] = k->measure(job, &f, first, n);
        }
        meet(team);
        factor = step_factor(job, s);
    }
    for (int64_t span = team.rank; span < span_count(w); span += team.size) {
        span_at(w, span, &first, &n);
        k->update(job, &f, factor, first, n);
    }
}

/* ---- all jobs ---- */

/* What one thread does on its own: a span of a pointwise job, or a small whole one. */
typedef struct {
    int64_t job, span, numel;
} item;

typedef struct {
    item *items;
    int64_t item_count;
    int64_t *meetings; /* large whole jobs, for all threads together */
    int64_t meeting_count;
    size_t item_scratch, meeting_scratch;
} agenda;

/* Meetings cost waiting, so a whole job is one thread's own unless it would keep the others waiting in the end. */
static int is_meeting(const job_words *w, int threads, int64_t total)
{
    return is_whole(w) && threads > 1 && w->numel > SMALL && w->numel > total / (4 * threads);
}

static int64_t item_count(const job_words *w) { return is_whole(w) ? 1 : span_count(w); }

/* Large ones first: what comes last should be short. */
static int by_size(const void *one, const void *other)
{
    const item *a = one, *b = other;
    if (a->numel != b->numel)
        return a->numel > b->numel ? -1 : 1;
    return a->job != b->job ? (a->job < b->job ? -1 : 1) : (a->span > b->span) - (a->span < b->span);
}

static int make_agenda(const job_words *words, int64_t count, int threads, int64_t total, agenda *all)
{
    memset(all, 0, sizeof *all);
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++)
        most += item_count(words + i);
    all->items = malloc(sizeof(item) * (size_t)(most + 1));
    all->meetings = malloc(sizeof(int64_t) * (size_t)(count + 1));
    if (!all->items || !all->meetings)
        return -1;
    for (int64_t i = 0; i < count; i++) {
        const job_words *w = words + i;
        if (is_meeting(w, threads, total)) {
            size_t needed = scratch_bytes(w, threads, NULL, NULL);
            all->meeting_scratch = needed > all->meeting_scratch ? needed : all->meeting_scratch;
            all->meetings[all->meeting_count++] = i;
            continue;
        }
        if (is_whole(w)) {
            size_t needed = scratch_bytes(w, 1, NULL, NULL);
            all->item_scratch = needed > all->item_scratch ? needed : all->item_scratch;
        }
        for (int64_t span = 0; span < item_count(w); span++) {
            item each = {i, span, is_whole(w) ? w->numel : smaller(SPAN, w->numel)};
            all->items[all->item_count++] = each;
        }
    }
    if (threads > 1)
        qsort(all->items, (size_t)all->item_count, sizeof(item), by_size);
    return 0;
}

static void run_item(const item *it, const job *job, const kernel *k, char *memory)
{
    if (is_whole(job->words)) {
        team alone = {0, 1};
        scratch parts;
        scratch_bytes(job->words, 1, &parts, memory);
        run_whole(job, k, alone, &parts);
        return;
    }
    int64_t first, n;
    span_at(job->words, it->span, &first, &n);
    k->update(job, NULL, 1.0, first, n);
}

int run_jobs(const job_words *words, const job_scalars *scalars, int64_t count, int threads, const kernel *k, int *spiked)
{
    agenda all;
    char *memory = NULL;
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        total += words[i].numel;
#ifdef _OPENMP
    threads = total <= SMALL || threads < 1 ? 1 : threads;
#else
    threads = 1;
#endif
    int failed = make_agenda(words, count, threads, total, &all);
    /* one part for each thread's own items, rounded up so that parts stay aligned; meetings come after and use it all */
    const size_t part = (all.item_scratch + 63) / 64 * 64;
    if (!failed) {
        size_t needed = part * (size_t)threads;
        needed = needed > all.meeting_scratch ? needed : all.meeting_scratch;
        memory = malloc(needed + 1);
        failed = memory ? 0 : -1;
    }
    if (!failed) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
#endif
        {
            team team = {0, 1};
#ifdef _OPENMP
            team.rank = omp_get_thread_num();
            team.size = omp_get_num_threads();
#pragma omp for schedule(dynamic)
#endif
            for (int64_t i = 0; i < all.item_count; i++) {
                const item *it = all.items + i;
                job job = {words + it->job, scalars + words[it->job].scalars, spiked};
                run_item(it, &job, k, memory + part * (size_t)team.rank);
            }
            for (int64_t i = 0; i < all.meeting_count; i++) {
                int64_t index = all.meetings[i];
                job job = {words + index, scalars + words[index].scalars, spiked};
                scratch parts;
                scratch_bytes(job.words, threads, &parts, memory);
                run_whole(&job, k, team, &parts);
                meet(team);
            }
        }
    }
    free(memory);
    free(all.items);
    free(all.meetings);
    return failed;
}
