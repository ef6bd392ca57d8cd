#include "../kernels.h"
#include "blocks.h"

#include <float.h>

/* Largest |x|, or NaN if there is one: maxps alone would pass it over. */
INLINE SSSE3 float largest_magnitude(const float *x)
{
    const __m128 magnitude = _mm_castsi128_ps(_mm_set1_epi32(0x7fffffff));
    __m128 most = _mm_setzero_ps(), unordered = _mm_setzero_ps();
    for (int i = 0; i < BLOCK; i += 4) {
        __m128 v = _mm_loadu_ps(x + i);
        unordered = _mm_or_ps(unordered, _mm_cmpunord_ps(v, v));
        most = _mm_max_ps(most, _mm_and_ps(v, magnitude));
    }
    if (_mm_movemask_ps(unordered))
        return __builtin_nanf("");
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_shuffle_ps(most, most, 1)));
}

/* cvtps2dq rounds half to even, as MXCSR says during a kernel. */
INLINE SSSE3 __m128i sixteen_codes(const float *x, __m128 id)
{
    __m128i code[4];
    for (int i = 0; i < 4; i++)
        code[i] = _mm_cvtps_epi32(_mm_mul_ps(_mm_loadu_ps(x + 4 * i), id));
    return _mm_packs_epi16(_mm_packs_epi32(code[0], code[1]), _mm_packs_epi32(code[2], code[3]));
}

INLINE SSSE3 int32_t sum_of_codes(__m128i first, __m128i second)
{
    const __m128i bytes = _mm_set1_epi8(1), words = _mm_set1_epi16(1);
    __m128i pairs = _mm_add_epi16(_mm_maddubs_epi16(bytes, first), _mm_maddubs_epi16(bytes, second));
    __m128i sum = _mm_madd_epi16(pairs, words);
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

INLINE SSSE3 void quantize_block(const float *x, int8_t *codes, float *d, int32_t *sum)
{
    __m128i first = _mm_setzero_si128(), second = first;
    float amax = largest_magnitude(x);
    *d = amax <= FLT_MAX ? 0.0f : __builtin_nanf("");
    if (amax >= 0x1p-110f && amax <= FLT_MAX) {
        __m128 id = _mm_set1_ps(127.0f / amax);
        *d = amax / 127.0f;
        first = sixteen_codes(x, id);
        second = sixteen_codes(x + 16, id);
    }
    _mm_storeu_si128((__m128i *)codes, first);
    _mm_storeu_si128((__m128i *)(codes + 16), second);
    *sum = sum_of_codes(first, second);
}

SSSE3 void ssse3_quantize_q8_0(const quantize_q8_0_args *a, int64_t begin, int64_t end)
{
    int64_t blocks = a->n / BLOCK;
    for (int64_t b = begin * blocks; b < end * blocks; b++)
        quantize_block(a->x + b * BLOCK, a->codes + b * BLOCK, a->d + b, a->sums + b);
}
