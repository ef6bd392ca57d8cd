/* A vector is eight elements in a row; the sum of squares holds two of them, one for each vector of the 16 lanes. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

INLINE AVX2 void gate_vector(const float *o, const float *z, const float *w, float *y, __m256 scale, int64_t left)
{
    __m256 normed = _mm256_mul_ps(_mm256_mul_ps(load_n(o, left), scale), load_n(w, left));
    store_n(y, _mm256_mul_ps(normed, v_silu(load_n(z, left))), left);
}

AVX2 void avx2_gated_rms_norm(const gated_rms_norm_args *a, int64_t begin, int64_t end)
{
    const float *w = a->w;
    int64_t n = a->n;
    for (int64_t row = begin; row < end; row++) {
        const float *o = a->o + row * n, *z = a->z + row * n;
        float *y = a->y + row * n;
        __m256 scale = _mm256_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(o, n) / (float)n + a->eps));
        int64_t i = 0;
        for (; i + 8 <= n; i += 8)
            gate_vector(o + i, z + i, w + i, y + i, scale, 8);
        if (i < n)
            gate_vector(o + i, z + i, w + i, y + i, scale, n - i);
    }
}
