#include "../kernels.h"
#include "lanes.h"

void scalar_l2_norm(const l2_norm_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        const float *x = a->x + item / a->heads * a->token_stride + item % a->heads * a->n;
        float *y = a->y + item * a->n;
        float inverse = 1.0f / __builtin_sqrtf(lane_dot(x, x, a->n) + a->eps);
        for (int64_t i = 0; i < a->n; i++)
            y[i] = (x[i] * inverse) * a->scale;
    }
}
