/* A tile's update: decode, one mechanism's math, encode. All of it stays in the L1 cache. */
#ifndef BAOC_TILE_H
#define BAOC_TILE_H

#include "arrays.h"
#include "int4.h"
#include "mechanism.h"

#define MOST_GROUPS (TILE / 8) /* rows with fewer than 8 elements are never int8 */

/* A slot's numbers for the elements of a tile. */
typedef struct {
    void *data;         /* dense numbers or codes */
    uint8_t *exponents; /* int8: one for each group */
    float *fresh;       /* scratch for new values that cannot be stored yet */
    uint32_t phase;
} slot;

/* What all of a tile's elements go by. Loops have a copy of their own: what they store cannot change it, and the compiler
 * knows. */
typedef struct {
    numbers c;
    int64_t first; /* flat index in the tensor */
    const float *g;
    float *p;
    uintptr_t g_ahead, p_ahead; /* addresses of what comes after the tile */
    int fetches_dense; /* dense slots: whether processors have to be told what comes */
    slot m, v;
    float *v_root;    /* of a factored v, to be multiplied by row_v_root; else scratch for groups that wait for exponents */
    float row_v_root;
} common;

typedef struct {
    common all;
    float *clean_g; /* scratch for gradients without spikes */
    int groups;
    int starts[MOST_GROUPS + 1]; /* of the groups, and the end of the last; one group if no slot is int8 */
} tile;

/* int8: from where a group's codes count. */
typedef struct {
    int32_t m, v;
} bases;

/* Old values of a slot. */
INLINE vfloat read(int type, const slot *s, int i, int count)
{
    return numbers_at(type, s->data, i, count);
}

INLINE vfloat read_second(int type, const slot *s, int32_t base, int i, int count)
{
    return type == INT8 ? decode_unsigned(load_u8((const uint8_t *)s->data + i, count), base) : read(type, s, i, count);
}

/* Those of a momentum for up to four vectors, in int8 divided by SMALL_UNIT. */
INLINE void read_momentum(int type, const slot *s, int32_t base, int i, int count, vfloat *m)
{
    int8_t part[4 * LANES];
    const int8_t *codes = (const int8_t *)s->data + i;
    if (type == INT8 && count < 4 * LANES) {
        memset(part, 0, sizeof part);
        memcpy(part, codes, (size_t)count);
        codes = part;
    }
    if (type == INT8)
        decode_four_signed(codes, base, m);
    for (int k = 0; type && type != INT8 && k * LANES < count; k++)
        m[k] = read(type, s, i + k * LANES, lanes_left(count, k * LANES));
}

/* What goes from one vector to the next: where rounding stands, and, lane by lane, the largest |value| of the group so far
 * and its smallest |gradient|, or the square of that. Sizes are compared as integers, which orders |x| the same way. */
typedef struct {
    vuint m_sequence, v_sequence;
    vint m_top, v_top, g_least;
} progress;

INLINE progress start(const common *t, int i)
{
    progress at = {sequence_at(t->m.phase, t->first + i), sequence_at(t->v.phase, t->first + i), {0}, {0},
                   vint_of(INT32_MAX)};
    return at;
}

INLINE progress next(progress at)
{
    at.m_sequence = next_sequence(at.m_sequence);
    at.v_sequence = next_sequence(at.v_sequence);
    return at;
}

/* One element's gradient has a part in what happens to others: `Layout.shares` in Python. */
INLINE int shares(int mechanism, int m_type, int v_type)
{
    return mechanism >= ADAFACTOR || m_type == INT8 || v_type == INT8 || v_type == FACTORED;
}

/* A vector's gradients, and the new values of their slots with the root of v, which is all there is of a factored one. */
typedef struct {
    vfloat g, m, v, v_root;
} values;

/* The second moment is kept for each element. */
INLINE int is_full(int v_type) { return v_type && v_type != FACTORED; }

/* `Layout.idle_shift` in Python. */
INLINE int idle_shift(int v_type) { return is_full(v_type) ? IDLE_SHIFT : LOOSE_IDLE_SHIFT; }

