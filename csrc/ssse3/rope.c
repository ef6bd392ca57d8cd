/* A vector is four pairs of a head: elements j..j+3 and j+half..j+half+3. */
#include "../kernels.h"
#include "lanes.h"

SSSE3 void ssse3_rope(const rope_args *a, int64_t begin, int64_t end)
{
    for (int64_t item = begin; item < end; item++) {
        float *x = a->x + item * a->head_dim, *y = x + a->half;
        const float *cos = a->cos + item / a->heads * a->half, *sin = a->sin + item / a->heads * a->half;
        for (int64_t j = 0; j < a->half; j += 4) {
            int64_t left = a->half - j;
            __m128 xj = load_n(x + j, left), yj = load_n(y + j, left);
            __m128 c = load_n(cos + j, left), s = load_n(sin + j, left);
            store_n(x + j, _mm_sub_ps(_mm_mul_ps(xj, c), _mm_mul_ps(yj, s)), left);
            store_n(y + j, _mm_add_ps(_mm_mul_ps(yj, c), _mm_mul_ps(xj, s)), left);
        }
    }
}
