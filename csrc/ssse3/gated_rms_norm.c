/* A vector is four elements in a row; the sum of squares holds four of them, one for each vector of the 16 lanes. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

INLINE SSSE3 void gate_vector(const float *o, const float *z, const float *w, float *y, __m128 scale, int64_t left)
{
    __m128 normed = _mm_mul_ps(_mm_mul_ps(load_n(o, left), scale), load_n(w, left));
    store_n(y, _mm_mul_ps(normed, v_silu(load_n(z, left))), left);
}

SSSE3 void ssse3_gated_rms_norm(const gated_rms_norm_args *a, int64_t begin, int64_t end)
{
    const float *w = a->w;
    int64_t n = a->n;
    for (int64_t row = begin; row < end; row++) {
        const float *o = a->o + row * n, *z = a->z + row * n;
        float *y = a->y + row * n;
        __m128 scale = _mm_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(o, n) / (float)n + a->eps));
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            gate_vector(o + i, z + i, w + i, y + i, scale, 4);
        if (i < n)
            gate_vector(o + i, z + i, w + i, y + i, scale, n - i);
    }
}
