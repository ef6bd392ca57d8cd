#include "../kernels.h"
#include "kv.h"
#include "lanes.h"
#include "math.h"

enum { ATTENTION_BLOCK = 64 };

/* The key or value rows of positions first..first+n. */
static void block_rows(const attention_args *a, void *const *pages, int64_t kv_head, int64_t first, int64_t n, const uint8_t **rows)
{
    for (int64_t j = 0; j < n; j++)
        rows[j] = kv_row(pages, a->page_tokens, kv_row_bytes(a->format, a->head_dim), kv_head, first + j);
}

/* Lane sum of q * k. */
static float key_dot(const attention_args *a, const float *q, const uint8_t *key)
{
    float lane[LANES] = {0}, k[LANES];
    for (int64_t d = 0; d < a->head_dim; d += LANES) {
        int64_t width = a->head_dim - d < LANES ? a->head_dim - d : LANES;
        kv_values(a->format, key, a->head_dim, d, width, k);
        for (int64_t i = 0; i < width; i++)
            lane[i] += q[d + i] * k[i];
    }
    return lane_tree(lane);
}

/* o = o * correction + sum of p * v, sixteen dimensions at a time; the first block writes its own sum. */
static void merge_values(const attention_args *a, const float *p, const uint8_t **values, int64_t n, int begins, float correction, float *o)
{
    for (int64_t d = 0; d < a->head_dim; d += LANES) {
        float acc[LANES] = {0}, v[LANES];
        int64_t width = a->head_dim - d < LANES ? a->head_dim - d : LANES;
        for (int64_t j = 0; j < n; j++) {
            kv_values(a->format, values[j], a->head_dim, d, width, v);
            for (int64_t i = 0; i < width; i++)
                acc[i] += p[j] * v[i];
        }
        for (int64_t i = 0; i < width; i++)
            o[d + i] = begins ? acc[i] : o[d + i] * correction + acc[i];
    }
}

/* Positions first..first+n into o and the running maximum m and sum l. */
static void merge_block(const attention_args *a, const float *q, int64_t kv_head, int64_t first, int64_t n, float *m, float *l, float *o)
{
    const uint8_t *k[ATTENTION_BLOCK], *v[ATTENTION_BLOCK];
    float p[ATTENTION_BLOCK], max = first > 0 ? *m : -F32_INF;
    block_rows(a, a->k_pages, kv_head, first, n, k);
    block_rows(a, a->v_pages, kv_head, first, n, v);
    for (int64_t j = 0; j < n; j++) {
        p[j] = key_dot(a, q, k[j]) * a->scale;
        max = p[j] > max ? p[j] : max;
    }
    for (int64_t j = 0; j < n; j++)
        p[j] = f32_exp(p[j] - max);
    float sum = lane_sum(p, n), correction = first > 0 ? f32_exp(*m - max) : 0.0f;
    merge_values(a, p, v, n, first == 0, correction, o);
    *l = first > 0 ? *l * correction + sum : sum;
    *m = max;
}

void scalar_attention(const attention_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        int64_t seen = *a->start + item / a->heads + 1, kv_head = item % a->heads / (a->heads / a->kv_heads);
        const float *q = a->q + item * a->head_dim;
        float *o = a->o + item * a->head_dim, m = 0.0f, l = 0.0f;
        for (int64_t first = 0; first < seen; first += ATTENTION_BLOCK) {
            int64_t n = seen - first < ATTENTION_BLOCK ? seen - first : ATTENTION_BLOCK;
            merge_block(a, q, kv_head, first, n, &m, &l, o);
        }
        for (int64_t i = 0; i < a->head_dim; i++)
            o[i] /= l;
    }
}
