/* The softmax of one query row, a span of positions at a time (kernels.h: attention). */
#ifndef FERMI_SCALAR_ATTENTION_SPAN_H
#define FERMI_SCALAR_ATTENTION_SPAN_H

#include "../kernels.h"
#include "lanes.h"
#include "math.h"

/* A span's scores, then weights, and by block what the span's sums so far are multiplied by; the running maximum and the sum of
 * the weights of all spans; what all sums before this span are multiplied by. */
typedef struct {
    float p[ATTENTION_SPAN], correction[ATTENTION_SPAN / ATTENTION_BLOCK];
    float m, l, merge;
} span;

/* Scores of positions first..first+n, a span or the beginning of one, to weights. */
static inline void weigh_span(span *s, int64_t first, int64_t n)
{
    float before = s->m, l = 0.0f;
    for (int64_t j = 0; j < n; j += ATTENTION_BLOCK) {
        int64_t count = n - j < ATTENTION_BLOCK ? n - j : ATTENTION_BLOCK;
        float *p = s->p + j, max = first + j > 0 ? s->m : -F32_INF;
        for (int64_t i = 0; i < count; i++)
            max = p[i] > max ? p[i] : max;
        for (int64_t i = 0; i < count; i++)
            p[i] = f32_exp(p[i] - max);
        float sum = lane_sum(p, count), correction = j > 0 ? f32_exp(s->m - max) : 0.0f;
        l = j > 0 ? l * correction + sum : sum;
        s->correction[j / ATTENTION_BLOCK] = correction;
        s->m = max;
    }
    s->merge = first > 0 ? f32_exp(before - s->m) : 0.0f;
    s->l = first > 0 ? s->l * s->merge + l : l;
}

#endif