/* Here and below, mechanism and types are known to the compiler wherever a function is called, so each use becomes a loop
 * of its own without branches. */
INLINE values blend_vector(int m_type, int v_type, const common *t, vfloat m, bases base, int i, int count)
{
    values x = {.g = load(t->g + i, count)};
    if (m_type)
        x.m = fused_add(m, vfloat_of(m_type == INT8 ? t->c.m_keep_small : t->c.m_keep), x.g * t->c.m_add);
    if (v_type == FACTORED)
        x.v_root = load(t->v_root + i, count) * t->row_v_root;
    if (is_full(v_type)) {
        x.v = fused_add(read_second(v_type, &t->v, base.v, i, count), vfloat_of(t->c.v_keep), x.g * x.g * t->c.v_add);
        x.v_root = square_root(x.v);
    }
    return x;
}

INLINE void move_vector(int mechanism, int m_type, int v_type, const common *t, values x, int i, int count)
{
    const vfloat by = direction(mechanism, m_type, v_type, &t->c, x.g, x.m, x.v_root);
    store(t->p + i, fused_subtract(load(t->p + i, count), vfloat_of(t->c.shrink), by), count);
}

INLINE void store_m(int m_type, const common *t, values x, progress at, int i, int count)
{
    if (m_type == FP32)
        store((float *)t->m.data + i, x.m, count);
    if (m_type == BF16)
        store_16((uint16_t *)t->m.data + i, encode_bf16(x.m, noise(at.m_sequence, BF16_DROPPED)), count);
}

INLINE void store_v(int v_type, const common *t, values x, progress at, int i, int count)
{
    if (v_type == FP32)
        store((float *)t->v.data + i, x.v, count);
    if (v_type == BF16)
        store_16((uint16_t *)t->v.data + i, encode_bf16(x.v, noise(at.v_sequence, BF16_DROPPED)), count);
}

/* Gradients that would spoil numbers for other elements are left out of the state ... */
static void leave_spikes_out(tile *t, int i, int end)
{
    if (t->all.g != t->clean_g)
        memcpy(t->clean_g, t->all.g, sizeof(float) * (size_t)t->starts[t->groups]);
    t->all.g = t->clean_g;
    for (; i < end; i++)
        t->clean_g[i] = without_spike(t->clean_g[i]);
}

/* ... and still show: one that is no number makes its element none. */
static void show_spikes(const float *g, float *p, int n)
{
    for (int i = 0; i < n; i++)
        p[i] += g[i] - g[i];
}

/* Memory is slow, and arithmetic that needs none of it can go on meanwhile: brings what comes after the tile, for four
 * vectors' worth of numbers. */
INLINE void fetch_floats(uintptr_t ahead, int i)
{
    for (int byte = 0; byte < 16 * LANES; byte += LINE)
        fetch((const void *)(ahead + (uintptr_t)(4 * i + byte)));
}

INLINE void fetch_codes(const slot *s, int i) { fetch((const void *)((uintptr_t)s->data + (uintptr_t)(i + FETCHED_AHEAD))); }

/* ---- dense slots: one pass ---- */

INLINE progress advance_vector(int mechanism, int m_type, int v_type, const common *t, progress at, int i, int count)
{
    const bases none = {0, 0};
    const values x = blend_vector(m_type, v_type, t, m_type ? read(m_type, &t->m, i, count) : (vfloat){0}, none, i, count);
    move_vector(mechanism, m_type, v_type, t, x, i, count);
    store_m(m_type, t, x, at, i, count);
    store_v(v_type, t, x, at, i, count);
    return next(at);
}

INLINE void advance_dense(int mechanism, int m_type, int v_type, tile *t)
{
    const int n = t->starts[t->groups];
    if (shares(mechanism, m_type, v_type) && has_spike(t->all.g, n))
        leave_spikes_out(t, 0, n);
    const common all = t->all;
    progress at = start(&all, 0);
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        if (all.fetches_dense) {
            fetch_floats(all.g_ahead, i);
            fetch_floats(all.p_ahead, i);
        }
        for (int k = 0; k < 4; k++)
            at = advance_vector(mechanism, m_type, v_type, &all, at, i + k * LANES, LANES);
    }
    for (; i + LANES <= n; i += LANES)
        at = advance_vector(mechanism, m_type, v_type, &all, at, i, LANES);
    if (i < n)
        advance_vector(mechanism, m_type, v_type, &all, at, i, n - i);
}

