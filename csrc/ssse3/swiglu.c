/* A vector is four elements in a row. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

INLINE SSSE3 void gate_vector(const float *gate, const float *up, float *y, int64_t left)
{
    store_n(y, _mm_mul_ps(v_silu(load_n(gate, left)), load_n(up, left)), left);
}

SSSE3 void ssse3_swiglu(const swiglu_args *a, int64_t begin, int64_t end)
{
    int64_t n = a->n;
    for (int64_t row = begin; row < end; row++) {
        const float *gate = a->gate_up + row * 2 * n, *up = gate + n;
        float *y = a->y + row * n;
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            gate_vector(gate + i, up + i, y + i, 4);
        if (i < n)
            gate_vector(gate + i, up + i, y + i, n - i);
    }
}
