#include "../kernels.h"
#include "lanes.h"

void scalar_gemm_f32(const gemm_f32_args *a, int64_t begin, int64_t end)
{
    for (int64_t r = begin; r < end; r++)
        for (int64_t t = 0; t < a->tokens; t++)
            a->y[t * a->y_stride + r] = lane_dot(a->x + t * a->n, a->w + r * a->n, a->n);
}
