/* A vector is four elements in a row; the sum of squares holds four of them, one for each vector of the 16 lanes. */
#include "../kernels.h"
#include "lanes.h"

INLINE SSSE3 void scale_vector(const float *x, const float *w, float *y, __m128 scale, __m128 offset, int64_t left)
{
    store_n(y, _mm_mul_ps(_mm_mul_ps(load_n(x, left), scale), _mm_add_ps(offset, load_n(w, left))), left);
}

SSSE3 void ssse3_rms_norm(const rms_norm_args *a, int64_t begin, int64_t end)
{
    const float *w = a->w;
    int64_t n = a->n;
    __m128 offset = _mm_set1_ps(a->offset);
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->x + row * a->x_stride;
        float *y = a->y + row * a->y_stride;
        __m128 scale = _mm_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(x, n) / (float)n + a->eps));
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            scale_vector(x + i, w + i, y + i, scale, offset, 4);
        if (i < n)
            scale_vector(x + i, w + i, y + i, scale, offset, n - i);
    }
}
