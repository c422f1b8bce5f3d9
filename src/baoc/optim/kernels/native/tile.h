/* A tile's update: decode, one mechanism's math, encode. All of it stays in the L1 cache. */
#ifndef BAOC_TILE_H
#define BAOC_TILE_H

#include "arrays.h"
#include "mechanism.h"

#define MOST_GROUPS (TILE / 8) /* rows with fewer than 8 elements are never int8 */

/* A slot's numbers for the elements of a tile. */
typedef struct {
    void *data;    /* dense numbers, codes, or the expanded root of a factored v */
    float *scales; /* int8: one for each group */
    float *fresh;  /* scratch for new values that cannot be stored yet */
    uint32_t phase;
} slot;

typedef struct {
    numbers c;
    int64_t first; /* flat index in the tensor */
    const float *g;
    float *p;
    slot m, v;
    int groups;
    int starts[MOST_GROUPS + 1]; /* of the groups, and the end of the last; one group if no slot is int8 */
} tile;

/* Old values of a slot; levels if it is int8. */
INLINE vfloat read(int type, int is_signed, const slot *s, int i, int count)
{
    switch (type) {
    case BF16: return decode_bf16(load_u16((const uint16_t *)s->data + i, count));
    case INT8:
        return is_signed ? decode_signed(load_i8((const int8_t *)s->data + i, count))
                         : decode_unsigned(load_u8((const uint8_t *)s->data + i, count));
    default: return load((const float *)s->data + i, count);
    }
}

/* An element without gradient must not move further than exact state would let it: its momentum is rounded toward zero,
 * and shrinks with the root of what v loses in rounding. v itself is rounded as ever, for it must stay right on average
 * where gradients come now and then. */
INLINE vmask is_idle(vfloat g) { return equal(g, vfloat_of(0.0f)); }

INLINE vfloat shrunk(vfloat m, vfloat g, vfloat kept_root, vfloat v_root)
{
    return choose(is_idle(g) & less(kept_root, v_root), m * (kept_root / v_root), m);
}

INLINE vint noise_of_m(vuint sequence, vfloat g)
{
    return choose_int(is_idle(g), vint_of(LEAST_NOISE), noise(sequence));
}

/* What goes from one vector to the next: where rounding stands, and the largest |value| of the group so far, lane by
 * lane. Sizes are compared as integers, which orders |x| the same way and puts NaN on top: a NaN is never lost. */
typedef struct {
    vuint m_sequence, v_sequence;
    vint m_top, v_top;
    vmask idle; /* lanes that had an element without gradient */
    vmask sane; /* lanes that had no spike */
} progress;

INLINE progress start(const tile *t, int i)
{
    progress at = {sequence_at(t->m.phase, t->first + i), sequence_at(t->v.phase, t->first + i), {0}, {0}, no_lane(),
                   all_lanes()};
    return at;
}

INLINE progress next(progress at)
{
    at.m_sequence = next_sequence(at.m_sequence);
    at.v_sequence = next_sequence(at.v_sequence);
    return at;
}

/* int8: how a group's values become levels. */
typedef struct {
    float m, v_root;
} levels_per_unit;

/* What old values are multiplied with. */
typedef struct {
    float m, v;
} keeps;

/* One element's gradient has a part in what happens to others: `Layout.shares` in Python. */
INLINE int shares(int mechanism, int m_type, int v_type)
{
    return mechanism == ADAFACTOR || m_type == INT8 || v_type == INT8 || v_type == FACTORED;
}

/* The first three arguments are known to the compiler wherever this is called, so each use becomes a loop of its own
 * without branches. */
