/* A vector is four elements in a row; the sum of squares holds four of them, one for each vector of the 16 lanes. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

SSSE3 void ssse3_gated_rms_norm(const gated_rms_norm_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        const float *o = a->o + row * a->n, *z = a->z + row * a->n;
        float *y = a->y + row * a->n;
        __m128 scale = _mm_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(o, a->n) / (float)a->n + a->eps));
        for (int64_t i = 0; i < a->n; i += 4) {
            int64_t left = a->n - i;
            __m128 normed = _mm_mul_ps(_mm_mul_ps(load_n(o + i, left), scale), load_n(a->w + i, left));
            store_n(y + i, _mm_mul_ps(normed, v_silu(load_n(z + i, left))), left);
        }
    }
}
