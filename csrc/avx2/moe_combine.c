/* A vector is eight elements in a row; the sums of four vectors over the slots stay in registers. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

enum { VECTORS = 4, COLUMNS = 8 * VECTORS };

/* Elements i..i+8*vectors of a token, of which `left` exist. */
INLINE AVX2 void combine(const moe_combine_args *a, int64_t t, float gate, int64_t i, int vectors, int64_t left)
{
    const float *shared = a->shared ? a->shared + t * a->n + i : NULL;
    float *y = a->y + t * a->n + i;
    __m256 sum[VECTORS];
    for (int v = 0; v < vectors; v++)
        sum[v] = _mm256_setzero_ps();
    for (int64_t slot = t * a->k; slot < (t + 1) * a->k; slot++) {
        const float *out = a->expert_out + a->row_of[slot] * a->n + i;
        __m256 weight = _mm256_set1_ps(a->weights[slot]);
        for (int v = 0; v < vectors; v++)
            sum[v] = mul_add(sum[v], weight, load_n(out + 8 * v, left - 8 * v));
    }
    for (int v = 0; v < vectors; v++) {
        if (shared)
            sum[v] = mul_add(sum[v], _mm256_set1_ps(gate), load_n(shared + 8 * v, left - 8 * v));
        store_n(y + 8 * v, sum[v], left - 8 * v);
    }
}

AVX2 void avx2_moe_combine(const moe_combine_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        float gate = a->shared ? f32_sigmoid(a->shared_gate[t]) : 0.0f;
        int64_t i = 0;
        for (; i + COLUMNS <= a->n; i += COLUMNS)
            combine(a, t, gate, i, VECTORS, COLUMNS);
        for (; i < a->n; i += 8)
            combine(a, t, gate, i, 1, a->n - i);
    }
}
