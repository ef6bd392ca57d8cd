/* Vector pieces shared by the kernels over stored blocks (../scalar/blocks.h has their layout). */
#ifndef FERMI_SSSE3_BLOCKS_H
#define FERMI_SSSE3_BLOCKS_H

#include "../scalar/blocks.h"
#include "target.h"

#include <tmmintrin.h>

/* Four halves, each in the upper 16 bits of its lane, to the magnitudes of their float values; finite halves only.
 * Rebiasing the exponent gives x: right for normal halves, and 2^-15 (1 + m/1024) instead of 2^-14 (m/1024) for
 * subnormals. 2x - 2^-14 is right for the latter and no less than x for the former, so the minimum is right for both;
 * no subnormal operand is met, which would cost over 100 cycles. */
INLINE SSSE3 __m128 f16_magnitude(__m128i upper)
{
    __m128i rest = _mm_and_si128(_mm_srli_epi32(upper, 3), _mm_set1_epi32(0x0fffe000));
    __m128 x = _mm_castsi128_ps(_mm_add_epi32(rest, _mm_set1_epi32(112 << 23)));
    return _mm_min_ps(x, _mm_sub_ps(_mm_add_ps(x, x), _mm_set1_ps(0x1p-14f)));
}

#endif
