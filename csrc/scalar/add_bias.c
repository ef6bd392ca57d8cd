#include "../kernels.h"

void scalar_add_bias(const add_bias_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < a->n; i++)
            a->x[row * a->n + i] += a->b[i];
}
