/* A vector is eight pairs of a head: elements j..j+7 and j+half..j+half+7. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

INLINE AVX2 void turn(float *x, float *y, const float *cos, const float *sin, int64_t left)
{
    __m256 xj = load_n(x, left), yj = load_n(y, left), c = load_n(cos, left), s = load_n(sin, left);
    store_n(x, _mm256_sub_ps(_mm256_mul_ps(xj, c), _mm256_mul_ps(yj, s)), left);
    store_n(y, mul_add(_mm256_mul_ps(yj, c), xj, s), left);
}

AVX2 void avx2_rope(const rope_args *a, int64_t begin, int64_t end)
{
    int64_t half = a->half;
    for (int64_t item = begin; item < end; item++) {
        float *x = a->x + item * a->head_dim, *y = x + half;
        const float *cos = a->cos + item / a->heads * half, *sin = a->sin + item / a->heads * half;
        int64_t j = 0;
        for (; j + 8 <= half; j += 8)
            turn(x + j, y + j, cos + j, sin + j, 8);
        if (j < half)
            turn(x + j, y + j, cos + j, sin + j, half - j);
    }
}
