#include "attention_span.h"
#include "kv.h"

/* The key or value rows of positions first..first+n. */
static void span_rows(const attention_args *a, void *const *pages, int64_t kv_head, int64_t first, int64_t n, const uint8_t **rows)
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

/* Sums of p * v of positions first..first+n, a block at a time, then into o; sixteen dimensions at a time. */
static void merge_values(const attention_args *a, const span *s, const uint8_t **values, int64_t first, int64_t n, float *o)
{
    for (int64_t d = 0; d < a->head_dim; d += LANES) {
        float sum[LANES] = {0}, v[LANES];
        int64_t width = a->head_dim - d < LANES ? a->head_dim - d : LANES;
        for (int64_t b = 0; b * ATTENTION_BLOCK < n; b++) {
            float acc[LANES] = {0};
            for (int64_t j = b * ATTENTION_BLOCK; j < n && j < (b + 1) * ATTENTION_BLOCK; j++) {
                kv_values(a->format, values[j], a->head_dim, d, width, v);
                for (int64_t i = 0; i < width; i++)
                    acc[i] += s->p[j] * v[i];
            }
            for (int64_t i = 0; i < width; i++)
                sum[i] = b > 0 ? sum[i] * s->correction[b] + acc[i] : acc[i];
        }
        for (int64_t i = 0; i < width; i++)
            o[d + i] = first > 0 ? o[d + i] * s->merge + sum[i] : sum[i];
    }
}

/* Positions first..first+n, a span or the beginning of one, into o and the sums of s. */
static void merge_span(const attention_args *a, const float *q, int64_t kv_head, int64_t first, int64_t n, span *s, float *o)
{
    const uint8_t *rows[ATTENTION_SPAN];
    span_rows(a, a->k_pages, kv_head, first, n, rows);
    for (int64_t j = 0; j < n; j++)
        s->p[j] = key_dot(a, q, rows[j]) * a->scale;
    weigh_span(s, first, n);
    span_rows(a, a->v_pages, kv_head, first, n, rows);
    merge_values(a, s, rows, first, n, o);
}

void scalar_attention(const attention_args *a, int64_t begin, int64_t end)
{
    span s;
    for (int64_t item = begin; item < end; item++) {
        int64_t seen = *a->start + item / a->heads + 1, kv_head = item % a->heads / (a->heads / a->kv_heads);
        float *o = a->o + item * a->head_dim;
        s.m = s.l = 0.0f;
        for (int64_t first = 0; first < seen; first += ATTENTION_SPAN) {
            int64_t n = seen - first < ATTENTION_SPAN ? seen - first : ATTENTION_SPAN;
            merge_span(a, a->q + item * a->head_dim, kv_head, first, n, &s, o);
        }
        for (int64_t i = 0; i < a->head_dim; i++)
            o[i] /= s.l;
    }
}
