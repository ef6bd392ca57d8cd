/* A vector is eight elements in a row. */
#include "../kernels.h"
#include "lanes.h"

AVX2 void avx2_add_bias(const add_bias_args *a, int64_t begin, int64_t end)
{
    const float *b = a->b;
    for (int64_t row = begin; row < end; row++) {
        float *x = a->x + row * a->n;
        int64_t i = 0;
        for (; i + 8 <= a->n; i += 8)
            _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(b + i)));
        if (i < a->n)
            store_n(x + i, _mm256_add_ps(load_n(x + i, a->n - i), load_n(b + i, a->n - i)), a->n - i);
    }
}
