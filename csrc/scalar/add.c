#include "../kernels.h"

void scalar_add(const add_args *a, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        a->y[i] = a->a[i] + a->b[i];
}
