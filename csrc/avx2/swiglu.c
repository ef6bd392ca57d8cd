/* A vector is eight elements in a row. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

INLINE AVX2 void gate_vector(const float *gate, const float *up, float *y, int64_t left)
{
    store_n(y, _mm256_mul_ps(v_silu(load_n(gate, left)), load_n(up, left)), left);
}

AVX2 void avx2_swiglu(const swiglu_args *a, int64_t begin, int64_t end)
{
    int64_t n = a->n;
    for (int64_t row = begin; row < end; row++) {
        const float *gate = a->gate_up + row * 2 * n, *up = gate + n;
        float *y = a->y + row * n;
        int64_t i = 0;
        for (; i + 8 <= n; i += 8)
            gate_vector(gate + i, up + i, y + i, 8);
        if (i < n)
            gate_vector(gate + i, up + i, y + i, n - i);
    }
}
