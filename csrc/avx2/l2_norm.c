/* A vector is eight elements in a row; the sum of squares holds two of them, one for each vector of the 16 lanes. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

INLINE AVX2 void scale_vector(const float *x, float *y, __m256 inverse, __m256 scale, int64_t left)
{
    store_n(y, _mm256_mul_ps(_mm256_mul_ps(load_n(x, left), inverse), scale), left);
}

AVX2 void avx2_l2_norm(const l2_norm_args *a, int64_t begin, int64_t end)
{
    int64_t n = a->n;
    __m256 scale = _mm256_set1_ps(a->scale);
    for (int64_t item = begin; item < end; item++) {
        const float *x = a->x + item / a->heads * a->token_stride + item % a->heads * n;
        float *y = a->y + item * n;
        __m256 inverse = _mm256_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(x, n) + a->eps));
        int64_t i = 0;
        for (; i + 8 <= n; i += 8)
            scale_vector(x + i, y + i, inverse, scale, 8);
        if (i < n)
            scale_vector(x + i, y + i, inverse, scale, n - i);
    }
}
