/* A vector is eight elements in a row. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

AVX2 void avx2_gelu_erf(const map_args *a, int64_t begin, int64_t end)
{
    const float *x = a->x;
    float *y = a->y;
    int64_t i = begin;
    for (; i + 8 <= end; i += 8)
        _mm256_storeu_ps(y + i, v_gelu_erf(_mm256_loadu_ps(x + i)));
    if (i < end)
        store_n(y + i, v_gelu_erf(load_n(x + i, end - i)), end - i);
}
