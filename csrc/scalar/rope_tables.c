#include "../kernels.h"
#include "math.h"

void scalar_rope_tables(const rope_tables_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++)
        for (int64_t j = 0; j < a->half; j++) {
            float angle = (float)a->positions[a->axis[j] * a->tokens + t] * a->inv_freq[j];
            a->cos[t * a->half + j] = f32_cos(angle);
            a->sin[t * a->half + j] = f32_sin(angle);
        }
}
