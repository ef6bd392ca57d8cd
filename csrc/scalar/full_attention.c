#include "attention_span.h"

/* Sum of p * v over positions begin..end of a window, whose values of one dimension are v, v + step, ... */
static float block_sum(const span *s, const float *v, int64_t step, int64_t begin, int64_t end)
{
    float acc = 0.0f;
    for (int64_t j = begin; j < end; j++)
        acc += s->p[j] * v[j * step];
    return acc;
}

/* Positions first..first+n of a window, a span or the beginning of one, into o and the sums of s; k and v are the rows of the
 * first of them. */
static void merge_span(const full_attention_args *a, const float *q, const float *k, const float *v, int64_t first, int64_t n,
                       span *s, float *o)
{
    int64_t step = a->heads * a->head_dim;
    for (int64_t j = 0; j < n; j++)
        s->p[j] = lane_dot(q, k + j * step, a->head_dim) * a->scale;
    weigh_span(s, first, n);
    for (int64_t d = 0; d < a->head_dim; d++) {
        float sum = 0.0f;
        for (int64_t b = 0; b * ATTENTION_BLOCK < n; b++) {
            int64_t end = (b + 1) * ATTENTION_BLOCK;
            float acc = block_sum(s, v + d, step, b * ATTENTION_BLOCK, end < n ? end : n);
            sum = b > 0 ? sum * s->correction[b] + acc : acc;
        }
        o[d] = first > 0 ? o[d] * s->merge + sum : sum;
    }
}

void scalar_full_attention(const full_attention_args *a, int64_t begin, int64_t end)
{
    span s;
    for (int64_t item = begin; item < end; item++) {
        int64_t window = item / a->heads / a->window, head = item % a->heads, step = a->heads * a->head_dim;
        const float *k = a->k + window * a->window * step + head * a->head_dim, *v = a->v + (k - a->k);
        float *o = a->o + item * a->head_dim;
        s.m = s.l = 0.0f;
        for (int64_t first = 0; first < a->window; first += ATTENTION_SPAN) {
            int64_t n = a->window - first < ATTENTION_SPAN ? a->window - first : ATTENTION_SPAN;
            merge_span(a, a->q + item * a->head_dim, k + first * step, v + first * step, first, n, &s, o);
        }
        for (int64_t d = 0; d < a->head_dim; d++)
            o[d] /= s.l;
    }
}
