/* A vector is four elements in a row. */
#include "../kernels.h"
#include "lanes.h"

SSSE3 void ssse3_add(const add_args *a, int64_t begin, int64_t end)
{
    const float *x = a->a, *z = a->b;
    float *y = a->y;
    int64_t i = begin;
    for (; i + 4 <= end; i += 4)
        _mm_storeu_ps(y + i, _mm_add_ps(_mm_loadu_ps(x + i), _mm_loadu_ps(z + i)));
    if (i < end)
        store_n(y + i, _mm_add_ps(load_n(x + i, end - i), load_n(z + i, end - i)), end - i);
}
