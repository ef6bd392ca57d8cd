/* A vector is eight elements in a row; sums hold two of them, one for each vector of the 16 lanes. y holds the centred row
 * until the end. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

/* Lane sum of x. */
static AVX2 float avx2_sum_of(const float *x, int64_t n)
{
    __m256 v[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int g = 0; g < 2; g++)
            v[g] = _mm256_add_ps(v[g], _mm256_loadu_ps(x + i + 8 * g));
    for (int g = 0; g < 2 && whole + 8 * g < n; g++)
        v[g] = _mm256_add_ps(v[g], load_n(x + whole + 8 * g, n - whole - 8 * g));
    return lane_tree(v);
}

INLINE AVX2 void centre(const float *x, float *y, __m256 mean, int64_t left)
{
    store_n(y, _mm256_sub_ps(load_n(x, left), mean), left);
}

INLINE AVX2 void scale_vector(const float *w, const float *b, float *y, __m256 scale, int64_t left)
{
    store_n(y, mul_add(load_n(b, left), _mm256_mul_ps(load_n(y, left), scale), load_n(w, left)), left);
}

AVX2 void avx2_layer_norm(const layer_norm_args *a, int64_t begin, int64_t end)
{
    int64_t n = a->n;
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->x + row * n;
        float *y = a->y + row * n;
        __m256 mean = _mm256_set1_ps(avx2_sum_of(x, n) / (float)n);
        int64_t i = 0;
        for (; i + 8 <= n; i += 8)
            centre(x + i, y + i, mean, 8);
        if (i < n)
            centre(x + i, y + i, mean, n - i);
        __m256 scale = _mm256_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(y, n) / (float)n + a->eps));
        for (i = 0; i + 8 <= n; i += 8)
            scale_vector(a->w + i, a->b + i, y + i, scale, 8);
        if (i < n)
            scale_vector(a->w + i, a->b + i, y + i, scale, n - i);
    }
}
