/* A vector is four heads of a token. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

#include <float.h>

SSSE3 void ssse3_gdn_gates(const gdn_gates_args *a, int64_t begin, int64_t end)
{
    for (int64_t token = begin; token < end; token++)
        for (int64_t h = 0; h < a->heads; h += 4) {
            int64_t i = token * a->heads + h, left = a->heads - h;
            __m128 rate = _mm_min_ps(_mm_set1_ps(FLT_MAX), v_exp(load_n(a->A_log + h, left)));
            __m128 x = _mm_add_ps(load_n(a->a + i, left), load_n(a->dt_bias + h, left));
            __m128 decay = _mm_mul_ps(rate, v_softplus(x));
            store_n(a->g + i, _mm_xor_ps(decay, _mm_set1_ps(-0.0f)), left);
            store_n(a->beta + i, v_sigmoid(load_n(a->b + i, left)), left);
        }
}
