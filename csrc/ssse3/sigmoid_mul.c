/* A vector is four elements in a row. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

INLINE SSSE3 void gate_vector(const float *x, const float *gate, float *y, int64_t left)
{
    store_n(y, _mm_mul_ps(load_n(x, left), v_sigmoid(load_n(gate, left))), left);
}

SSSE3 void ssse3_sigmoid_mul(const sigmoid_mul_args *a, int64_t begin, int64_t end)
{
    int64_t n = a->n;
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->x + row * n, *gate = a->gate + row * a->gate_stride;
        float *y = a->y + row * n;
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            gate_vector(x + i, gate + i, y + i, 4);
        if (i < n)
            gate_vector(x + i, gate + i, y + i, n - i);
    }
}