/* ---- int8 slots: new values first, then what depends on the largest of a group ---- */

/* New values are kept until the second pass. */
INLINE progress take_in_vector(int m_type, int v_type, const common *t, vfloat m, bases base, progress at, int i, int count)
{
    const values x = blend_vector(m_type, v_type, t, m, base, i, count);
    const vint g_size = (vint)(is_full(v_type) ? x.g * x.g : magnitude(x.g));
    at.g_least = smaller_int(at.g_least, count < LANES ? with_others(g_size, count, INT32_MAX) : g_size);
    if (m_type)
        store(t->m.fresh + i, x.m, count);
    if (is_full(v_type)) {
        store(t->v.fresh + i, x.v, count);
        store(t->v_root + i, x.v_root, count);
    }
    if (m_type == INT8)
        at.m_top = larger_int(at.m_top, (vint)magnitude(x.m));
    if (v_type == INT8)
        at.v_top = larger_int(at.v_top, (vint)x.v);
    return at;
}

INLINE values taken_in(int m_type, int v_type, const common *t, int i, int count)
{
    values x = {.g = load(t->g + i, count)};
    if (m_type)
        x.m = load(t->m.fresh + i, count);
    if (v_type)
        x.v_root = load(t->v_root + i, count);
    if (v_type == FACTORED)
        x.v_root *= t->row_v_root;
    if (is_full(v_type))
        x.v = load(t->v.fresh + i, count);
    return x;
}

/* A group's exponent is that of its largest number once rounded. Only where that one may round into the next octave need
 * all be looked at. */
static uint8_t exponent_of(const slot *s, int dropped, int64_t first, int i, int end, int32_t top)
{
    if ((top + (1 << dropped)) >> 23 == top >> 23)
        return stored_exponent(top);
    vint rounded_top = {0};
    for (; i < end; i += LANES) {
        const int count = lanes_left(end, i);
        const vint each = noise(sequence_at(s->phase, first + i), dropped);
        rounded_top = larger_int(rounded_top, (vint)magnitude(load(s->fresh + i, count)) + each);
    }
    return stored_exponent(largest_lane(rounded_top) + least_noise(dropped));
}

INLINE vint code_of_m(vfloat m, bases base, progress at)
{
    return encode_signed(m, base.m, noise(at.m_sequence, SIGNED_DROPPED));
}

INLINE vint code_of_positive_v(vfloat v, bases base, progress at)
{
    return encode_positive(v, base.v, noise(at.v_sequence, UNSIGNED_DROPPED));
}

INLINE void settle_group(int mechanism, int m_type, int v_type, const common *t, bases base, int i, int end)
{
    progress at = start(t, i);
    for (; i + 4 * LANES <= end; i += 4 * LANES) {
        vint m[4], v[4];
        fetch_floats(t->p_ahead, i);
        if (v_type == INT8)
            fetch_codes(&t->v, i);
        for (int k = 0; k < 4; k++, at = next(at)) {
            const values x = taken_in(m_type, v_type, t, i + k * LANES, LANES);
            move_vector(mechanism, m_type, v_type, t, x, i + k * LANES, LANES);
            m[k] = code_of_m(x.m, base, at);
            v[k] = code_of_positive_v(x.v, base, at);
            store_m(m_type, t, x, at, i + k * LANES, LANES);
            store_v(v_type, t, x, at, i + k * LANES, LANES);
        }
        if (m_type == INT8)
            store_four_i8((int8_t *)t->m.data + i, m);
        if (v_type == INT8)
            store_four_u8((uint8_t *)t->v.data + i, v, LEAST_CODE);
    }
    for (; i < end; i += LANES, at = next(at)) {
        const int count = lanes_left(end, i);
        const values x = taken_in(m_type, v_type, t, i, count);
        move_vector(mechanism, m_type, v_type, t, x, i, count);
        store_m(m_type, t, x, at, i, count);
        store_v(v_type, t, x, at, i, count);
        if (m_type == INT8)
            store_i8((int8_t *)t->m.data + i, code_of_m(x.m, base, at), count);
        if (v_type == INT8)
            store_u8((uint8_t *)t->v.data + i, larger_int(code_of_positive_v(x.v, base, at), vint_of(LEAST_CODE)), count);
    }
}

