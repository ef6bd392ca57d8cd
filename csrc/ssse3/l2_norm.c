/* A vector is four elements in a row; the sum of squares holds four of them, one for each vector of the 16 lanes. */
#include "../kernels.h"
#include "lanes.h"

SSSE3 void ssse3_l2_norm(const l2_norm_args *a, int64_t begin, int64_t end)
{
    __m128 scale = _mm_set1_ps(a->scale);
    for (int64_t item = begin; item < end; item++) {
        const float *x = a->x + item / a->heads * a->token_stride + item % a->heads * a->n;
        float *y = a->y + item * a->n;
        __m128 inverse = _mm_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(x, a->n) + a->eps));
        for (int64_t i = 0; i < a->n; i += 4) {
            int64_t left = a->n - i;
            store_n(y + i, _mm_mul_ps(_mm_mul_ps(load_n(x + i, left), inverse), scale), left);
        }
    }
}
