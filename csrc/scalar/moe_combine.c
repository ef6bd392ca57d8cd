#include "../kernels.h"
#include "math.h"

void scalar_moe_combine(const moe_combine_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++) {
        const float *weights = a->weights + t * a->k;
        const int32_t *rows = a->row_of + t * a->k;
        float gate = a->shared ? f32_sigmoid(a->shared_gate[t]) : 0.0f;
        for (int64_t i = 0; i < a->n; i++) {
            float sum = 0.0f;
            for (int64_t slot = 0; slot < a->k; slot++)
                sum += weights[slot] * a->expert_out[rows[slot] * a->n + i];
            if (a->shared)
                sum += gate * a->shared[t * a->n + i];
            a->y[t * a->n + i] = sum;
        }
    }
}
