/* A vector is eight frequencies of a token. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

/* Positions of frequencies j..j+7, each on its own axis; those from half on repeat the last. */
INLINE AVX2 __m256 positions_of(const rope_tables_args *a, int64_t t, int64_t j)
{
    int32_t p[8];
    for (int i = 0; i < 8; i++) {
        int64_t frequency = j + i < a->half ? j + i : a->half - 1;
        p[i] = a->positions[a->axis[frequency] * a->tokens + t];
    }
    return _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)p));
}

AVX2 void avx2_rope_tables(const rope_tables_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++)
        for (int64_t j = 0; j < a->half; j += 8) {
            int64_t left = a->half - j;
            __m256 angle = _mm256_mul_ps(positions_of(a, t, j), load_n(a->inv_freq + j, left));
            store_n(a->cos + t * a->half + j, v_cos(angle), left);
            store_n(a->sin + t * a->half + j, v_sin(angle), left);
        }
}
