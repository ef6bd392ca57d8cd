/* A vector is four frequencies of a token. */
#include "../kernels.h"
#include "lanes.h"
#include "math.h"

/* Positions of frequencies j..j+3, each on its own axis; those from half on repeat the last. */
static SSSE3 __m128 positions_of(const rope_tables_args *a, int64_t t, int64_t j)
{
    int32_t p[4];
    for (int i = 0; i < 4; i++) {
        int64_t frequency = j + i < a->half ? j + i : a->half - 1;
        p[i] = a->positions[a->axis[frequency] * a->tokens + t];
    }
    return _mm_cvtepi32_ps(_mm_loadu_si128((const __m128i *)p));
}

SSSE3 void ssse3_rope_tables(const rope_tables_args *a, int64_t begin, int64_t end)
{
    for (int64_t t = begin; t < end; t++)
        for (int64_t j = 0; j < a->half; j += 4) {
            int64_t left = a->half - j;
            __m128 angle = _mm_mul_ps(positions_of(a, t, j), load_n(a->inv_freq + j, left));
            store_n(a->cos + t * a->half + j, v_cos(angle), left);
            store_n(a->sin + t * a->half + j, v_sin(angle), left);
        }
}
