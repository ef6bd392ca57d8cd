#include "../kernels.h"

void scalar_rope(const rope_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        float *x = a->x + item * a->head_dim, *y = x + a->half;
        const float *cos = a->cos + item / a->heads * a->half, *sin = a->sin + item / a->heads * a->half;
        for (int64_t j = 0; j < a->half; j++) {
            float xj = x[j], yj = y[j];
            x[j] = xj * cos[j] - yj * sin[j];
            y[j] = yj * cos[j] + xj * sin[j];
        }
    }
}