INLINE progress advance_vector(int mechanism, int m_type, int v_type, const tile *t, keeps keep, progress at, int i,
                               int count)
{
    vfloat g = load(t->g + i, count), m = {0}, v = {0};
    if (shares(mechanism, m_type, v_type)) {
        const vmask sane = is_sane(g);
        at.sane &= sane;
        g = keep_lanes(sane, g);
    }
    if (m_type)
        m = fused_add(read(m_type, 1, &t->m, i, count), vfloat_of(keep.m), g * t->c.m_add);
    if (v_type && v_type != FACTORED)
        v = fused_add(read(v_type, 0, &t->v, i, count), vfloat_of(keep.v), g * g * t->c.v_add);
    /* a factored v has taken in the gradient already, and its root comes expanded */
    const vfloat v_root = v_type == FACTORED ? load((const float *)t->v.data + i, count) : v_type ? square_root(v) : v;
    const vfloat move = direction(mechanism, v_type, &t->c, g, m, v_root);
    store(t->p + i, fused_subtract(load(t->p + i, count), vfloat_of(t->c.shrink), move), count);
    switch (v_type) {
    case FP32: store((float *)t->v.data + i, v, count); break;
    case BF16: {
        const vint stored = encode_bf16(v, noise(at.v_sequence));
        store_16((uint16_t *)t->v.data + i, stored, count);
        if (m_type && any_lane(is_idle(g)))
            m = shrunk(m, g, square_root(decode_bf16(stored)), v_root);
        break;
    }
    case INT8: at.v_top = larger_int(at.v_top, (vint)magnitude(v)); break;
    }
    switch (m_type) {
    case FP32: store((float *)t->m.data + i, m, count); break;
    case BF16: store_16((uint16_t *)t->m.data + i, encode_bf16(m, noise_of_m(at.m_sequence, g)), count); break;
    case INT8: at.m_top = larger_int(at.m_top, (vint)magnitude(m)); break;
    }
    if (m_type == INT8 || v_type == INT8) {
        store(t->m.fresh + i, m, count); /* for v too: m may shrink with what v loses */
        at.idle |= is_idle(g);
    }
    if (v_type == INT8)
        store(t->v.fresh + i, v_root, count); /* dear to compute, and the root that v's code needs starts from it */
    return next(at);
}

/* Encoding works in the L1 cache alone: meanwhile the memory bus can bring the next tile. */
INLINE void fetch_ahead(int m_type, int v_type, const tile *t, int i)
{
    const uintptr_t g = (uintptr_t)t->g, p = (uintptr_t)t->p, m = (uintptr_t)t->m.data, v = (uintptr_t)t->v.data;
    const uintptr_t next = (uintptr_t)(i + TILE);
    __builtin_prefetch((const void *)(g + 4 * next), 0);
    __builtin_prefetch((const void *)(p + 4 * next), 1);
    if (m_type == INT8)
        __builtin_prefetch((const void *)(m + next), 1);
    if (v_type == INT8)
        __builtin_prefetch((const void *)(v + next), 1);
}

/* Square roots take long: those of a vector are begun while the one before it is encoded. */
typedef struct {
    vfloat m, m_level, m_root;
    vfloat v_root, v_fourth_root;
} roots;

INLINE roots begin_roots(int m_type, int v_type, const tile *t, levels_per_unit levels, int i)
{
    roots r = {.m = load(t->m.fresh + i, LANES)};
    if (m_type == INT8) {
        r.m_level = level_of_signed(r.m, levels.m);
        r.m_root = square_root(r.m_level);
    }
    if (v_type == INT8) {
        r.v_root = load(t->v.fresh + i, LANES) * levels.v_root;
        r.v_fourth_root = square_root(r.v_root);
    }
    return r;
}

INLINE progress encode_vector(int m_type, int v_type, const tile *t, roots r, progress at, int i, int count)
{
    fetch_ahead(m_type, v_type, t, i);
    if (m_type == INT8) {
        const vint code = encode_signed(r.m, r.m_level, r.m_root, threshold_plus_one(at.m_sequence));
        store_8((uint8_t *)t->m.data + i, code, count);
    }
    if (v_type == INT8) {
        const vint code = encode_unsigned(r.v_root, r.v_fourth_root, threshold_plus_one(at.v_sequence));
        store_8((uint8_t *)t->v.data + i, code, count);
    }
    return next(at);
}