/* The same for a group with elements that have no gradient or no v. */
INLINE void settle_with_care(int mechanism, int m_type, int v_type, const common *t, bases base, int i, int end)
{
    progress at = start(t, i);
    for (; i < end; i += LANES, at = next(at)) {
        const int count = lanes_left(end, i);
        const values x = taken_in(m_type, v_type, t, i, count);
        move_vector(mechanism, m_type, v_type, t, x, i, count);
        store_m(m_type, t, x, at, i, count);
        store_v(v_type, t, x, at, i, count);
        if (m_type == INT8) {
            const vint dither = noise(at.m_sequence, SIGNED_DROPPED);
            const vint code = encode_signed_at_rest(x.m, x.g, base.m, dither, idle_shift(v_type));
            store_i8((int8_t *)t->m.data + i, code, count);
        }
        if (v_type == INT8) {
            const vint code = encode_unsigned(x.v, base.v, noise(at.v_sequence, UNSIGNED_DROPPED));
            store_u8((uint8_t *)t->v.data + i, code, count);
        }
    }
}

INLINE bases bases_at(int m_type, int v_type, const common *t, int group)
{
    const bases base = {m_type == INT8 ? base_at(1, t->m.exponents[group]) : 0,
                        v_type == INT8 ? base_at(0, t->v.exponents[group]) : 0};
    return base;
}

/* What the first pass finds out about a group. A spike shows in what it does to m or v, so that only suspects need a look
 * at all gradients. Care is due where an element may be idle or its v zero: where a square is below `least_square`, it
 * adds less than a normal number to v. */
typedef struct {
    int32_t m_top, v_top;
    int needs_care, is_suspect;
} findings;

INLINE findings take_in_group(int m_type, int v_type, const common *t, bases base, int i, int end)
{
    progress at = start(t, i);
    for (; i + 4 * LANES <= end; i += 4 * LANES) {
        vfloat m[4];
        fetch_floats(t->g_ahead, i);
        if (m_type == INT8)
            fetch_codes(&t->m, i);
        read_momentum(m_type, &t->m, base.m, i, 4 * LANES, m);
        for (int k = 0; k < 4; k++)
            at = take_in_vector(m_type, v_type, t, m[k], base, at, i + k * LANES, LANES);
    }
    if (i < end) {
        vfloat m[4];
        read_momentum(m_type, &t->m, base.m, i, end - i, m);
        for (int k = 0; i < end; i += LANES, k++)
            at = take_in_vector(m_type, v_type, t, m[k], base, at, i, lanes_left(end, i));
    }
    findings found = {m_type == INT8 ? largest_lane(at.m_top) : 0, v_type == INT8 ? largest_lane(at.v_top) : 0, 0, 0};
    const int32_t least = -largest_lane(-at.g_least); /* negative if it is no number */
    found.needs_care = least < (v_type == INT8 ? bits_of(t->c.least_square) : 1);
    found.is_suspect = least < 0 || (v_type == INT8 ? found.v_top >= bits_of(t->c.v_suspect)
                                                    : found.m_top >= bits_of(t->c.m_suspect));
    return found;
}

/* Round by round for all groups, so that the slow way from a group's values to its exponent is gone for all at once.
 * Functions that are not inlined get the tile's own `common`, for the loops' copy must not have an address. */
