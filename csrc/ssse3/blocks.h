/* Vector pieces for the kernels over stored blocks; ../scalar/blocks.h has the layout. */
#ifndef FERMI_SSSE3_BLOCKS_H
#define FERMI_SSSE3_BLOCKS_H

#include "../scalar/blocks.h"
#include "target.h"

#include <tmmintrin.h>

INLINE SSSE3 __m128i load_bytes(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* Four halves, each in the upper 16 bits of its lane (the lower ones zero), to the magnitudes of their float values.
 * Finite halves only. Rebiasing the exponent gives x: right for normal halves, 2^-15 (1 + m/1024) where a subnormal
 * stands for 2^-14 (m/1024). 2x - 2^-14 is exact and right for the latter, and not below x for the former, so the
 * minimum is right for both. No subnormal operand is met on the way: one costs over 100 cycles. */
INLINE SSSE3 __m128 f16_magnitudes(__m128i halves)
{
    __m128i rest = _mm_and_si128(_mm_srli_epi32(halves, 3), _mm_set1_epi32(0x0fffe000));
    __m128 x = _mm_castsi128_ps(_mm_add_epi32(rest, _mm_set1_epi32(112 << 23)));
    return _mm_min_ps(x, _mm_sub_ps(_mm_add_ps(x, x), _mm_set1_ps(0x1p-14f)));
}

/* The same with signs, infinities and NaNs. */
INLINE SSSE3 __m128 f16_values(__m128i halves)
{
    __m128i sign = _mm_and_si128(halves, _mm_set1_epi32((int)0x80000000));
    __m128i magnitude = _mm_xor_si128(halves, sign);
    __m128i special = _mm_and_si128(_mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff0000)), _mm_set1_epi32(0x7f800000));
    __m128i value = _mm_or_si128(_mm_castps_si128(f16_magnitudes(halves)), _mm_or_si128(special, sign));
    return _mm_castsi128_ps(value);
}

/* y[i] = bytes[i] * d for 16 signed bytes. */
INLINE SSSE3 void store_scaled(float *y, __m128i bytes, float d)
{
    const __m128i zero = _mm_setzero_si128();
    const __m128i words[2] = {_mm_unpacklo_epi8(zero, bytes), _mm_unpackhi_epi8(zero, bytes)};
    for (int i = 0; i < 4; i++) {
        __m128i top = i % 2 ? _mm_unpackhi_epi16(zero, words[i / 2]) : _mm_unpacklo_epi16(zero, words[i / 2]);
        _mm_storeu_ps(y + 4 * i, _mm_mul_ps(_mm_cvtepi32_ps(_mm_srai_epi32(top, 24)), _mm_set1_ps(d)));
    }
}

/* 16 code bytes of one row of a stored block; `qs` points at the row's first four. */
INLINE SSSE3 __m128i gather_codes(const void *qs)
{
    const uint8_t *p = qs;
    int32_t piece[4];
    for (int i = 0; i < 4; i++)
        memcpy(piece + i, p + i * GROUP * 4, sizeof *piece);
    return _mm_set_epi32(piece[3], piece[2], piece[1], piece[0]);
}

#endif
