#include "../kernels.h"
#include "lanes.h"

void scalar_rms_norm(const rms_norm_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->x + row * a->x_stride;
        float *y = a->y + row * a->y_stride;
        float scale = 1.0f / __builtin_sqrtf(lane_dot(x, x, a->n) / (float)a->n + a->eps);
        for (int64_t i = 0; i < a->n; i++)
            y[i] = (x[i] * scale) * (a->offset + a->w[i]);
    }
}
