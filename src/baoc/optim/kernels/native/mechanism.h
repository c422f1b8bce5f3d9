/* The update in fp32 math: the C side of `baoc/core/mechanisms`. */
#ifndef BAOC_MECHANISM_H
#define BAOC_MECHANISM_H

#include "codec.h"
#include "kernel.h"

typedef struct {
    float step, shrink;
    float m_keep, m_add, v_keep, v_add;
    float m_keep_small; /* m_keep, of an m that is divided by SMALL_UNIT */
    float of_m, of_grad;
    float root_scale, v_floor, root_floor, inverse_ceiling, eps;
    float root_over_step, eps_over_step;     /* Adam's denominator, divided by the step's length */
    float least_square, m_suspect, v_suspect; /* see tile.h */
} numbers;

static numbers numbers_of(const job *job, double factor)
{
    const job_scalars *s = job->scalars;
    const int adam = job->words->mechanism == ADAM;
    const double step = adam ? s->step / s->m_mass : s->step * factor;
    numbers c = {
        .step = (float)step,
        .shrink = (float)s->shrink,
        .m_keep = (float)s->m_keep,
        .m_keep_small = (float)s->m_keep * SMALL_UNIT,
        .m_add = (float)s->m_add,
        .v_keep = (float)s->v_keep,
        .v_add = (float)s->v_add,
        .of_m = (float)s->of_m,
        .of_grad = job->words->m.type ? (float)s->of_grad : 1.0f,
        .root_scale = (float)(adam ? 1.0 / s->v_mass_sqrt : 0.0),
        .v_floor = (float)s->v_floor,
        .root_floor = (float)sqrt(s->v_floor),
        .inverse_ceiling = (float)(1.0 / sqrt(s->v_floor)),
        .eps = (float)s->eps,
        .root_over_step = (float)(adam ? 1.0 / s->v_mass_sqrt / step : 0.0),
        .eps_over_step = (float)(s->eps / step),
        .least_square = (float)(FLT_MIN / s->v_add),
        .m_suspect = (float)(SPIKE * fabs(s->m_add) / 4),
        .v_suspect = (float)((double)SPIKE * SPIKE * s->v_add / 4),
    };
    if (!isfinite(c.root_over_step) || !isfinite(c.eps_over_step)) { /* a step of no length: whatever v is, no move */
        c.root_over_step = 1.0f;
        c.eps_over_step = INFINITY;
    }
    return c;
}

/* What normalised mechanisms go by. */
INLINE vfloat look_ahead(const numbers *c, vfloat g, vfloat m)
{
    return fused_add(m, vfloat_of(c->of_m), g * c->of_grad);
}

/* How far the parameter moves. Adafactor gets 1 / v_root if v is factored, and balanced updates get their factor. Adam with
 * exact state is torch's to the last bits; what is rounded anyway does with a multiplication less. */
INLINE vfloat direction(int mechanism, int m_type, int v_type, const numbers *c, vfloat g, vfloat m, vfloat v_root)
{
    switch (mechanism) {
    case MOMENTUM: return m * c->step;
    case ADAM:
        if (m_type == FP32 && v_type == FP32)
            return m * c->step / fused_add(v_root, vfloat_of(c->root_scale), vfloat_of(c->eps));
        return m / fused_add(v_root, vfloat_of(c->root_over_step), vfloat_of(c->eps_over_step));
    case ADAFACTOR: {
        const vfloat floor = vfloat_of(c->root_floor), ceiling = vfloat_of(c->inverse_ceiling);
        if (v_type == FACTORED)
            return g * c->step * choose(less(ceiling, v_root), ceiling, v_root);
        return g * c->step / choose(less(v_root, floor), floor, v_root);
    }
    case LION: {
        const vfloat zero = {0}, ahead = look_ahead(c, g, m);
        return choose(less(zero, ahead), vfloat_of(c->step), choose(less(ahead, zero), vfloat_of(-c->step), zero));
    }
    case BALANCED: return look_ahead(c, g, m) * c->step * v_root;
    case AHEAD: return look_ahead(c, g, m) * c->step;
    default: return g * c->step;
    }
}

#endif
