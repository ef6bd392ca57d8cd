/* A vector is four elements in a row; its sum over the slots stays in a register. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

SSSE3 void ssse3_moe_combine(const moe_combine_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        const float *weights = a->weights + t * a->k;
        const int32_t *rows = a->row_of + t * a->k;
        __m128 gate = _mm_set1_ps(a->shared ? f32_sigmoid(a->shared_gate[t]) : 0.0f);
        for (int64_t i = 0; i < a->n; i += 4) {
            int64_t left = a->n - i;
            __m128 sum = _mm_setzero_ps();
            for (int64_t slot = 0; slot < a->k; slot++) {
                __m128 out = load_n(a->expert_out + rows[slot] * a->n + i, left);
                sum = _mm_add_ps(sum, _mm_mul_ps(_mm_set1_ps(weights[slot]), out));
            }
            if (a->shared)
                sum = _mm_add_ps(sum, _mm_mul_ps(gate, load_n(a->shared + t * a->n + i, left)));
            store_n(a->y + t * a->n + i, sum, left);
        }
    }
}