INLINE void advance_groups(int mechanism, int m_type, int v_type, tile *t)
{
    common all = t->all;
    findings found[MOST_GROUPS];
    for (int group = 0; group < t->groups; group++) {
        const bases base = bases_at(m_type, v_type, &all, group);
        const int first = t->starts[group], end = t->starts[group + 1];
        found[group] = take_in_group(m_type, v_type, &all, base, first, end);
        if (found[group].is_suspect && has_spike(all.g + first, end - first)) {
            leave_spikes_out(t, first, end);
            all.g = t->all.g;
            found[group] = take_in_group(m_type, v_type, &all, base, first, end);
        }
    }
    for (int group = 0; group < t->groups; group++) {
        const findings *here = found + group;
        const int first = t->starts[group], end = t->starts[group + 1];
        if (v_type == INT8)
            all.v.exponents[group] = exponent_of(&t->all.v, UNSIGNED_DROPPED, all.first, first, end, here->v_top);
        if (m_type == INT8)
            all.m.exponents[group] = exponent_of(&t->all.m, SIGNED_DROPPED, all.first, first, end, here->m_top);
    }
    for (int group = 0; group < t->groups; group++) {
        const bases base = bases_at(m_type, v_type, &all, group);
        const int first = t->starts[group], end = t->starts[group + 1];
        if (found[group].needs_care)
            settle_with_care(mechanism, m_type, v_type, &all, base, first, end);
        else
            settle_group(mechanism, m_type, v_type, &all, base, first, end);
    }
}

INLINE void advance(int mechanism, int m_type, int v_type, tile *t)
{
    const float *given_g = t->all.g;
    if (m_type == INT8 || v_type == INT8)
        advance_groups(mechanism, m_type, v_type, t);
    else
        advance_dense(mechanism, m_type, v_type, t);
    if (t->all.g != given_g && mechanism != AHEAD)
        show_spikes(given_g, t->all.p, t->starts[t->groups]);
}

#define OF_V(X, mechanism, m_type) \
    X(mechanism, m_type, FP32) X(mechanism, m_type, BF16) X(mechanism, m_type, INT8) X(mechanism, m_type, FACTORED)
#define OF_M(X, mechanism, v_type) X(mechanism, FP32, v_type) X(mechanism, BF16, v_type) X(mechanism, INT8, v_type)
#define ALL_CASES(X) \
    X(SGD, NO_ARRAY, NO_ARRAY) OF_M(X, MOMENTUM, NO_ARRAY) OF_M(X, LION, NO_ARRAY) OF_V(X, ADAFACTOR, NO_ARRAY) \
    OF_V(X, ADAM, FP32) OF_V(X, ADAM, BF16) OF_V(X, ADAM, INT8) \
    X(AHEAD, NO_ARRAY, NO_ARRAY) OF_M(X, AHEAD, NO_ARRAY) \
    X(BALANCED, NO_ARRAY, FACTORED) OF_M(X, BALANCED, FACTORED)

/* A function for each: within a larger one, compilers run out of registers. */
#define DEFINE_ADVANCE(mechanism, m_type, v_type)                                                          \
    static __attribute__((noinline)) void advance_##mechanism##_##m_type##_##v_type(tile *t) \
    {                                                                                                      \
        advance(mechanism, m_type, v_type, t);                                                             \
    }
ALL_CASES(DEFINE_ADVANCE)

#define CASE(mechanism, m_type, v_type) \
    case (mechanism) * 100 + (m_type) * 10 + (v_type): advance_##mechanism##_##m_type##_##v_type(t); break;

/* A momentum of four bits is unpacked by now. */
static void advance_tile(const job_words *w, tile *t)
{
    const int64_t m_type = w->m.type == INT4 ? FP32 : w->m.type;
    switch (w->mechanism * 100 + m_type * 10 + w->v.type) {
        ALL_CASES(CASE)
    }
}

static slot slot_at(const array *stored, int64_t element, int64_t group, int64_t phase, float *fresh)
{
    const int64_t size = stored->type == INT8 ? 1 : stored->type == BF16 ? 2 : 4;
    slot s = {(char *)(intptr_t)stored->data + element * size,
              stored->type == INT8 ? (uint8_t *)(intptr_t)stored->exponents + group : NULL, fresh, (uint32_t)phase};
    return s;
}

