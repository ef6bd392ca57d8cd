/* A vector is four elements in a row; the sum of squares holds four of them, one for each vector of the 16 lanes. */
#include "../kernels.h"
#include "lanes.h"

SSSE3 void ssse3_rms_norm(const rms_norm_args *a, int64_t begin, int64_t end)
{
    __m128 offset = _mm_set1_ps(a->offset);
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->x + row * a->x_stride;
        float *y = a->y + row * a->y_stride;
        __m128 scale = _mm_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(x, a->n) / (float)a->n + a->eps));
        for (int64_t i = 0; i < a->n; i += 4) {
            int64_t left = a->n - i;
            __m128 weight = _mm_add_ps(offset, load_n(a->w + i, left));
            store_n(y + i, _mm_mul_ps(_mm_mul_ps(load_n(x + i, left), scale), weight), left);
        }
    }
}
