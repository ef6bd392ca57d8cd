#include "../kernels.h"
#include "math.h"

void scalar_sigmoid_mul(const sigmoid_mul_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < a->n; i++)
            a->y[row * a->n + i] = a->x[row * a->n + i] * f32_sigmoid(a->gate[row * a->gate_stride + i]);
}
