/* A vector is four elements in a row; the end is filled up with zeros. */
#include "../kernels.h"
#include "lanes.h"

SSSE3 void ssse3_add(const add_args *a, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i += 4) {
        __m128 sum = _mm_add_ps(load_n(a->a + i, end - i), load_n(a->b + i, end - i));
        store_n(a->y + i, sum, end - i);
    }
}