INLINE void encode_group(int m_type, int v_type, const tile *t, levels_per_unit levels, int i, int end)
{
    progress at = start(t, i);
    roots ready = begin_roots(m_type, v_type, t, levels, i);
    for (; i + LANES <= end; i += LANES) {
        roots begun = begin_roots(m_type, v_type, t, levels, i + LANES);
        at = encode_vector(m_type, v_type, t, ready, at, i, LANES);
        ready = begun;
    }
    if (i < end)
        encode_vector(m_type, v_type, t, ready, at, i, end - i);
}

/* A group with idle elements goes one slot after the other. First v, with which m may shrink; returns m's largest size. */
INLINE int32_t encode_v_of_idle(int m_type, const tile *t, float levels_root, int i, int end)
{
    vint top = {0};
    progress at = start(t, i);
    for (; i < end; i += LANES, at = next(at)) {
        const int count = lanes_left(end, i);
        const vfloat g = without_spikes(load(t->g + i, count)), root = load(t->v.fresh + i, count) * levels_root;
        const vint code = encode_unsigned(root, square_root(root), threshold_plus_one(at.v_sequence));
        store_8((uint8_t *)t->v.data + i, code, count);
        const vfloat m = shrunk(load(t->m.fresh + i, count), g, to_float(code) * to_float(code), root);
        switch (m_type) {
        case FP32: store((float *)t->m.data + i, m, count); break;
        case BF16: store_16((uint16_t *)t->m.data + i, encode_bf16(m, noise_of_m(at.m_sequence, g)), count); break;
        case INT8: store(t->m.fresh + i, m, count); break;
        }
        top = larger_int(top, (vint)magnitude(m));
    }
    return largest_lane(top);
}

INLINE void encode_m_of_idle(const tile *t, float levels, int i, int end)
{
    progress at = start(t, i);
    for (; i < end; i += LANES, at = next(at)) {
        const int count = lanes_left(end, i);
        const vfloat m = load(t->m.fresh + i, count), level = level_of_signed(m, levels);
        const vfloat threshold = choose(is_idle(without_spikes(load(t->g + i, count))),
                                        vfloat_of(LARGEST_THRESHOLD + 1), threshold_plus_one(at.m_sequence));
        store_8((uint8_t *)t->m.data + i, encode_signed(m, level, square_root(level), threshold), count);
    }
}

INLINE float m_levels(const tile *t, int group, int32_t top)
{
    t->m.scales[group] = scale_of(top);
    return levels_of(SIGNED_LEVELS, t->m.scales[group]);
}

/* What was left out of the state still shows: a gradient that is no number makes its element none. */
static void show_spikes(const tile *t, int i, int end)
{
    for (; i < end; i++)
        t->p[i] += t->g[i] - t->g[i];
}

