/* A vector is four elements in a row. */
#include "../kernels.h"
#include "lanes.h"

INLINE SSSE3 void mean_vector(const group_mean_args *a, const float *x, float *y, int64_t left)
{
    __m128 sum = load_n(x, left);
    for (int64_t j = 1; j < a->group; j++)
        sum = _mm_add_ps(sum, load_n(x + j * a->n, left));
    store_n(y, _mm_div_ps(sum, _mm_set1_ps((float)a->group)), left);
}

SSSE3 void ssse3_group_mean(const group_mean_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        const float *x = a->x + row * a->group * a->n;
        float *y = a->y + row * a->n;
        int64_t i = 0;
        for (; i + 4 <= a->n; i += 4)
            mean_vector(a, x + i, y + i, 4);
        if (i < a->n)
            mean_vector(a, x + i, y + i, a->n - i);
    }
}
