/* A vector is four elements in a row; the sums of four vectors over the slots stay in registers. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

enum { VECTORS = 4, COLUMNS = 4 * VECTORS };

/* Elements i..i+4*vectors of a token, of which `left` exist. */
INLINE SSSE3 void combine(const moe_combine_args *a, int64_t t, float gate, int64_t i, int vectors, int64_t left)
{
    const float *shared = a->shared ? a->shared + t * a->n + i : NULL;
    float *y = a->y + t * a->n + i;
    __m128 sum[VECTORS];
    for (int v = 0; v < vectors; v++)
        sum[v] = _mm_setzero_ps();
    for (int64_t slot = t * a->k; slot < (t + 1) * a->k; slot++) {
        const float *out = a->expert_out + a->row_of[slot] * a->n + i;
        __m128 weight = _mm_set1_ps(a->weights[slot]);
        for (int v = 0; v < vectors; v++)
            sum[v] = mul_add(sum[v], weight, load_n(out + 4 * v, left - 4 * v));
    }
    for (int v = 0; v < vectors; v++) {
        if (shared)
            sum[v] = mul_add(sum[v], _mm_set1_ps(gate), load_n(shared + 4 * v, left - 4 * v));
        store_n(y + 4 * v, sum[v], left - 4 * v);
    }
}

SSSE3 void ssse3_moe_combine(const moe_combine_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        float gate = a->shared ? f32_sigmoid(a->shared_gate[t]) : 0.0f;
        int64_t i = 0;
        for (; i + COLUMNS <= a->n; i += COLUMNS)
            combine(a, t, gate, i, VECTORS, COLUMNS);
        for (; i < a->n; i += 4)
            combine(a, t, gate, i, 1, a->n - i);
    }
}
