#include "../kernels.h"
#include "lanes.h"
#include "math.h"

enum { ATTENTION_BLOCK = 64 };

/* Positions first..first+n of a window into o and the running maximum m and sum l; k and v are its first rows of this head. */
static void merge_block(const full_attention_args *a, const float *q, const float *k, const float *v, int64_t first, int64_t n,
                        float *m, float *l, float *o)
{
    int64_t step = a->heads * a->head_dim;
    float p[ATTENTION_BLOCK], max = first > 0 ? *m : -F32_INF;
    for (int64_t j = 0; j < n; j++) {
        p[j] = lane_dot(q, k + (first + j) * step, a->head_dim) * a->scale;
        max = p[j] > max ? p[j] : max;
    }
    for (int64_t j = 0; j < n; j++)
        p[j] = f32_exp(p[j] - max);
    float sum = lane_sum(p, n), correction = first > 0 ? f32_exp(*m - max) : 0.0f;
    for (int64_t d = 0; d < a->head_dim; d++) {
        float acc = 0.0f;
        for (int64_t j = 0; j < n; j++)
            acc += p[j] * v[(first + j) * step + d];
        o[d] = first > 0 ? o[d] * correction + acc : acc;
    }
    *l = first > 0 ? *l * correction + sum : sum;
    *m = max;
}

void scalar_full_attention(const full_attention_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        int64_t window = item / a->heads / a->window, head = item % a->heads;
        int64_t at = (window * a->window * a->heads + head) * a->head_dim;
        float *o = a->o + item * a->head_dim, m = 0.0f, l = 0.0f;
        for (int64_t first = 0; first < a->window; first += ATTENTION_BLOCK) {
            int64_t n = a->window - first < ATTENTION_BLOCK ? a->window - first : ATTENTION_BLOCK;
            merge_block(a, a->q + item * a->head_dim, a->k + at, a->v + at, first, n, &m, &l, o);
        }
        for (int64_t d = 0; d < a->head_dim; d++)
            o[d] /= l;
    }
}
