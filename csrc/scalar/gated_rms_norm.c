#include "../kernels.h"
#include "lanes.h"
#include "math.h"

void scalar_gated_rms_norm(const gated_rms_norm_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        const float *o = a->o + row * a->n, *z = a->z + row * a->n;
        float *y = a->y + row * a->n;
        float scale = 1.0f / __builtin_sqrtf(lane_dot(o, o, a->n) / (float)a->n + a->eps);
        for (int64_t i = 0; i < a->n; i++)
            y[i] = ((o[i] * scale) * a->w[i]) * f32_silu(z[i]);
    }
}
