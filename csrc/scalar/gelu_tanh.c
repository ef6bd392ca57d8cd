#include "../kernels.h"
#include "math.h"

void scalar_gelu_tanh(const map_args *a, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        a->y[i] = f32_gelu_tanh(a->x[i]);
}
