#include "../kernels.h"
#include "lanes.h"

void scalar_layer_norm(const layer_norm_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->x + row * a->n;
        float *y = a->y + row * a->n;
        float mean = lane_sum(x, a->n) / (float)a->n;
        for (int64_t i = 0; i < a->n; i++)
            y[i] = x[i] - mean;
        float scale = 1.0f / __builtin_sqrtf(lane_dot(y, y, a->n) / (float)a->n + a->eps);
        for (int64_t i = 0; i < a->n; i++)
            y[i] = (y[i] * scale) * a->w[i] + a->b[i];
    }
}
