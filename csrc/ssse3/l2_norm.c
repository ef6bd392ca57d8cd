/* A vector is four elements in a row; the sum of squares holds four of them, one for each vector of the 16 lanes. */
#include "../kernels.h"
#include "lanes.h"

INLINE SSSE3 void scale_vector(const float *x, float *y, __m128 inverse, __m128 scale, int64_t left)
{
    store_n(y, _mm_mul_ps(_mm_mul_ps(load_n(x, left), inverse), scale), left);
}

SSSE3 void ssse3_l2_norm(const l2_norm_args *a, int64_t begin, int64_t end)
{
    int64_t n = a->n;
    __m128 scale = _mm_set1_ps(a->scale);
    for (int64_t item = begin; item < end; item++) {
        const float *x = a->x + item / a->heads * a->token_stride + item % a->heads * n;
        float *y = a->y + item * n;
        __m128 inverse = _mm_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(x, n) + a->eps));
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            scale_vector(x + i, y + i, inverse, scale, 4);
        if (i < n)
            scale_vector(x + i, y + i, inverse, scale, n - i);
    }
}