/* Three rounds, so that the slow way from a group's values to its scale is gone for all groups at once. */
INLINE void advance(int mechanism, int m_type, int v_type, const tile *t)
{
    int32_t m_tops[MOST_GROUPS], v_tops[MOST_GROUPS];
    levels_per_unit levels[MOST_GROUPS];
    int idle[MOST_GROUPS];
    for (int group = 0; group < t->groups; group++) {
        const int end = t->starts[group + 1];
        int i = t->starts[group];
        const keeps keep = {m_type == INT8 ? t->c.m_keep * (t->m.scales[group] * (1 / SIGNED_LEVELS)) : t->c.m_keep,
                            v_type == INT8 ? t->c.v_keep * (t->v.scales[group] * (1 / UNSIGNED_LEVELS)) : t->c.v_keep};
        progress at = start(t, i);
        for (; i + LANES <= end; i += LANES)
            at = advance_vector(mechanism, m_type, v_type, t, keep, at, i, LANES);
        if (i < end)
            at = advance_vector(mechanism, m_type, v_type, t, keep, at, i, end - i);
        idle[group] = m_type && any_lane(at.idle);
        if (!every_lane(at.sane))
            show_spikes(t, t->starts[group], end);
        if (m_type == INT8)
            m_tops[group] = largest_lane(at.m_top);
        if (v_type == INT8)
            v_tops[group] = largest_lane(at.v_top);
    }
    if (m_type != INT8 && v_type != INT8)
        return;
    for (int group = 0; group < t->groups; group++) {
        if (m_type == INT8)
            levels[group].m = m_levels(t, group, m_tops[group]);
        if (v_type == INT8) {
            t->v.scales[group] = scale_of(v_tops[group]);
            levels[group].v_root = sqrtf(levels_of(UNSIGNED_LEVELS, t->v.scales[group]));
        }
    }
    for (int group = 0; group < t->groups; group++) {
        const int first = t->starts[group], end = t->starts[group + 1];
        if (!idle[group]) {
            encode_group(m_type, v_type, t, levels[group], first, end);
            continue;
        }
        if (v_type == INT8) {
            const int32_t top = encode_v_of_idle(m_type, t, levels[group].v_root, first, end);
            levels[group].m = m_type == INT8 ? m_levels(t, group, top) : 0.0f;
        }
        if (m_type == INT8)
            encode_m_of_idle(t, levels[group].m, first, end);
    }
}

#define CASE(mechanism, m_type, v_type) \
    case (mechanism) * 100 + (m_type) * 10 + (v_type): advance(mechanism, m_type, v_type, t); break;
#define CASES_OF_V(mechanism, m_type) \
    CASE(mechanism, m_type, FP32) CASE(mechanism, m_type, BF16) CASE(mechanism, m_type, INT8) \
    CASE(mechanism, m_type, FACTORED)

static void advance_tile(const job_words *w, const tile *t)
{
    switch (w->mechanism * 100 + w->m.type * 10 + w->v.type) {
        CASE(SGD, 0, 0)
        CASE(MOMENTUM, FP32, 0)
        CASE(MOMENTUM, BF16, 0)
        CASE(MOMENTUM, INT8, 0)
        CASES_OF_V(ADAM, FP32)
        CASES_OF_V(ADAM, BF16)
        CASES_OF_V(ADAM, INT8)
        CASES_OF_V(ADAFACTOR, 0)
    }
}

static slot slot_at(const array *stored, int64_t element, int64_t group, int64_t phase, float *fresh)
{
    const int64_t size = stored->type == INT8 ? 1 : stored->type == BF16 ? 2 : 4;
    slot s = {(char *)(intptr_t)stored->data + element * size,
              stored->type == INT8 ? (float *)(intptr_t)stored->scales + group : NULL, fresh, (uint32_t)phase};
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

static void update_tile(const job *job, const factors *f, const numbers *c, int64_t first, int n)
{
    const job_words *w = job->words;
    float g[TILE], p[TILE], m[TILE + 2 * LANES], v[TILE + 2 * LANES];
    group_cursor at = group_at(w->row, first);
    tile t;
    t.c = *c;
    t.first = first;
    t.g = gradient(job, first, n, g);
    t.p = floats_of(&w->param, first, n, p);
    t.m = slot_at(&w->m, first, at.group, w->m_phase, m);
    t.v = slot_at(&w->v, first, at.group, w->v_phase, v);
    if (w->v.type == FACTORED) {
        expand(w, f, first - f->first, n, v);
        t.v.data = v;
    }
    t.groups = 0;
    t.starts[0] = 0;
    while (t.starts[t.groups] < n) {
        int width = w->m.type == INT8 || w->v.type == INT8 ? next_group(&at) : n;
        t.starts[t.groups + 1] = t.starts[t.groups] + width;
        t.groups++;
    }
    advance_tile(w, &t);
    write_param(&w->param, first, n, t.p);
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
