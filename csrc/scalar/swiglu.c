#include "../kernels.h"
#include "math.h"

void scalar_swiglu(const swiglu_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        const float *gate = a->gate_up + row * 2 * a->n, *up = gate + a->n;
        for (int64_t i = 0; i < a->n; i++)
            a->y[row * a->n + i] = f32_silu(gate[i]) * up[i];
    }
}
