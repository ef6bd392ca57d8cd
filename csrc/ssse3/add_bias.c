/* A vector is four elements in a row. */
#include "../kernels.h"
#include "lanes.h"

SSSE3 void ssse3_add_bias(const add_bias_args *a, int64_t begin, int64_t end)
{
    const float *b = a->b;
    for (int64_t row = begin; row < end; row++) {
        float *x = a->x + row * a->n;
        int64_t i = 0;
        for (; i + 4 <= a->n; i += 4)
            _mm_storeu_ps(x + i, _mm_add_ps(_mm_loadu_ps(x + i), _mm_loadu_ps(b + i)));
        if (i < a->n)
            store_n(x + i, _mm_add_ps(load_n(x + i, a->n - i), load_n(b + i, a->n - i)), a->n - i);
    }
}
