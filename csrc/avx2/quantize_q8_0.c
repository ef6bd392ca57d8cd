#include "../kernels.h"
#include "blocks.h"

#include <float.h>

/* Largest |x|, or NaN if there is one: vmaxps alone would pass it over. */
INLINE AVX2 float largest_magnitude(const __m256 x[4])
{
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 most[4];
    for (int i = 0; i < 4; i++)
        most[i] = _mm256_and_ps(x[i], magnitude);
    /* One comparison finds a NaN in either of two vectors. */
    __m256 unordered = _mm256_or_ps(_mm256_cmp_ps(x[0], x[1], _CMP_UNORD_Q), _mm256_cmp_ps(x[2], x[3], _CMP_UNORD_Q));
    if (_mm256_movemask_ps(unordered))
        return __builtin_nanf("");
    __m256 eight = _mm256_max_ps(_mm256_max_ps(most[0], most[1]), _mm256_max_ps(most[2], most[3]));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
}

/* vcvtps2dq rounds half to even, as MXCSR says during a kernel. */
INLINE AVX2 __m256i thirty_two_codes(const __m256 x[4], __m256 id)
{
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* the packs work on each half by itself */
    __m256i code[4];
    for (int i = 0; i < 4; i++)
        code[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], id));
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
    return _mm256_permutevar8x32_epi32(bytes, in_order);
}

INLINE AVX2 int32_t sum_of_codes(__m256i codes)
{
    __m256i eight = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

INLINE AVX2 void quantize_block(const float *from, int8_t *codes, float *d, int32_t *sum)
{
    __m256 x[4];
    for (int i = 0; i < 4; i++)
        x[i] = _mm256_loadu_ps(from + 8 * i);
    __m256i code = _mm256_setzero_si256();
    float amax = largest_magnitude(x);
    *d = amax <= FLT_MAX ? 0.0f : __builtin_nanf("");
    if (amax >= 0x1p-110f && amax <= FLT_MAX) {
        *d = amax / 127.0f;
        code = thirty_two_codes(x, _mm256_set1_ps(127.0f / amax));
    }
    _mm256_storeu_si256((__m256i *)codes, code);
    *sum = sum_of_codes(code);
}

AVX2 void avx2_quantize_q8_0(const quantize_q8_0_args *a, int64_t begin, int64_t end)
{
    int64_t blocks = a->n / BLOCK;
    for (int64_t b = begin * blocks; b < end * blocks; b++)
        quantize_block(a->x + b * BLOCK, a->codes + b * BLOCK, a->d + b, a->sums + b);
}