/* The root of v, or its inverse, for elements [first, first + n) of one stack of matrices. */
static void expand(const job_words *w, const factors *f, int64_t first, int n, float *out)
{
    int64_t line = first / w->cols, column = first % w->cols; /* line: a row of any of the matrices */
    while (n > 0) {
        const int width = (int)(w->cols - column < n ? w->cols - column : n);
        const float row = f->row[line];
        const float *col = f->col + line / w->rows * w->cols + column;
        for (int i = 0; i < width; i++)
            out[i] = row * col[i];
        out += width;
        n -= width;
        column = 0;
        line++;
    }
}

/* Within one row of a matrix there is nothing to expand. */
static void place_factors(common *t, const job_words *w, const factors *f, int64_t first, int n)
{
    const int64_t line = first / w->cols, column = first % w->cols;
    if (column + n <= w->cols) {
        t->v_root = f->col + line / w->rows * w->cols + column;
        t->row_v_root = f->row[line];
    } else {
        expand(w, f, first, n, t->v_root);
        t->row_v_root = 1.0f;
    }
}

/* Four bits: floats before, codes after. */
static void advance_packed(const job_words *w, tile *t, float *m)
{
    const int n = t->starts[t->groups];
    const float *given_g = t->all.g;
    const int handles_spikes = shares(w->mechanism, FP32, w->v.type); /* the tile's update does, for it would without m */
    if (!handles_spikes && has_spike(given_g, n))
        leave_spikes_out(t, 0, n);
    unpack_int4(&w->m, w->row, t->all.first, n, m);
    t->all.m.data = m;
    advance_tile(w, t);
    pack_int4(&w->m, w->row, t->all.first, n, m, t->all.g, t->all.m.phase, idle_shift((int)w->v.type));
    if (!handles_spikes && t->all.g != given_g)
        show_spikes(given_g, t->all.p, n);
}

/* Processors see plain streams coming by themselves, but not early enough if there is much to do between loads. */
static int needs_fetching(const job_words *w)
{
    return w->grad.planes || w->param.planes || w->m.type == INT4 || (w->m.type == BF16 && w->v.type == FACTORED);
}

static void update_tile(const job *job, const factors *f, const numbers *c, int64_t first, int n)
{
    const job_words *w = job->words;
    float g[TILE], clean_g[TILE], p[TILE], m[TILE], v[TILE], v_root[TILE], unpacked[TILE];
    group_cursor at = group_at(w->row, GROUP, first);
    tile t;
    t.all.c = *c;
    t.all.first = first;
    t.all.p = weights_of(w, first, n, p);
    int spiked;
    t.all.g = checked_gradient(job, first, n, t.all.p, g, &spiked);
    if (spiked)
        __atomic_store_n(job->spiked, 1, __ATOMIC_RELAXED);
    t.clean_g = clean_g;
    t.all.g_ahead = address_ahead(&w->grad, first);
    t.all.p_ahead = address_ahead(&w->param, first);
    t.all.fetches_dense = needs_fetching(w);
    t.all.m = slot_at(&w->m, first, at.group, w->m_phase, m);
    t.all.v = slot_at(&w->v, first, at.group, w->v_phase, v);
    t.all.v_root = v_root;
    if (w->v.type == FACTORED)
        place_factors(&t.all, w, f, first - f->first, n);
    t.groups = 0;
    t.starts[0] = 0;
    while (t.starts[t.groups] < n) {
        int width = w->m.type == INT8 || w->v.type == INT8 ? next_group(&at) : n;
        t.starts[t.groups + 1] = t.starts[t.groups] + width;
        t.groups++;
    }
    if (w->m.type == INT4)
        advance_packed(w, &t, unpacked);
    else
        advance_tile(w, &t);
    write_weights(w, first, n, t.all.p);
}

static void ISA(update)(const job *job, const factors *f, double factor, int64_t first, int64_t n)
{
    const numbers c = numbers_of(job, factor);
    for (int64_t done = 0, width; done < n; done += width) {
        width = tile_width(job->words, first + done, n - done);
        update_tile(job, f, &c, first + done, (int)width);
    }
}

#endif
