/* Vector pieces for the kernels over stored blocks; ../scalar/blocks.h has the layout. */
#ifndef FERMI_AVX2_BLOCKS_H
#define FERMI_AVX2_BLOCKS_H

#include "../scalar/blocks.h"
#include "target.h"

#include <immintrin.h>

INLINE AVX2 __m256i load_bytes(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

/* Eight halves that are no NaN as floats. The instruction has no slow case for subnormal ones. */
INLINE AVX2 __m256 f16_numbers(const void *halves)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
}

/* Any eight halves as floats. The instruction sets the quiet bit of a NaN, which has to stay as it is. */
INLINE AVX2 __m256 f16_values(const void *halves)
{
    const __m256i h = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)halves));
    __m256i magnitude = _mm256_and_si256(h, _mm256_set1_epi32(0x7fff));
    __m256i special = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7bff));
    __m256i not_quiet = _mm256_andnot_si256(_mm256_slli_epi32(h, 13), _mm256_set1_epi32(0x400000));
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_and_si256(special, not_quiet)), f16_numbers(halves));
}

/* y[i] = bytes[i] * d for 16 signed bytes. */
INLINE AVX2 void store_scaled(float *y, __m128i bytes, float d)
{
    const __m256 scale = _mm256_set1_ps(d);
    _mm256_storeu_ps(y, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), scale));
    bytes = _mm_srli_si128(bytes, 8);
    _mm256_storeu_ps(y + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), scale));
}

/* 16 code bytes of one row of a stored block; `qs` points at the row's first four. */
INLINE AVX2 __m128i gather_codes(const void *qs)
{
    const uint8_t *p = qs;
    int32_t piece[4];
    for (int i = 0; i < 4; i++)
        memcpy(piece + i, p + i * GROUP * 4, sizeof *piece);
    return _mm_setr_epi32(piece[0], piece[1], piece[2], piece[3]);
}

#endif
