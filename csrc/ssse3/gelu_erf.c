/* A vector is four elements in a row; the end is filled up with zeros. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

SSSE3 void ssse3_gelu_erf(const map_args *a, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i += 4)
        store_n(a->y + i, v_gelu_erf(load_n(a->x + i, end - i)), end - i);
}
