/* A vector is eight heads of a token. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

#include <float.h>

AVX2 void avx2_gdn_gates(const gdn_gates_args *a, int64_t begin, int64_t end)
{
    for (int64_t token = begin; token < end; token++)
        for (int64_t h = 0; h < a->heads; h += 8) {
            int64_t i = token * a->heads + h, left = a->heads - h;
            __m256 rate = _mm256_min_ps(_mm256_set1_ps(FLT_MAX), v_exp(load_n(a->A_log + h, left)));
            __m256 x = _mm256_add_ps(load_n(a->a + i, left), load_n(a->dt_bias + h, left));
            __m256 decay = _mm256_mul_ps(rate, v_softplus(x));
            store_n(a->g + i, _mm256_xor_ps(decay, _mm256_set1_ps(-0.0f)), left);
            store_n(a->beta + i, v_sigmoid(load_n(a->b + i, left)), left);
        }
}
