#include "../kernels.h"
#include "math.h"

#include <float.h>

void scalar_gdn_gates(const gdn_gates_args *a, int64_t begin, int64_t end)
{
    for (int64_t token = begin; token < end; token++)
        for (int64_t h = 0; h < a->heads; h++) {
            int64_t i = token * a->heads + h;
            float rate = f32_exp(a->A_log[h]);
            rate = FLT_MAX < rate ? FLT_MAX : rate; /* infinity times a softplus of 0 would be NaN */
            a->g[i] = -(rate * f32_softplus(a->a[i] + a->dt_bias[h]));
            a->beta[i] = f32_sigmoid(a->b[i]);
        }
}
