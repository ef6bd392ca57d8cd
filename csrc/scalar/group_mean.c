#include "../kernels.h"

void scalar_group_mean(const group_mean_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < a->n; i++) {
            const float *x = a->x + row * a->group * a->n + i;
            float sum = x[0];
            for (int64_t j = 1; j < a->group; j++)
                sum += x[j * a->n];
            a->y[row * a->n + i] = sum / (float)a->group;
        }
}
