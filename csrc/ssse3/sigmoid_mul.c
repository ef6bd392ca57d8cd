/* A vector is four elements in a row. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

SSSE3 void ssse3_sigmoid_mul(const sigmoid_mul_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->x + row * a->n, *gate = a->gate + row * a->gate_stride;
        for (int64_t i = 0; i < a->n; i += 4) {
            int64_t left = a->n - i;
            __m128 y = _mm_mul_ps(load_n(x + i, left), v_sigmoid(load_n(gate + i, left)));
            store_n(a->y + row * a->n + i, y, left);
        }
    }
}
