/* A vector is four elements in a row; sums hold four of them, one for each vector of the 16 lanes. y holds the centred row
 * until the end. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

/* Lane sum of x. */
static SSSE3 float sum_of(const float *x, int64_t n)
{
    __m128 v[4] = {_mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps()};
    int64_t whole = n / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES)
        for (int g = 0; g < 4; g++)
            v[g] = _mm_add_ps(v[g], _mm_loadu_ps(x + i + 4 * g));
    for (int g = 0; g < 4 && whole + 4 * g < n; g++)
        v[g] = _mm_add_ps(v[g], load_n(x + whole + 4 * g, n - whole - 4 * g));
    return lane_tree(v);
}

INLINE SSSE3 void centre(const float *x, float *y, __m128 mean, int64_t left)
{
    store_n(y, _mm_sub_ps(load_n(x, left), mean), left);
}

INLINE SSSE3 void scale_vector(const float *w, const float *b, float *y, __m128 scale, int64_t left)
{
    store_n(y, mul_add(load_n(b, left), _mm_mul_ps(load_n(y, left), scale), load_n(w, left)), left);
}

SSSE3 void ssse3_layer_norm(const layer_norm_args *a, int64_t begin, int64_t end)
{
    int64_t n = a->n;
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->x + row * n;
        float *y = a->y + row * n;
        __m128 mean = _mm_set1_ps(sum_of(x, n) / (float)n);
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            centre(x + i, y + i, mean, 4);
        if (i < n)
            centre(x + i, y + i, mean, n - i);
        __m128 scale = _mm_set1_ps(1.0f / __builtin_sqrtf(lane_square_sum(y, n) / (float)n + a->eps));
        for (i = 0; i + 4 <= n; i += 4)
            scale_vector(a->w + i, a->b + i, y + i, scale, 4);
        if (i < n)
            scale_vector(a->w + i, a->b + i, y + i, scale, n - i);
    }
}
