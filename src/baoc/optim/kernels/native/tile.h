/* A tile's update: decode, one mechanism's math, encode. All of it stays in the L1 cache. */
#ifndef BAOC_TILE_H
#define BAOC_TILE_H

#include "arrays.h"
#include "int4.h"
#include "mechanism.h"

#define MOST_GROUPS (TILE / 8) /* rows with fewer than 8 elements are never int8 */

/* A slot's numbers for the elements of a tile. */
typedef struct {
    void *data;         /* dense numbers, codes, or the expanded root of a factored v */
    uint8_t *exponents; /* int8: one for each group */
    float *fresh;       /* scratch for new values that cannot be stored yet */
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

/* int8: from where a group's codes count. */
typedef struct {
    int32_t m, v;
} bases;

/* Old values of a slot. */
INLINE vfloat read(int type, int is_signed, const slot *s, int32_t base, int i, int count)
{
    switch (type) {
    case BF16: return decode_bf16(load_u16((const uint16_t *)s->data + i, count));
    case INT8:
        return is_signed ? decode_signed(load_i8((const int8_t *)s->data + i, count), base)
                         : decode_unsigned(load_u8((const uint8_t *)s->data + i, count), base);
    default: return load((const float *)s->data + i, count);
    }
}

/* An element without gradient must not move further than exact state would let it: its momentum is rounded toward zero,
 * and shrinks with the root of what v loses in rounding. v itself is rounded as ever, for it must stay right on average
 * where gradients come now and then. */
INLINE vmask is_idle(vfloat g) { return equal(g, vfloat_of(0.0f)); }

INLINE vfloat shrunk(vfloat m, vfloat g, vfloat kept, vfloat v)
{
    return choose(is_idle(g) & less(kept, v), m * square_root(kept / v), m);
}

INLINE vint noise_of_m(vuint sequence, int dropped, vfloat g)
{
    return choose_int(is_idle(g), vint_of(LEAST_NOISE << (dropped - 16)), noise(sequence, dropped));
}

/* What goes from one vector to the next: where rounding stands, and the largest |value| of the group so far, lane by
 * lane. Sizes are compared as integers, which orders |x| the same way. */
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

/* One element's gradient has a part in what happens to others: `Layout.shares` in Python. */
INLINE int shares(int mechanism, int m_type, int v_type)
{
    return mechanism >= ADAFACTOR || m_type == INT8 || v_type == INT8 || v_type == FACTORED;
}

/* The first three arguments are known to the compiler wherever this is called, so each use becomes a loop of its own
 * without branches. */
INLINE progress advance_vector(int mechanism, int m_type, int v_type, const tile *t, bases base, progress at, int i,
                               int count)
{
    vfloat g = load(t->g + i, count), m = {0}, v = {0};
    if (shares(mechanism, m_type, v_type)) {
        const vmask sane = is_sane(g);
        at.sane &= sane;
        g = keep_lanes(sane, g);
    }
    if (m_type)
        m = fused_add(read(m_type, 1, &t->m, base.m, i, count), vfloat_of(t->c.m_keep), g * t->c.m_add);
    if (v_type && v_type != FACTORED)
        v = fused_add(read(v_type, 0, &t->v, base.v, i, count), vfloat_of(t->c.v_keep), g * g * t->c.v_add);
    /* a factored v has taken in the gradient already, and its root comes expanded */
    const vfloat v_root = v_type == FACTORED ? load((const float *)t->v.data + i, count) : v_type ? square_root(v) : v;
    const vfloat move = direction(mechanism, v_type, &t->c, g, m, v_root);
    store(t->p + i, fused_subtract(load(t->p + i, count), vfloat_of(t->c.shrink), move), count);
    switch (v_type) {
    case FP32: store((float *)t->v.data + i, v, count); break;
    case BF16: {
        const vint stored = encode_bf16(v, noise(at.v_sequence, BF16_DROPPED));
        store_16((uint16_t *)t->v.data + i, stored, count);
        if (m_type && any_lane(is_idle(g)))
            m = shrunk(m, g, decode_bf16(stored), v);
        break;
    }
    case INT8:
        at.v_top = larger_int(at.v_top, (vint)v);
        store(t->v.fresh + i, v, count);
        break;
    }
    switch (m_type) {
    case FP32: store((float *)t->m.data + i, m, count); break;
    case BF16:
        store_16((uint16_t *)t->m.data + i, encode_bf16(m, noise_of_m(at.m_sequence, BF16_DROPPED, g)), count);
        break;
    case INT8: at.m_top = larger_int(at.m_top, (vint)magnitude(m)); break;
    }
    if (m_type == INT8 || v_type == INT8) {
        store(t->m.fresh + i, m, count); /* for v too: m may shrink with what v loses */
        at.idle |= is_idle(g);
    }
    return next(at);
}

/* A group's exponent is that of its largest number once rounded. Only where that one may round into the next octave need
 * all be looked at. `g` is given for m in a group with idle elements. */
static uint8_t exponent_of(const slot *s, int dropped, int64_t first, const float *g, int i, int end, int32_t top)
{
    if ((top + (1 << dropped)) >> 23 == top >> 23)
        return stored_exponent(top);
    vint rounded_top = {0};
    for (; i < end; i += LANES) {
        const int count = lanes_left(end, i);
        const vuint sequence = sequence_at(s->phase, first + i);
        const vint each = g ? noise_of_m(sequence, dropped, without_spikes(load(g + i, count))) : noise(sequence, dropped);
        rounded_top = larger_int(rounded_top, (vint)magnitude(load(s->fresh + i, count)) + each);
    }
    return stored_exponent(largest_lane(rounded_top));
}

/* Encoding works in the L1 cache alone: meanwhile the memory bus can bring the next tile. */
#define LINE 64 /* bytes */

INLINE void fetch_ahead(int m_type, int v_type, const tile *t, int i, int count)
{
    const uintptr_t g = (uintptr_t)t->g, p = (uintptr_t)t->p, m = (uintptr_t)t->m.data, v = (uintptr_t)t->v.data;
    const uintptr_t next = (uintptr_t)(i + TILE);
    for (int byte = 0; byte < 4 * count; byte += LINE) {
        __builtin_prefetch((const void *)(g + 4 * next + (uintptr_t)byte), 0);
        __builtin_prefetch((const void *)(p + 4 * next + (uintptr_t)byte), 1);
    }
    if (m_type == INT8)
        __builtin_prefetch((const void *)(m + next), 1);
    if (v_type == INT8)
        __builtin_prefetch((const void *)(v + next), 1);
}

INLINE vint code_of_m(const tile *t, bases base, progress at, int i, int count)
{
    return encode_signed(load(t->m.fresh + i, count), base.m, noise(at.m_sequence, SIGNED_DROPPED));
}

INLINE vint code_of_v(const tile *t, bases base, progress at, int i, int count)
{
    return encode_unsigned(load(t->v.fresh + i, count), base.v, noise(at.v_sequence, UNSIGNED_DROPPED));
}

INLINE void encode_group(int m_type, int v_type, const tile *t, bases base, int i, int end)
{
    progress at = start(t, i);
    for (; i + 4 * LANES <= end; i += 4 * LANES) {
        vint m[4], v[4];
        fetch_ahead(m_type, v_type, t, i, 4 * LANES);
        for (int k = 0; k < 4; k++, at = next(at)) {
            if (m_type == INT8)
                m[k] = code_of_m(t, base, at, i + k * LANES, LANES);
            if (v_type == INT8)
                v[k] = code_of_v(t, base, at, i + k * LANES, LANES);
        }
        if (m_type == INT8)
            store_four_i8((int8_t *)t->m.data + i, m);
        if (v_type == INT8)
            store_four_u8((uint8_t *)t->v.data + i, v);
    }
    for (; i < end; i += LANES, at = next(at)) {
        const int count = lanes_left(end, i);
        if (m_type == INT8)
            store_i8((int8_t *)t->m.data + i, code_of_m(t, base, at, i, count), count);
        if (v_type == INT8)
            store_u8((uint8_t *)t->v.data + i, code_of_v(t, base, at, i, count), count);
    }
}

/* A group with idle elements goes one slot after the other. First v, with which m may shrink; returns m's largest size. */
static int32_t encode_v_of_idle(int m_type, const tile *t, bases base, int i, int end)
{
    vint top = {0};
    progress at = start(t, i);
    for (; i < end; i += LANES, at = next(at)) {
        const int count = lanes_left(end, i);
        const vfloat g = without_spikes(load(t->g + i, count)), v = load(t->v.fresh + i, count);
        const vint code = code_of_v(t, base, at, i, count);
        store_u8((uint8_t *)t->v.data + i, code, count);
        const vfloat m = shrunk(load(t->m.fresh + i, count), g, decode_unsigned(code, base.v), v);
        switch (m_type) {
        case FP32: store((float *)t->m.data + i, m, count); break;
        case BF16:
            store_16((uint16_t *)t->m.data + i, encode_bf16(m, noise_of_m(at.m_sequence, BF16_DROPPED, g)), count);
            break;
        case INT8: store(t->m.fresh + i, m, count); break;
        }
        top = larger_int(top, (vint)magnitude(m));
    }
    return largest_lane(top);
}

static void encode_m_of_idle(const tile *t, int32_t base, int i, int end)
{
    progress at = start(t, i);
    for (; i < end; i += LANES, at = next(at)) {
        const int count = lanes_left(end, i);
        const vint noise = noise_of_m(at.m_sequence, SIGNED_DROPPED, without_spikes(load(t->g + i, count)));
        store_i8((int8_t *)t->m.data + i, encode_signed(load(t->m.fresh + i, count), base, noise), count);
    }
}

/* What was left out of the state still shows: a gradient that is no number makes its element none. */
static void show_spikes(const tile *t, int i, int end)
{
    for (; i < end; i++)
        t->p[i] += t->g[i] - t->g[i];
}

/* Three rounds, so that the slow way from a group's values to its exponent is gone for all groups at once. */
INLINE void advance(int mechanism, int m_type, int v_type, const tile *t)
{
    int32_t m_tops[MOST_GROUPS], v_tops[MOST_GROUPS];
    int idle[MOST_GROUPS];
    for (int group = 0; group < t->groups; group++) {
        const int end = t->starts[group + 1];
        int i = t->starts[group];
        const bases base = {m_type == INT8 ? base_at(1, t->m.exponents[group]) : 0,
                            v_type == INT8 ? base_at(0, t->v.exponents[group]) : 0};
        progress at = start(t, i);
        for (; i + LANES <= end; i += LANES)
            at = advance_vector(mechanism, m_type, v_type, t, base, at, i, LANES);
        if (i < end)
            at = advance_vector(mechanism, m_type, v_type, t, base, at, i, end - i);
        idle[group] = m_type && any_lane(at.idle);
        if (!every_lane(at.sane) && mechanism != AHEAD)
            show_spikes(t, t->starts[group], end);
        if (m_type == INT8)
            m_tops[group] = largest_lane(at.m_top);
        if (v_type == INT8)
            v_tops[group] = largest_lane(at.v_top);
    }
    if (m_type != INT8 && v_type != INT8)
        return;
    for (int group = 0; group < t->groups; group++) {
        const int first = t->starts[group], end = t->starts[group + 1];
        if (v_type == INT8)
            t->v.exponents[group] = exponent_of(&t->v, UNSIGNED_DROPPED, t->first, NULL, first, end, v_tops[group]);
        if (m_type == INT8 && !idle[group])
            t->m.exponents[group] = exponent_of(&t->m, SIGNED_DROPPED, t->first, NULL, first, end, m_tops[group]);
    }
    for (int group = 0; group < t->groups; group++) {
        const int first = t->starts[group], end = t->starts[group + 1];
        bases base = {m_type == INT8 ? base_at(1, t->m.exponents[group]) : 0,
                      v_type == INT8 ? base_at(0, t->v.exponents[group]) : 0};
        if (!idle[group]) {
            encode_group(m_type, v_type, t, base, first, end);
            continue;
        }
        const int32_t top = v_type == INT8 ? encode_v_of_idle(m_type, t, base, first, end) : m_tops[group];
        if (m_type == INT8) {
            t->m.exponents[group] = exponent_of(&t->m, SIGNED_DROPPED, t->first, t->g, first, end, top);
            encode_m_of_idle(t, base_at(1, t->m.exponents[group]), first, end);
        }
    }
}

#define CASE(mechanism, m_type, v_type) \
    case (mechanism) * 100 + (m_type) * 10 + (v_type): advance(mechanism, m_type, v_type, t); break;
#define CASES_OF_V(mechanism, m_type) \
    CASE(mechanism, m_type, FP32) CASE(mechanism, m_type, BF16) CASE(mechanism, m_type, INT8) \
    CASE(mechanism, m_type, FACTORED)
#define CASES_OF_M(mechanism, v_type) \
    CASE(mechanism, FP32, v_type) CASE(mechanism, BF16, v_type) CASE(mechanism, INT8, v_type)

/* A momentum of four bits is unpacked by now. */
static void advance_tile(const job_words *w, const tile *t)
{
    const int64_t m_type = w->m.type == INT4 ? FP32 : w->m.type;
    switch (w->mechanism * 100 + m_type * 10 + w->v.type) {
        CASE(SGD, 0, 0)
        CASES_OF_M(MOMENTUM, 0)
        CASES_OF_M(ADAM, FP32)
        CASES_OF_M(ADAM, BF16)
        CASES_OF_M(ADAM, INT8)
        CASES_OF_M(ADAM, FACTORED)
        CASES_OF_V(ADAFACTOR, 0)
        CASES_OF_M(LION, 0)
        CASES_OF_M(AHEAD, 0)
        CASES_OF_M(BALANCED, FACTORED)
        CASE(AHEAD, 0, 0)
        CASE(BALANCED, 0, FACTORED)
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

/* Four bits: floats before, codes after. */
static void advance_packed(const job_words *w, tile *t, int n, float *m, float *clean_g)
{
    const float *g = t->g;
    for (int i = 0; i < n; i++)
        clean_g[i] = without_spike(g[i]);
    unpack_int4(&w->m, w->row, t->first, n, m);
    t->g = clean_g;
    t->m.data = m;
    advance_tile(w, t);
    pack_int4(&w->m, w->row, t->first, n, m, clean_g, t->m.phase);
    for (int i = 0; i < n && w->mechanism != AHEAD; i++)
        t->p[i] += g[i] - g[i]; /* as above */
}

static void update_tile(const job *job, const factors *f, const numbers *c, int64_t first, int n)
{
    const job_words *w = job->words;
    float g[TILE], clean_g[TILE], p[TILE], m[TILE + 2 * LANES], v[TILE + 2 * LANES];
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
    if (w->m.type == INT4)
        advance_packed(w, &t, n, m, clean_g);
    else
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
