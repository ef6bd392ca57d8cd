/* A vector is four elements in a row. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

SSSE3 void ssse3_swiglu(const swiglu_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        const float *gate = a->gate_up + row * 2 * a->n, *up = gate + a->n;
        for (int64_t i = 0; i < a->n; i += 4) {
            int64_t left = a->n - i;
            __m128 y = _mm_mul_ps(v_silu(load_n(gate + i, left)), load_n(up + i, left));
            store_n(a->y + row * a->n + i, y, left);
        }
    }
}
