#include "../kernels.h"
#include "math.h"

void scalar_cos_f32(const map_args *a, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        a->y[i] = f32_cos(a->x[i]);
}
